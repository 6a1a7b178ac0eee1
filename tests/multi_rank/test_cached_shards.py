"""`MixedPrecisionPolicy(cache_shards=True)`: shards are cast once for all microbatches, and anew after every write.

Two models, with and without it, go through the same; whatever they compute must be the same bit by bit.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPValueError,
    MixedPrecisionPolicy,
    Owned,
    fully_shard,
    gather,
    register_fsdp_forward_method,
    step_on_owners,
    unwrap,
)
from fsdp2.optimizer_guard import GUARD
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance
from tests.harness.models import TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.multi_rank.optimizers import adamw_for_loop, adamw_foreach, adamw_fused, local_like, sgd
from tests.multi_rank.staged import HOW, reference_for, train
from tests.multi_rank.training import CASE, loss_on, trainable

HALF = torch.bfloat16
PLAIN = MixedPrecisionPolicy(HALF, torch.float32)
CACHED = dataclasses.replace(PLAIN, cache_shards=True)
ROUNDED = Tolerance(0.05, 0.02, "a sum in another order is rounded to another bfloat16 parameter")
MICROBATCHES = 3


def shard(policy: Any, case: ModelCase = CASE, model: Any = None, **options: Any) -> Any:
    """``model``, or a new one, sharded bottom-up as ``case`` says."""
    model = case.build() if model is None else model
    for unit in case.units(model):
        fully_shard(unit, mp_policy=policy, **options)
    return model


@contextmanager
def casts(counted: list[int]) -> Iterator[None]:
    """Appends to ``counted`` how many elements are copied into send buffers in each gather that does."""
    original = gather.Gather.copy_in

    def copy_in(self: gather.Gather, *args: Any) -> None:
        with mock.patch("fsdp2._torch.foreach_copy", wraps=fsdp2._torch.foreach_copy) as copied:
            original(self, *args)
        counted.extend(sum(each.numel() for each in call.args[0]) for call in copied.call_args_list)

    with mock.patch.object(gather.Gather, "copy_in", copy_in):
        yield


def microbatch(model: Any, step: int, micro: int, case: ModelCase = CASE) -> Tensor:
    loss = loss_on(case, model, step, dist.get_rank(), micro)
    loss.backward()
    return loss.detach()


def state_of(model: Any) -> list[Tensor]:
    return [local(each) for parameter in model.parameters() for each in (parameter, parameter.grad) if each is not None]


def local(value: Tensor) -> Tensor:
    return value.detach().to_local() if isinstance(value, DTensor) else value.detach()


def assert_alike(*models: Any) -> None:
    ours, theirs = map(state_of, models)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


# ---- it trains like the reference -------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("setting", ["uneven", "transformer", "tied", "offloaded", "kept", "replicated"])
def test_it_trains_like_the_reference(setting: str, how: str, world_size: int) -> None:
    case = {"transformer": TRANSFORMER, "tied": TIED}.get(setting, UNEVEN_MLP)
    options: dict[str, Any] = {
        "offloaded": {"offload_policy": CPUOffloadPolicy()},
        "kept": {"reshard_after_forward": False},
        "replicated": {"strategy": "replicate"},
    }.get(setting, {})
    reference = reference_for(
        case, world_size, how, param_dtype=HALF, grad_dtype=torch.float32, reduce_dtype=torch.float32
    )
    exact = world_size == 2 and setting != "tied"  # whose gradients add up in another order
    train(reference, shard(CACHED, case, **options), how=how, tolerance=None if exact else ROUNDED)


@multi_rank(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("setting", ["hsdp", "neighbours"])
def test_over_parts_of_the_ranks(setting: str, how: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": mesh} if setting == "hsdp" else {"reshard_after_forward": 2}
    reference = reference_for(
        UNEVEN_MLP, 4, how, param_dtype=HALF, grad_dtype=torch.float32, reduce_dtype=torch.float32
    )
    train(reference, shard(CACHED, UNEVEN_MLP, **options), how=how, tolerance=ROUNDED)


@multi_rank(2)
@pytest.mark.parametrize("how", HOW)
def test_without_a_cast_offloaded_shards_are_copied_once(how: str) -> None:
    """What is saved then is the copy to the device."""
    model = shard(MixedPrecisionPolicy(cache_shards=True), UNEVEN_MLP, offload_policy=CPUOffloadPolicy())
    train(reference_for(UNEVEN_MLP, 2, how), model, how=how, tolerance=SUM_ORDER)


# ---- how often it casts -----------------------------------------------------------------------------


def casts_of_a_step(model: Any, optimizer: torch.optim.Optimizer) -> list[int]:
    counted: list[int] = []
    with casts(counted):
        for micro in range(MICROBATCHES):
            microbatch(model, 0, micro)
    optimizer.step()
    return counted


@multi_rank(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_one_cast_per_step(reshard_after_forward: bool) -> None:
    for policy, each in ((PLAIN, MICROBATCHES * (2 if reshard_after_forward else 1)), (CACHED, 1)):
        model = shard(policy, reshard_after_forward=reshard_after_forward)
        optimizer = sgd(trainable(model))
        for _ in range(3):
            assert len(casts_of_a_step(model, optimizer)) == 3 * each, "of three groups"


@multi_rank(2)
def test_without_gradients_it_casts_in_every_forward() -> None:
    model = shard(CACHED)
    counted: list[int] = []
    with casts(counted):
        for grad_mode in (torch.no_grad, torch.inference_mode):
            for _ in range(2):
                with grad_mode():
                    loss_on(CASE, model, 0, 0)
        assert len(counted) == 2 * 2 * 3
        microbatch(model, 0, 0)
    assert len(counted) == 2 * 2 * 3 + 3


@multi_rank(2)
def test_without_the_guard_nothing_is_kept() -> None:
    model = shard(CACHED)
    optimizer = sgd(trainable(model))
    GUARD.remove()
    for _ in range(2):
        assert len(casts_of_a_step(model, optimizer)) == 2 * MICROBATCHES * 3 - MICROBATCHES, "the root's stays"
    fully_shard(nn.Linear(2, 2))
    assert len(casts_of_a_step(model, optimizer)) == 3


# ---- writes between microbatches --------------------------------------------------------------------


def halve(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 0.5)


def halve_locals(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(0.5)


def halve_locals_at_once(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([parameter.to_local() for parameter in model.parameters()], 0.5)


def halve_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.to_local().mul_(0.5)


def halve_detached(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.detach().mul_(0.5)


def halve_at_once_and_say_so(model: Any) -> None:
    """DTensor's operators on lists move no counter."""
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.5)
    torch.autograd.graph.increment_version(parameters)


