"""Features that meet: one inside of another, after another, or where one rank alone is refused."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2.api import unwrap as unwrapping
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.root import FSDPRoot
from tests.harness import multi_rank
from tests.harness.internals import ISSUE_GATHER


def stack(seed: int = 0, layers: int = 3, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def sharded(model: Any, **arguments: Any) -> Any:
    for block in model:
        fsdp2.fully_shard(block, **arguments)
    return fsdp2.fully_shard(model, **arguments)


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in model.parameters()]


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def counted_gathers() -> Any:
    """A context; its value is the list of groups that gather inside."""
    found: list[FSDPParamGroup] = []
    issue = ISSUE_GATHER.function

    def issued(self: FSDPParamGroup, *arguments: Any) -> Any:
        found.append(self)
        return issue(self, *arguments)

    return ISSUE_GATHER.replaced_by(issued), found


# ---- parameters that are replaced, and come back ------------------------------------------------------


@multi_rank(2)
def test_a_parameter_that_comes_back_ends_the_search_for_its_replacement(world_size: int) -> None:
    """As an average of weights does that is swapped in for an evaluation."""
    plain, model = stack(), sharded(stack())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    trained = dict(model.named_parameters())
    average = {name: nn.Parameter(each.detach().clone()) for name, each in trained.items()}
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(inputs(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for values in (average, trained):  # in, and back
            for name, value in values.items():
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, value)
            with torch.no_grad():
                model(inputs(9))
    twin = copy.deepcopy(model)
    for expected, one, other in zip(plain.parameters(), whole(model), whole(twin), strict=True):
        torch.testing.assert_close(one, expected.detach())
        assert torch.equal(one, other)


@multi_rank(2)
def test_what_an_accumulation_refuses_to_unfreeze_is_trained_after_it(world_size: int) -> None:
    model = sharded(stack(), offload_policy=fsdp2.CPUOffloadPolicy(parameters=False, gradients=True, pin_memory=False))
    frozen = model[1][0].bias
    frozen.requires_grad_(False)
    model.set_is_last_backward(False)
    model(inputs()).sum().backward()
    frozen.requires_grad_(True)
    with pytest.raises(fsdp2.FSDPRuntimeError, match="wait"):
        model(inputs()).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    model.zero_grad()
    model.reset_iter_state()
    model.set_is_last_backward(True)
    model(inputs()).sum().backward()
    assert frozen.grad is not None
    plain = stack()
    plain(inputs()).sum().backward()
    torch.testing.assert_close(frozen.grad.full_tensor(), plain[1][0].bias.grad)


# ---- writes between a forward and its backward --------------------------------------------------------


@multi_rank(1, 2)
@pytest.mark.parametrize("strategy", ["replicate", "zero2"])
def test_a_step_between_forward_and_backward_is_refused_where_parameters_lie_in_place(
    strategy: str, world_size: int
) -> None:
    """Plain torch refuses it, too; here the forward has saved views of what the step writes."""
    model = sharded(stack(), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs()).square().sum().backward()
    loss = model(inputs(1)).square().sum()
    lies_in_place = all(group.storage.lies_in_place for group in model._get_fsdp_state().root.groups)
    assert lies_in_place == (strategy == "replicate" or world_size == 1)
    optimizer.step()
    if not lies_in_place:
        loss.backward()
        return
    with pytest.raises(fsdp2.FSDPRuntimeError, match="between a forward and its backward"):
        loss.backward()
    optimizer.zero_grad()
    model(inputs(2)).square().sum().backward()
    optimizer.step()


class Scaled(nn.Module):
    """Autograd saves the parameter itself for its backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


@multi_rank(4)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_backward_of_overwritten_values_is_refused_under_tensor_parallelism(reshard: bool, world_size: int) -> None:
    """A second forward has gathered the new values, so nothing else shows that the first had others."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Scaled()
    parallelize_module(model, meshes["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fsdp2.fully_shard(model, mesh=meshes["dp"], reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs()).square().sum().backward()
    first = model(inputs(1)).square().sum()
    optimizer.step()
    second = model(inputs(2)).square().sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|between a forward and its backward"):
        first.backward()
    del first, second
    model.reset_iter_state()
    optimizer.zero_grad()
    model(inputs(2)).square().sum().backward()
    optimizer.step()


# ---- gathered ahead, or there already ------------------------------------------------------------------


class TwoWays(nn.Module):
    """Forwards that skip a layer, or do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))  # so that the root is gathered, and something ahead of the first

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        if both:
            x = self.first(x)
        return self.second(x) * self.scale