def halve_what_state_dicts_show(model: Any) -> None:
    """As `torch.distributed.checkpoint.load` does; no counter moves, but a state dict was asked for."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.to_local().mul_(0.5)


def load(model: Any, *, assign: bool = False) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def load_assigning(model: Any) -> None:
    load(model, assign=True)


def replace(model: Any) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = parameter.detach().full_tensor() * 0.5
                new = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                setattr(module, name, nn.Parameter(new))


def set_storage(model: Any) -> None:
    """The local tensors lie elsewhere then, where gathers do not look: the same with and without a cache."""
    for parameter in model.parameters():
        parameter._local_tensor.set_(parameter.to_local().detach() * 0.5)


def convert(model: Any) -> None:
    model.double()
    halve(model)
    model.float()


def move(model: Any) -> None:
    """The same place: no values move, but parameters have other counters."""
    model.to("cpu")
    halve(model)


def freeze_and_write(model: Any) -> None:
    halve(model)
    model[0].weight.requires_grad_(False)


def initialize(model: Any) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(parameter.detach().full_tensor().mean()) + 0.125)


WRITES = [
    halve,
    halve_locals,
    halve_locals_at_once,
    halve_in_inference_mode,
    halve_detached,
    halve_at_once_and_say_so,
    halve_what_state_dicts_show,
    load,
    load_assigning,
    replace,
    set_storage,
    convert,
    move,
    freeze_and_write,
    initialize,
]


@multi_rank(2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("offloaded", [False, True], ids=["", "offloaded"])
def test_writes_between_microbatches_are_seen(offloaded: bool, write: Callable[[Any], None]) -> None:
    options = {"offload_policy": CPUOffloadPolicy()} if offloaded else {}
    models = [shard(policy, **options) for policy in (PLAIN, CACHED)]
    for micro in range(MICROBATCHES):
        losses = [microbatch(model, 0, micro) for model in models]
        assert torch.equal(*losses)
        assert_alike(*models)
        for model in models:
            model.reshard()
            before = [local(parameter).clone() for parameter in model.parameters()]
            write(model)
            assert not all(map(torch.equal, before, map(local, model.parameters())))


@multi_rank(2)
@pytest.mark.parametrize("make", [sgd, adamw_for_loop, adamw_foreach, adamw_fused])
@pytest.mark.parametrize("how", ["plain", "each", "flat", "locals", "hooks", "replaced guard"])
def test_steps_are_seen(how: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Of every implementation, also of optimizers that hold the local tensors themselves."""
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    steps = [step_of(model, how, make) for model in models]
    for step in range(3):
        for micro in range(2):
            losses = [microbatch(model, step, micro) for model in models]
            assert torch.equal(*losses)
        for each in steps:
            each()
        assert_alike(*models)


@multi_rank(2)
@pytest.mark.parametrize("make", [sgd, adamw_foreach, adamw_fused])
def test_steps_on_owners_are_seen(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    models = [shard(policy, shard_placement_fn=_owned_if_matrix) for policy in (PLAIN, CACHED)]
    optimizers = [make([p for p in model.parameters() if p.ndim == 2]) for model in models]
    for step in range(3):
        for micro in range(2):
            assert torch.equal(*(microbatch(model, step, micro) for model in models))
        for optimizer in optimizers:
            step_on_owners(optimizer)
        assert_alike(*models)


def _owned_if_matrix(parameter: nn.Parameter) -> Owned | None:
    return Owned(parameter.shape[0] % 2) if parameter.ndim == 2 else None


def step_of(model: Any, how: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], object]:
    if how == "locals":
        return lambda: step_on_locals(model, make)
    if how == "hooks":
        for parameter in model.parameters():
            one = make([parameter])
            parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
        return lambda: None
    optimizer = make(trainable(model))
    if how in ("each", "flat"):
        optimizer = local_like(optimizer, flat=how == "flat")
    if how == "replaced guard":
        GUARD.remove()
        fully_shard(nn.Linear(2, 2))
    return optimizer.step