@multi_rank(2)
def test_forwards_of_other_ways_gather_nothing_twice_in_inference(world_size: int) -> None:
    model: Any = TwoWays()
    for layer in (model.first, model.second, model):
        fsdp2.fully_shard(layer)
    with fsdp2.inference(model):
        for both in (True, True, False):
            model(inputs(), both)
        patched, found = counted_gathers()
        with patched:
            for both in (False, True, False, True):
                model(inputs(), both)
        assert not found


@multi_rank(2)
def test_a_failed_forward_frees_nothing_that_was_whole_before(world_size: int) -> None:
    """So that the next one gathers on no rank, whichever of them failed, where parameters stay for a step."""
    model = sharded(stack(), strategy="zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(inputs(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with fsdp2.accumulate(model, last=False):
        model(inputs()).sum().backward()
    fails = dist.get_rank() == 0
    handle = model[0][1].register_forward_hook(lambda *_: 1 / 0) if fails else None
    if handle is not None:
        with pytest.raises(ZeroDivisionError):
            model(inputs())
        handle.remove()
    patched, found = counted_gathers()
    with patched:
        model(inputs()).sum().backward()
    assert not found


# ---- one rank alone is refused -------------------------------------------------------------------------


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@multi_rank(4, timeout=40)
@pytest.mark.parametrize("action", ["full_parameters", "unwrap"])
def test_what_one_rank_of_two_dims_refuses_no_rank_begins(action: str, world_size: int) -> None:
    """The rank that shares neither dim with it hears of it from those that do."""
    model = sharded(stack(), mesh=hybrid())
    model(inputs()).sum().backward()
    if dist.get_rank() == 0:
        model[1][0].weight.grad = torch.zeros(8, 8)
    before = whole(model)
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"gradient .*set to|Difference"):
        if action == "unwrap":
            fsdp2.unwrap(model)
        else:
            with fsdp2.full_parameters(model, with_grads=True):
                raise AssertionError("it is refused")
    for one, other in zip(before, whole(model), strict=True):
        assert torch.equal(one, other)


@multi_rank(4, timeout=40)
def test_plans_that_differ_on_one_rank_are_shown_on_all(world_size: int) -> None:
    model = stack()
    if dist.get_rank() == 0:
        model[1][0].bias.requires_grad_(False)
    sharded(model, mesh=hybrid())
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"(?s)the ranks have different plans.*bias"):
        model(inputs())


@multi_rank(2, timeout=40)
def test_ranks_of_which_one_has_a_mesh_more_are_told(world_size: int) -> None:
    """The others do not take part in what that mesh would compare."""
    model = stack()
    for block in model:
        fsdp2.fully_shard(block, strategy="replicate" if block is model[0] and dist.get_rank() == 0 else None)
    fsdp2.fully_shard(model)
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"the ranks have different plans"):
        model(inputs())
    dist.barrier()


@multi_rank(4, timeout=40)
@pytest.mark.parametrize("action", ["forward", "unwrap"])
def test_what_one_mesh_of_experts_refuses_all_ranks_hear_of(action: str, world_size: int) -> None:
    """Two of four ranks have that mesh; the other two have another."""
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    model = stack()
    expert = model[1]
    own = fsdp2.ShardPlacementResult(None, fsdp2.FSDPMeshInfo(meshes["edp"], 0))
    fsdp2.fully_shard(expert, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=lambda parameter: own)
    sharded(nn.Sequential(model[0], model[2]), mesh=init_device_mesh("cpu", (4,)))
    fsdp2.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    if action == "unwrap":
        model(inputs()).sum().backward()
    if dist.get_rank() == 0:
        if action == "forward":
            expert[0].weight.requires_grad_(False)
        else:
            expert[0].weight.grad = torch.zeros(8, 8)
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"(?s)sharded like|weight"):
        fsdp2.unwrap(model) if action == "unwrap" else model(inputs())
    dist.barrier()


@multi_rank(2, timeout=40)
def test_ranks_that_unwrap_different_numbers_of_groups_are_told(world_size: int) -> None:
    model = sharded(stack())
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"would unwrap different parameters"):
        fsdp2.unwrap(model if dist.get_rank() == 0 else model[2])
    dist.barrier()