def step_on_locals(model: Any, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    locals_ = []
    for parameter in model.parameters():
        one = parameter.detach().to_local()
        one.requires_grad_().grad = parameter.grad.to_local()
        locals_.append(one)
    make(locals_).step()


class Ascent(torch.optim.Optimizer):
    """Steps in two halves, between which a closure runs, all writes by DTensor's operators on lists."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        parameters = self.param_groups[0]["params"]
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(parameters, [p.grad for p in parameters], alpha=0.5)
        return loss


@multi_rank(2)
def test_a_closure_within_a_step_sees_what_was_written_before() -> None:
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    optimizers = [Ascent(trainable(model)) for model in models]
    for step in range(3):
        for model in models:
            microbatch(model, step, 0)
        losses = [
            each.step(lambda model=model, step=step: microbatch(model, step, 1))
            for each, model in zip(optimizers, models, strict=True)
        ]
        assert torch.equal(*losses)
    assert_alike(*models)


@multi_rank(2)
def test_averages_are_swapped_in_and_out() -> None:
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    averages = [[parameter.detach().clone() * 0.5 for parameter in model.parameters()] for model in models]
    for micro in range(3):
        assert torch.equal(*(microbatch(model, 0, micro) for model in models))
        kept = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
        for values in (averages, kept):
            with torch.no_grad():
                for model, of_model in zip(models, values, strict=True):
                    for parameter, value in zip(model.parameters(), of_model, strict=True):
                        parameter.copy_(value)
                assert torch.equal(*(loss_on(CASE, model, 0, 0) for model in models))
    assert_alike(*models)


# ---- what else a group may be -----------------------------------------------------------------------


class Several(nn.Module):
    """Parameters of three dtypes, small and large, in one group; and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.small = nn.Parameter(torch.randn(5, 3))
        self.large = nn.Parameter(torch.randn(64, 256) / 16)
        self.low = nn.Parameter(torch.randn(7, 3).to(HALF))
        self.count = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) + (x.float() @ self.large.float()).square().sum() * self.count.sum()

    def other(self, x: Tensor) -> Tensor:
        return x.sum() * (self.small.float().sum() + self.low.float().square().sum())


@multi_rank(2, 4)
@pytest.mark.parametrize("some", [False, True], ids=["all", "one asks"])
def test_several_dtypes_in_a_group(some: bool) -> None:
    def function(fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        return CACHED if fqn == "large" else MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)

    def plain(fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        return dataclasses.replace(function(fqn, parameter), cache_shards=False)

    models = []
    for policy in (plain, function) if some else (PLAIN, CACHED):
        model = fully_shard(Several(), mp_policy=policy)
        register_fsdp_forward_method(model, "other")
        models.append(model)
    for micro in range(3):
        for model in models:
            (model(torch.ones(2, 64) * (micro + 1)).float() + model.other(torch.ones(2)).float()).backward()
        assert_alike(*models)
        if micro == 1:
            for model in models:
                model.reshard()
                with torch.no_grad():
                    model.low.to_local().mul_(0.5)


@multi_rank(2)
def test_copies_and_pickles_keep_a_cache_of_their_own() -> None:
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    for model in models:
        microbatch(model, 0, 0)
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        copies = [copied(model) for model in models]
        for micro in range(2):
            for model in copies:
                halve_locals(model)
            losses = [microbatch(model, 0, micro) for model in (*copies, *models)]
            assert torch.equal(losses[0], losses[1])
            assert torch.equal(losses[2], losses[3])
            assert not torch.equal(losses[0], losses[2])
        optimizer = sgd(trainable(copies[1]))
        assert len(casts_of_a_step(copies[1], optimizer)) <= 3
        assert len(casts_of_a_step(copies[1], optimizer)) == 3


@multi_rank(2)
def test_a_second_call_must_ask_for_the_same() -> None:
    model = shard(CACHED)
    assert shard(CACHED, CASE, model) is model
    with pytest.raises(FSDPValueError, match="another argument 'mp_policy'"):
        fully_shard(model, mp_policy=PLAIN)
    unwrap(model)
    shard(PLAIN, CASE, model)
    assert len(casts_of_a_step(model, sgd(trainable(model)))) > 3


@multi_rank(2)
def test_an_exception_while_casting_leaves_nothing_that_looks_cast() -> None:
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    for model in models:
        microbatch(model, 0, 0)
        model.reshard()
        halve(model)
    broken = mock.patch("fsdp2._torch.foreach_copy", side_effect=RuntimeError("out of memory"))
    with broken, pytest.raises(RuntimeError, match="out of memory"):
        microbatch(models[1], 0, 1)
    assert torch.equal(*(microbatch(model, 0, 1) for model in models))