@multi_rank(2, timeout=40)
@pytest.mark.parametrize("what", ["gradient", "data"])
def test_unwrap_is_refused_on_all_replicas(what: str, world_size: int) -> None:
    model = sharded(stack(), strategy="replicate")
    model(inputs()).sum().backward()
    if dist.get_rank() == 0:
        weight = model[1][0].weight
        if what == "gradient":
            weight.grad = torch.zeros(8, 8)
        else:
            model[1][0].weight = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(fsdp2.FSDPError):
        fsdp2.unwrap(model)
    assert isinstance(model, fsdp2.FSDPModule)


# ---- unwrapping ----------------------------------------------------------------------------------------


@multi_rank(2)
def test_unwrap_goes_on_where_memory_ended(world_size: int) -> None:
    model, plain = sharded(stack()), stack()
    whole_tensors, calls = unwrapping.whole_tensors, []

    def fails_once(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no more")
        return whole_tensors(*arguments, **named)

    with mock.patch.object(unwrapping, "whole_tensors", fails_once), pytest.raises(MemoryError):
        fsdp2.unwrap(model)
    model(inputs()).sum().backward()  # some of it is plain
    model.zero_grad()
    fsdp2.unwrap(model)
    assert not any(isinstance(each, fsdp2.FSDPModule) for each in model.modules())
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(one) is nn.Parameter and torch.equal(one, other)


@multi_rank(2)
@pytest.mark.parametrize("again", [False, True])
def test_what_is_unwrapped_is_not_prefetched(again: bool, world_size: int) -> None:
    model = sharded(stack())
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[2].set_modules_to_backward_prefetch([model[1]])
    model(inputs()).sum().backward()
    model.zero_grad()
    fsdp2.unwrap(model[1])
    if again:
        fsdp2.fully_shard(model[1])
        expected = model[1]._get_fsdp_state().unit
    else:
        fsdp2.unwrap(model)
        sharded(model)
        model[0].set_modules_to_forward_prefetch([model[1]])
        expected = model[1]._get_fsdp_state().unit
    model.zero_grad()
    model(inputs()).sum().backward()
    assert model[0]._get_fsdp_state().forward_prefetch == (expected,)


# ---- calls inside of calls -----------------------------------------------------------------------------


class Generating(nn.Module):
    """A method that calls the module, and then a layer of the root's group; a block that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Recursive()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x, 2))

    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
            x = self.head(x)
        return x


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        x = self.one(x).tanh()
        if depth:
            x = self(x, depth - 1)
        return self.two(x).tanh()


@multi_rank(2)
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_inside_of_a_call_leaves_the_parameters(grad: bool, world_size: int) -> None:
    plain, model = Generating(), Generating()
    fsdp2.fully_shard(model.block)
    fsdp2.fully_shard(model)
    fsdp2.register_fsdp_forward_method(model, "generate")
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            found, expected = model.generate(inputs(), 3), plain.generate(inputs(), 3)
        torch.testing.assert_close(found, expected)
        if grad:
            found.square().sum().backward()
            expected.square().sum().backward()
    if grad:
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    else:
        root: FSDPRoot = model._get_fsdp_state().root
        assert all(group.phase.value == "sharded" for group in root.groups)


# ---- whole parameters, under tensor parallelism --------------------------------------------------------


@multi_rank(4)
def test_a_state_dict_is_loaded_inside_of_full_parameters_under_tensor_parallelism(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = stack()
    for block in model:
        parallelize_module(block[0], mesh["tp"], ColwiseParallel(use_local_output=False))
    before = {name: each.full_tensor().clone() for name, each in model.named_parameters()}
    model = fsdp2.fully_shard(model, mesh=mesh["dp"])
    with fsdp2.full_parameters(model):
        state = {name: each.detach() * 2 for name, each in model.state_dict().items()}
        model.load_state_dict(state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), 2 * before[name]), name


# ---- ties, and copies inside of blocks -----------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize("block", [fsdp2.accumulate, fsdp2.inference])
def test_a_copy_does_not_keep_what_a_block_has_set(block: Callable[..., Any], world_size: int) -> None:
    model = sharded(stack())
    arguments = {"last": False} if block is fsdp2.accumulate else {}
    with block(model, **arguments), block(model, **arguments):
        twin = copy.deepcopy(model)
    twin(inputs()).square().sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    with torch.no_grad():
        twin(inputs())
    assert all(group.phase.value == "sharded" for group in twin._get_fsdp_state().root.groups)


# ---- narrow tensors ------------------------------------------------------------------------------------


@multi_rank(2)
def test_replicas_compare_narrow_buffers_that_lie_at_odd_places(world_size: int) -> None:
    model: Any = stack()
    model.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril()[1:])
    sharded(model, strategy="replicate")
    model(inputs()).sum().backward()
    model.mask[0, 0] = bool(dist.get_rank())
    with pytest.raises(fsdp2.FSDPRuntimeError, match="mask"):
        fsdp2.compare_parameters(model)


# ---- what stands between a forward and its backward ----------------------------------------------------


@multi_rank(1, 2)
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "replicate"])
def test_a_backward_is_refused_though_another_forward_has_gathered_what_was_written(
    strategy: str, world_size: int
) -> None:
    model = sharded(stack(), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs()).square().sum().backward()
    early = model(inputs(1)).square().sum()
    optimizer.step()
    late = model(inputs(2)).square().sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|between a forward and its backward"):
        early.backward()
    model.reset_iter_state()
    optimizer.zero_grad()
    del late
    plain = stack()
    for one, other in zip(plain.parameters(), whole(model), strict=True):
        one.data.copy_(other)
    for each in (plain, model):
        each(inputs(3)).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)


@multi_rank(2)
def test_calls_are_counted_though_steps_fail(world_size: int) -> None:
    """The first call after a failed one is a method that calls the module, and others, by turns failing and not."""
    plain, model = Generating(), Generating()
    fsdp2.fully_shard(model.block)
    fsdp2.fully_shard(model)
    fsdp2.register_fsdp_forward_method(model, "generate")
    for where in (model.block, model.head):
        handle = where.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(inputs()).sum().backward()
        handle.remove()
        with torch.no_grad():
            torch.testing.assert_close(model.generate(inputs(), 2), plain.generate(inputs(), 2))
    state = model._get_fsdp_state()
    assert state.calls == model.block._get_fsdp_state().calls == 0
    assert all(group.phase.value == "sharded" for group in state.root.groups)


class ByHand(nn.Module):
    """A method that trains by itself, as with manual optimization of other libraries: it clips, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, x: torch.Tensor, optimizer: torch.optim.Optimizer, calls: bool) -> torch.Tensor:
        optimizer.zero_grad()
        (self(x) if calls else self.head(self.body(x))).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()
        return norm


@multi_rank(2)
@pytest.mark.parametrize("calls", [False, True])
def test_a_method_may_run_backward_clip_and_step(calls: bool, world_size: int) -> None:
    plain, model = ByHand(), ByHand()
    fsdp2.fully_shard(model.body)
    fsdp2.fully_shard(model)
    fsdp2.register_fsdp_forward_method(model, "training_step")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        norms = [
            each.training_step(inputs(step), optimizer, calls)
            for each, optimizer in zip((plain, model), optimizers, strict=True)
        ]
        found = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
        torch.testing.assert_close(found, norms[0])
        (root,) = (group for group in model._get_fsdp_state().unit)
        assert all(buffers.unsharded.has_memory is False for buffers in root.storage.buffers), "it rests"
    model.reset_iter_state()
    for one, other in zip(whole(model), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach())


class Routed(nn.Module):
    """Keeps a loss that it computes after its output, and that is added to others before the backward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mlp, self.router = nn.Linear(width, width), nn.Linear(width, 4)
        self.loss: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.mlp(x).tanh()
        self.loss = self.router(x).logsumexp(-1).square().mean()
        return y


@multi_rank(2)
@pytest.mark.parametrize("width", [8, 512])  # packed; and the matrices on their own, so that memory is there early
def test_a_loss_that_a_module_computes_after_its_output(width: int, world_size: int) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(Routed(width), Routed(width), Routed(width), nn.Linear(width, 2))

    plain, model = build(), build()
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
    for step in range(3):  # the order is learned in the first
        for each in (plain, model):
            each.zero_grad()
            loss = each(x + step).square().sum()
            (loss + sum(block.loss for block in each[:3])).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad)


class Kept:
    """No list, dict or dataclass, and so not looked through for what is replaced."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


class Keeps(nn.Module):
    """Hands on an object that has what earlier ones have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: tuple[torch.Tensor, Kept]) -> tuple[torch.Tensor, Kept]:
        x, kept = given
        x = x + self.linear(x).tanh()
        kept.tensors.append(x)
        return x, kept


@multi_rank(2)
def test_what_earlier_modules_have_computed_gathers_no_later_ones(world_size: int) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(Keeps() for _ in range(4)))

    plain, model = build(), sharded(build())
    patch, gathered = counted_gathers()
    for step in range(2):
        gathered.clear()
        for each in (plain, model):
            each.zero_grad()
            kept = Kept()
            with patch:
                x, _ = each((inputs(step), kept))
                (x.sum() + sum(each.square().mean() for each in kept.tensors)).backward()
        assert len(gathered) <= 8, "once in forward, and once in backward"
        assert all(group.phase.value == "sharded" for group in model._get_fsdp_state().root.groups)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad)


@multi_rank(2)
@pytest.mark.parametrize("way", ["inference", "full_parameters"])
def test_ways_of_ranks_that_gather_nothing_are_not_learned(way: str, world_size: int) -> None:
    model = TwoWays()
    fsdp2.fully_shard(model.first)
    fsdp2.fully_shard(model.second)
    fsdp2.fully_shard(model)
    x = inputs()
    with torch.no_grad():
        expected = model(x, True)
    with fsdp2.inference(model) if way == "inference" else fsdp2.full_parameters(model), torch.no_grad():
        model(x, True)
        model(x, dist.get_rank() == 0)
    with torch.no_grad():
        assert torch.equal(model(x, True), expected)
    for _ in range(2):
        model(x, True).sum().backward()


@multi_rank(2)
def test_a_step_that_raises_counts_as_a_write(world_size: int) -> None:
    """Some of it may have been written, and parameters that stay unsharded have the values of before."""
    model = sharded(stack())
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    model(inputs()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(inputs(1)).square().sum().backward()
    update, failing = torch._foreach_addcdiv_, mock.Mock(side_effect=KeyboardInterrupt)

    def updates_and_fails(*arguments: Any, **named: Any) -> None:
        update(*arguments, **named)
        failing()

    with mock.patch.object(torch, "_foreach_addcdiv_", updates_and_fails), pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert failing.called
    optimizer.zero_grad()
    with torch.no_grad():
        found = model(inputs(2))
    model.reshard()
    plain = stack()
    with torch.no_grad():
        for one, other in zip(plain.parameters(), whole(model), strict=True):
            one.copy_(other)
        torch.testing.assert_close(found, plain(inputs(2)))


@multi_rank(2)
def test_state_dicts_keep_no_variables_of_the_program_alive(world_size: int) -> None:
    model = sharded(stack())

    def train(x: torch.Tensor) -> None:
        logits = model(x)
        logits.sum().backward()
        alive = weakref.ref(logits)
        model.state_dict()
        del logits
        assert alive() is None

    train(inputs())


@multi_rank(2)
def test_a_root_that_runs_without_gradients_keeps_no_hooks(world_size: int) -> None:
    class Teacher(nn.Linear):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = fsdp2.fully_shard(Teacher(8, 8))
    watched = []
    for step in range(3):
        model(inputs(step))
        watched.append(len(model._get_fsdp_state().root.watched._hooks))
    assert watched[0] == watched[-1] <= 2


@multi_rank(2)
def test_a_dropped_step_brings_back_no_gradient_that_was_on_its_way(world_size: int) -> None:
    plain, model = stack(), sharded(stack())
    model.set_recovery("drop_step")
    model(inputs()).sum().backward()
    model.zero_grad()
    model.set_is_last_backward(False)
    model(inputs(1)).sum().backward()
    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs(2))
    handle.remove()
    model.set_is_last_backward(True)
    for each in (plain, model):
        each(inputs(3)).sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)


@multi_rank(4, timeout=40)
def test_unwrap_is_refused_on_ranks_of_other_experts_too(world_size: int) -> None:
    """Whose own groups are all right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    model = stack(layers=2)
    fsdp2.fully_shard(model[0], mesh=mesh["dp"])
    fsdp2.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model(inputs()).sum().backward()
    if dist.get_rank() == 0:
        model[0][0].weight.grad = torch.zeros(8, 8)
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"gradient .*set to|Difference"):
        fsdp2.unwrap(model)
    assert isinstance(model[0], fsdp2.FSDPModule) and isinstance(model, fsdp2.FSDPModule)
