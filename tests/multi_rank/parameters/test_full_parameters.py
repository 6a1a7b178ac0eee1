"""`full_parameters`: whole parameters for the length of a block, beside the unsharded model."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPNotImplementedError,
    FSDPRuntimeError,
    MixedPrecisionPolicy,
    Owned,
    RowBlocks,
    full_parameters,
    fully_shard,
    unwrap,
)
from fsdp2.core.state import states_below
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_same, assert_sharded_same, gather, gradients_of, parameters_of
from tests.harness.models import CONV, FROZEN, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.reference import adamw
from tests.harness.shared.odd_parameters import ODD
from tests.harness.shared.training import shard


def hybrid(**others: Any) -> dict[str, Any]:
    size = dist.get_world_size()
    return {"mesh": init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")), **others}


def owned(parameter: nn.Parameter) -> Owned | None:
    return Owned(1) if parameter.dim() == 2 else None


def blocks(parameter: nn.Parameter) -> RowBlocks | None:
    return RowBlocks(5) if parameter.dim() else None


def last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.dim() - 1) if parameter.dim() else None


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "zero3": dict,
    "zero2": lambda: {"strategy": "zero2"},
    "replicate": lambda: {"strategy": "replicate"},
    "hybrid": hybrid,
    "alone": lambda: hybrid(mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))),
    "mixed": lambda: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cache_shards=True)},
    "offload": lambda: {"offload_policy": CPUOffloadPolicy()},
    "owned": lambda: {"shard_placement_fn": owned},
    "row blocks": lambda: {"shard_placement_fn": blocks},
    "last dim": lambda: {"shard_placement_fn": last_dim},
    "neighbours": lambda: {"reshard_after_forward": 2},
}


def sharded(case: ModelCase, **settings: Any) -> nn.Module:
    model = case.build()
    for unit in case.units(model):
        fully_shard(unit, **settings)
    return model


def loss_on(case: ModelCase, model: nn.Module, step: int = 0) -> Tensor:
    return case.loss(model, case.batch(0, step, dist.get_rank()))


@contextmanager
def comes_back(model: nn.Module) -> Iterator[None]:
    """The very same objects are registered after the block, and nothing of it is left."""
    groups = [group for state in states_below(model) for group in state.unit]
    owned_by_groups = [param.sharded for group in groups for param in group.params]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    yield
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    assert {id(each) for each in model.parameters()} == {id(each) for each in owned_by_groups}
    assert all(group.loan is None for group in groups)


def scale(model: nn.Module, factor: float = 2.0) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


# ---- reading -------------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [CONV, TIED, FROZEN, ODD], ids=str)
def test_parameters_are_those_of_the_plain_model(case: ModelCase) -> None:
    model, plain = shard(case), case.build()
    with comes_back(model), full_parameters(model):
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert names == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
        for parameter, original in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(parameter) is nn.Parameter and parameter.is_leaf and parameter.grad is None
            assert parameter.requires_grad is original.requires_grad
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert_same("parameters", parameters_of(model), parameters_of(plain))


@pytest.mark.full  # 5 s
@multi_rank(2, 4)
@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_around_blocks(name: str, world_size: int) -> None:
    """Reading between steps, between a forward and its backward, and writing, under every strategy."""
    settings = SETTINGS[name]()
    case = TRANSFORMER if name == "mixed" else UNEVEN_MLP
    model, undisturbed = sharded(case, **settings), sharded(case, **settings)
    optimizers = [adamw(list(each.parameters())) for each in (model, undisturbed)]
    for step in range(3):
        values = {name: gather(each) for name, each in parameters_of(undisturbed).items()}
        losses = [loss_on(case, each, step) for each in (model, undisturbed)]
        with comes_back(model), full_parameters(model, offload_to_cpu=step == 1):
            seen = {name: each.clone() for name, each in parameters_of(model).items()}
            assert all(each.dtype == torch.float32 for each in seen.values())
        assert_same("whole parameters", seen, values)
        for loss in losses:
            loss.backward()
        expected = {name: each if each is None else gather(each) for name, each in gradients_of(undisturbed).items()}
        with comes_back(model), full_parameters(model, with_grads=True, writeback=step == 2):
            assert_same("gradients", gradients_of(model), expected)
        with comes_back(model), full_parameters(model, writeback=False, with_grads=True):
            scale(model)
            for parameter in model.parameters():
                parameter.data = torch.zeros_like(parameter)
                parameter.grad = None
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:
            with comes_back(model), full_parameters(model):
                scale(model)
            scale(undisturbed)
        own = {name: gather(each) for name, each in parameters_of(model).items()}
        assert_same("parameters", own, {name: gather(each) for name, each in parameters_of(undisturbed).items()})
        for optimizer in optimizers:
            optimizer.zero_grad()


@multi_rank(2, 4)
@pytest.mark.parametrize("name", ["zero3", "replicate", "hybrid", "offload", "owned"])
def test_on_the_first_rank_alone(name: str) -> None:
    case = UNEVEN_MLP
    model, plain = sharded(case, **SETTINGS[name]()), case.build()
    loss_on(case, model).backward()
    for rank in range(dist.get_world_size()):
        (case.loss(plain, case.batch(0, 0, rank)) / dist.get_world_size()).backward()
    before = list(model.parameters())
    arguments = {"writeback": False, "rank0_only": True, "with_grads": True}
    with comes_back(model), full_parameters(model, **arguments), full_parameters(model, **arguments):
        if dist.get_rank() == 0:
            assert_same("parameters", parameters_of(model), parameters_of(plain))
            assert_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)
        else:
            assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        with pytest.raises(FSDPRuntimeError, match="whole on rank 0 alone"), torch.no_grad():
            loss_on(case, model)
    loss_on(case, model).backward()


@pytest.mark.full
@multi_rank(4)
def test_others_than_the_first_rank_receive_nothing() -> None:
    model = shard(UNEVEN_MLP)
    received: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        gather_to = dist.gather

        def counted(tensor: Tensor, gather_list: list[Tensor] | None = None, **options: Any) -> None:
            received.append(len(gather_list or ()))
            gather_to(tensor, gather_list, **options)

        patch.setattr(dist, "gather", counted)
        with full_parameters(model, writeback=False, rank0_only=True):
            pass
    assert received == [4 if dist.get_rank() == 0 else 0]


@multi_rank(2)
def test_small_groups_travel_together() -> None:
    """As many as take no more memory than the largest, and whatever is outside of the block not again."""
    model = shard(TRANSFORMER)
    loss_on(TRANSFORMER, model).backward()
    gathers: list[int] = []
    file = sys.modules[full_parameters.__module__]
    with pytest.MonkeyPatch.context() as patch:
        original = file.whole_tensors

        def counted(parts: Any, *args: Any, **options: Any) -> Any:
            gathers.append(len(parts))
            return original(parts, *args, **options)

        patch.setattr(file, "whole_tensors", counted)
        with full_parameters(model, with_grads=True):
            assert gathers == [6 + 14, 14, 14]
            with full_parameters(model.blocks[1], with_grads=True), full_parameters(model, writeback=False):
                assert len(gathers) == 3
        gathers.clear()
        patch.setattr(file, "_TOGETHER_BYTES", 0)
        with full_parameters(list(model.blocks), recurse=False):
            assert gathers == [7, 7, 7]


class _Large(nn.Module):
    """Parameters of 1 MiB and more: even, uneven, transposed, of no dims; and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.randn(512, 513))
        self.uneven = nn.Parameter(torch.randn(513, 512))
        self.transposed = nn.Parameter(torch.randn(520, 512).t())
        self.narrow = nn.Parameter(torch.randn(1024, 512, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.small = nn.Parameter(torch.randn(5, 3))


@multi_rank(2, 4)
def test_large_parameters_arrive_where_they_stay() -> None:
    torch.manual_seed(7)
    model = _Large()
    plain = {name: each.detach().clone() for name, each in model.named_parameters()}
    fully_shard(model)
    with full_parameters(model, writeback=False):
        found = {name: each.detach() for name, each in model.named_parameters()}
        assert_same("parameters", found, plain)
        own = {each.untyped_storage().data_ptr() for each in found.values()}
        assert len(own) == len(found), "each has memory of its own"
        for each in found.values():
            assert each.untyped_storage().nbytes() == each.numel() * each.element_size()
    with full_parameters(model):
        model.even.data.add_(1)
    with full_parameters(model, writeback=False, offload_to_cpu=True):
        assert_same("parameters", {"even": model.even.detach()}, {"even": plain["even"] + 1})


@multi_rank(2)
def test_parts_of_the_model() -> None:
    model, plain = shard(TRANSFORMER), TRANSFORMER.build()

    def whole() -> list[str]:
        return [name for name, each in model.named_parameters() if not isinstance(each, DTensor)]

    with comes_back(model), full_parameters(model, recurse=False):
        assert whole() == ["embedding.weight", "norm.weight", "head.weight"]
        with full_parameters(model):
            assert len(whole()) == len(list(model.parameters()))
            assert_same("parameters", parameters_of(model), parameters_of(plain))
        assert whole() == ["embedding.weight", "norm.weight", "head.weight"]
    with comes_back(model), full_parameters(nn.ModuleList([model.blocks[0], model.blocks[2]])):
        assert {name.split(".")[1] for name in whole()} == {"0", "2"}
    with comes_back(model), full_parameters(model.blocks[1].attention):
        assert whole() == ["blocks.1.attention.qkv.weight", "blocks.1.attention.out.weight"]
        with full_parameters(model.blocks[1].attention.qkv):
            scale(model.blocks[1].attention.qkv)
        assert len(whole()) == 2
        with pytest.raises(FSDPRuntimeError, match="only a part of its parameters"), torch.no_grad():
            loss_on(TRANSFORMER, model)
    with full_parameters(model.blocks[1].attention, recurse=False), full_parameters(nn.Linear(2, 2)):
        assert whole() == []
    scale(plain.blocks[1].attention.qkv)
    assert_sharded_same("parameters", parameters_of(model), parameters_of(plain))


@pytest.mark.full
@multi_rank(2)
def test_ties_and_ignored_parameters() -> None:
    model = TIED.build()
    ignored = model.norm.weight
    for unit in TIED.units(model):
        fully_shard(unit, ignored_params={ignored})
    with full_parameters(model):
        assert model.head.weight is model.embedding.weight and type(model.head.weight) is nn.Parameter
        assert model.norm.weight is ignored
        scale(model)
    assert model.head.weight is model.embedding.weight
    plain = TIED.build()
    scale(plain)
    assert_sharded_same("parameters", parameters_of(model), parameters_of(plain))


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_tensor_parallelism_stays(hybrid: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 22), nn.Linear(22, 9))
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    placements = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    fully_shard(model, mesh=mesh["dp"], strategy="replicate" if hybrid else None)
    for each in (model, plain):
        each(torch.ones(3, 12)).sum().backward()
    with comes_back(model), full_parameters(model, with_grads=True):
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) is (name in placements)
            if isinstance(parameter, DTensor):
                assert parameter.device_mesh == mesh["tp"] and parameter.placements == placements[name]
        whole = {name: gather(parameter.detach()) for name, parameter in model.named_parameters()}
        assert_same("parameters", whole, parameters_of(plain))
        gathered = {name: gather(parameter.grad) for name, parameter in model.named_parameters()}
        assert_same("gradients", gathered, gradients_of(plain), tolerance=SUM_ORDER)
        scale(model)
    scale(plain)
    assert_same("written", {n: gather(p) for n, p in parameters_of(model).items()}, parameters_of(plain))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("moment", ["unsharded", "kept", "prefetched", "failed", "never run"])
def test_whatever_is_registered_at_the_moment(moment: str) -> None:
    case = TRANSFORMER
    model: Any = shard(case, reshard_after_forward=False if moment == "kept" else None)
    if moment == "unsharded":
        model.unshard()
    elif moment == "prefetched":
        model.blocks[1].unshard(async_op=True)
    elif moment == "failed":
        handle = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_on(case, model)
        handle.remove()
    elif moment == "kept":
        loss_on(case, model)
    with full_parameters(model):
        assert_same("parameters", parameters_of(model), parameters_of(case.build()))
    assert_same("loss", {"": loss_on(case, model)}, {"": loss_on(case, case.build())})


# ---- writing -------------------------------------------------------------------------------------


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "data that is set": lambda parameter: setattr(parameter, "data", parameter.data * 2),
    "through data": lambda parameter: parameter.data.mul_(2),
    "by init": lambda parameter: nn.init.constant_(parameter, 0.5),
    "through a view": lambda parameter: parameter.detach().view(-1)[-1:].fill_(float("nan")),
}


@multi_rank(2, 4)
@pytest.mark.parametrize("way", [*WRITES, "replaced", "load_state_dict", "loaded by assignment"])
def test_ways_of_writing(way: str, world_size: int) -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    other = UNEVEN_MLP.build(seed=1)
    optimizer, plain_optimizer = adamw(list(model.parameters())), adamw(list(plain.parameters()))

    def write(module: nn.Module) -> None:
        if way == "replaced":
            module[0].weight = nn.Parameter(other[0].weight.detach().clone())
        elif way in ("load_state_dict", "loaded by assignment"):
            module.load_state_dict(copy.deepcopy(other.state_dict()), assign=way != "load_state_dict")
        else:
            for parameter in module.parameters():
                WRITES[way](parameter)

    with comes_back(model), full_parameters(model):
        write(model)
    if "assign" not in way and way != "replaced":
        write(plain)
    else:
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if name == "0.weight" or way != "replaced":
                    parameter.copy_(other.get_parameter(name))
    is_nan = way == "through a view"
    expected = {name: each.nan_to_num() for name, each in parameters_of(plain).items()}
    found = {name: gather(each).nan_to_num() for name, each in parameters_of(model).items()}
    assert_same("parameters", found, expected)
    for rank in range(world_size):
        (UNEVEN_MLP.loss(plain, UNEVEN_MLP.batch(0, 0, rank)) / world_size).backward()
    loss_on(UNEVEN_MLP, model).backward()
    if not is_nan:
        assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)
        optimizer.step()
        plain_optimizer.step()
        assert len(optimizer.state) == len(plain_optimizer.state)


@multi_rank(2)
def test_gradients_are_written_back() -> None:
    model = shard(FROZEN)
    loss_on(FROZEN, model).backward()
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: gather(kept[name]) * 3 for name in names}  # type: ignore[arg-type]
    for offload in (False, True):
        with comes_back(model), full_parameters(model, with_grads=True, offload_to_cpu=offload):
            for name in names:
                model.get_parameter(name).grad.mul_(3)  # type: ignore[union-attr]
            model[0].weight.grad = torch.ones(64, 32)
        assert_sharded_same("gradients", {n: model.get_parameter(n).grad for n in names}, expected)
        assert all(model.get_parameter(name).grad is kept[name] for name in names)
        set_ = model[0].weight.grad
        assert isinstance(set_, DTensor) and torch.equal(set_.full_tensor(), torch.ones(64, 32))
        expected = {name: each * 3 for name, each in expected.items()}
    with full_parameters(model):
        for parameter in model.parameters():
            parameter.grad = None
    assert model[0].weight.grad is not None
    with full_parameters(model, with_grads=True):
        model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@multi_rank(2)
def test_freezing_is_kept() -> None:
    model = shard(UNEVEN_MLP)
    with full_parameters(model, writeback=False):
        model[0].requires_grad_(False)
    assert model[0].weight.requires_grad
    with full_parameters(model):
        model[0].requires_grad_(False)
    assert not model[0].weight.requires_grad
    loss_on(UNEVEN_MLP, model).backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None


@pytest.mark.full
@multi_rank(2)
def test_between_a_forward_and_its_backward() -> None:
    """What was written by any rank counts on all."""
    model = shard(UNEVEN_MLP)
    loss = loss_on(UNEVEN_MLP, model)
    with torch.no_grad(), full_parameters(model):
        model[2].weight[0, 0] += 1  # a row of the first rank
    with pytest.raises(FSDPRuntimeError, match="were changed between a forward and its backward"):
        loss.backward()
    loss_on(UNEVEN_MLP, model).backward()


class Hiding(nn.Module):
    """Its output shows no tensor: nothing says when a backward of what it keeps begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> None:
        self.loss = self.layer(x).square().mean()


@multi_rank(2)
def test_before_a_backward_that_nothing_announces() -> None:
    torch.manual_seed(0)
    model = Hiding()
    plain = copy.deepcopy(model)
    fully_shard(model)
    for step in range(2):
        for each in (model, plain):
            each(torch.ones(2, 5) + step)
        with comes_back(model), full_parameters(model):
            assert_same("parameters", parameters_of(model), parameters_of(plain))
        for each in (model, plain):
            each.loss.backward()
        assert_sharded_same("gradients", gradients_of(model), gradients_of(plain))


# ---- inside of the block -------------------------------------------------------------------------


@multi_rank(2)
def test_forwards_without_gradients_compute_with_whole_parameters() -> None:
    case, model, plain = TRANSFORMER, shard(TRANSFORMER), TRANSFORMER.build()
    batch = case.batch(0, 0, dist.get_rank())
    with full_parameters(model, recurse=False), torch.no_grad():
        assert_same("loss", {"": case.loss(model, batch)}, {"": case.loss(plain, batch)})
    with full_parameters(model), torch.no_grad():
        scale(model, 1.5)
        scale(plain, 1.5)
        assert_same("loss", {"": case.loss(model, batch)}, {"": case.loss(plain, batch)})
    with full_parameters(model), pytest.raises(FSDPRuntimeError, match=r"a forward of .* began inside of full_parame"):
        case.loss(model, batch)
    loss = case.loss(model, batch)
    with full_parameters(model), pytest.raises(FSDPRuntimeError, match=r"a backward of .* began inside of full_parame"):
        loss.backward()
    loss = case.loss(model, batch)
    assert_same("loss", {"": loss}, {"": case.loss(plain, batch)})
    loss.backward()


@pytest.mark.full
@multi_rank(2)
def test_state_dicts_inside_are_whole() -> None:
    model, plain = shard(TRANSFORMER), TRANSFORMER.build()
    with full_parameters(model, writeback=False):
        assert_same("state dict", model.state_dict(), plain.state_dict())
        for what in (lambda: unwrap(model), lambda: copy.deepcopy(model)):
            with pytest.raises(FSDPRuntimeError, match=r"inside of full_parameters\(\)"):
                what()
        copied = copy.deepcopy(model.blocks[0].attention)
    assert_same("copy", parameters_of(copied), parameters_of(plain.blocks[0].attention))
    loss_on(TRANSFORMER, model).backward()


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("where", ["body", "body on one rank", "gather", "write"])
def test_it_ends_clean_after_an_exception(where: str) -> None:
    """One rank fails where the others have nothing to keep: else they wait for it, as in any collective."""
    model, plain = shard(TRANSFORMER), TRANSFORMER.build()
    file = sys.modules[full_parameters.__module__]
    with pytest.MonkeyPatch.context() as patch, comes_back(model):
        if where == "gather":
            original, calls = file.whole_tensors, iter((False, False, True))

            def fails(*args: Any, **options: Any) -> Any:
                return 1 / 0 if next(calls) else original(*args, **options)

            patch.setattr(file, "whole_tensors", fails)
        elif where == "write":
            patch.setattr(file, "_keep_the_rest", lambda *_: 1 / 0)
        fails_here = where != "body on one rank" or dist.get_rank() == 1
        raises = pytest.raises(ZeroDivisionError) if fails_here else nullcontext()
        with raises, full_parameters(model, writeback=where != "body on one rank"):
            if where != "write":
                scale(model)
            if fails_here and where.startswith("body"):
                _ = 1 / 0
    assert_sharded_same("parameters", parameters_of(model), parameters_of(plain))
    loss_on(TRANSFORMER, model).backward()


@multi_rank(2)
def test_modules_that_keep_a_list_of_their_parameters() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(5, 7)
    plain = copy.deepcopy(model)
    fully_shard(model)
    with full_parameters(model):
        assert all(type(each) is nn.Parameter for each in model._flat_weights)
        with torch.no_grad():
            assert_same("output", {"": model(torch.ones(2, 1, 5))[0]}, {"": plain(torch.ones(2, 1, 5))[0]})
        scale(model)
    scale(plain)
    assert all(isinstance(each, DTensor) for each in model._flat_weights)
    assert_same("output", {"": model(torch.ones(2, 1, 5))[0]}, {"": plain(torch.ones(2, 1, 5))[0]})


@multi_rank(2)
def test_gradients_of_another_dtype() -> None:
    model = nn.Linear(5, 7).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
        parameter.note = "mine"
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    with full_parameters(model, with_grads=True):
        assert model.weight.dtype is torch.bfloat16 and model.weight.note == "mine"
        assert torch.equal(model.weight.grad, torch.full((7, 5), 2.0))
        model.weight.grad.add_(1)
        model.bias.grad = torch.ones(7)
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((7, 5), 3.0))
    assert torch.equal(model.bias.grad.full_tensor(), torch.ones(7))


@contextmanager
def dynamo_looks() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # its own
        yield
    torch.compiler.reset()


@multi_rank(2)
@dynamo_looks()
def test_around_calls_of_a_compiled_model() -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(3):
        batch = UNEVEN_MLP.batch(0, step, 0)
        loss, expected = UNEVEN_MLP.loss(compiled, batch), UNEVEN_MLP.loss(plain, batch)
        with full_parameters(model):
            assert_same("parameters", parameters_of(model), parameters_of(plain))
        loss.backward()
        expected.backward()
        assert_same("loss", {"": loss}, {"": expected})
        assert_sharded_same("gradients", gradients_of(model), gradients_of(plain))
        with torch.inference_mode(), full_parameters(model, with_grads=True):
            assert_same("gradients", gradients_of(model), gradients_of(plain))
            scale(model)
        scale(plain)
    with full_parameters(model), pytest.raises(FSDPRuntimeError, match=r"a compiled call of .* inside of full_para"):
        compiled(UNEVEN_MLP.batch(0, 0, 0).inputs)


# ---- what is refused -----------------------------------------------------------------------------


@multi_rank(2)
def test_refused_arguments_and_models() -> None:
    model = shard(UNEVEN_MLP)
    with pytest.raises(FSDPNotImplementedError, match="rank0_only=True and writeback=True"):
        full_parameters(model, rank0_only=True)
    with torch.device("meta"):
        on_meta = shard(UNEVEN_MLP)
    with pytest.raises(FSDPRuntimeError, match=r"'weight' of Linear is on the meta device"), full_parameters(on_meta):
        pass
    for inner in ({"with_grads": True}, {"offload_to_cpu": True}, {"rank0_only": True, "writeback": False}):
        refused = pytest.raises(FSDPRuntimeError, match="an inner block may ask for nothing")
        with comes_back(model), full_parameters(model), refused, full_parameters(model, **inner):
            pass
    refused = pytest.raises(FSDPRuntimeError, match="an inner block may ask for nothing")
    with full_parameters(model, writeback=False), refused, full_parameters(model):
        pass


@multi_rank(2)
def test_refused_inside_of_a_pass() -> None:
    model = shard(TRANSFORMER)
    met: list[str] = []

    def inside(what: str, *_: object) -> None:
        for module in (model, model.blocks[1].attention):
            with pytest.raises(FSDPRuntimeError, match=f"inside of a {what} of "), full_parameters(module):
                pass
        met.append(what)

    def inside_backward(_: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(functools.partial(inside, "backward"))

    handles = [
        model.norm.register_forward_pre_hook(functools.partial(inside, "forward")),
        model.blocks[1].attention.register_forward_hook(inside_backward),
    ]
    loss_on(TRANSFORMER, model).backward()
    for handle in handles:
        handle.remove()
    handle = model.blocks[1].attention.register_forward_pre_hook(functools.partial(inside, "forward"))
    with torch.no_grad():
        model.blocks[1](torch.ones(1, 4, 32))  # outside of the root's
    handle.remove()
    assert met == ["forward", "backward", "forward"]
    loss_on(TRANSFORMER, model).backward()


REFUSED: dict[str, Callable[[Any], object]] = {
    "(3, 3)": lambda model: setattr(model[0].weight, "data", torch.ones(3, 3)),
    "torch.float16": lambda model: model.half(),
    "NoneType": lambda model: delattr(model[0], "weight"),
    "a Tensor": lambda model: model[0]._parameters.update(weight=torch.ones(97, 13)),
}


@multi_rank(2)
@pytest.mark.parametrize("text", REFUSED)
@pytest.mark.parametrize("where", ["on one rank", "on all ranks"])
def test_what_cannot_be_kept_raises_on_all_ranks(text: str, where: str) -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    is_wrong = where == "on all ranks" or dist.get_rank() == 1
    with comes_back(model), pytest.raises(FSDPRuntimeError) as raised, full_parameters(model):
        scale(model)
        if is_wrong:
            REFUSED[text](model)
    expected = f"cannot keep what was written to parameter 'weight' of Linear.*{text}" if is_wrong else "another rank"
    assert raised.match(expected.replace("(", r"\(").replace(")", r"\)"))
    assert_sharded_same("parameters", parameters_of(model), parameters_of(plain))
    loss_on(UNEVEN_MLP, model).backward()


@multi_rank(2)
def test_a_step_inside_is_not_undone() -> None:
    model = shard(UNEVEN_MLP)
    optimizer = adamw(list(model.parameters()))
    loss_on(UNEVEN_MLP, model).backward()
    with full_parameters(model, writeback=False):
        optimizer.step()
    after = {name: each.clone() for name, each in parameters_of(model).items()}
    with pytest.raises(FSDPRuntimeError, match="an optimizer's step"), full_parameters(model):
        optimizer.step()
    assert not torch.equal(parameters_of(model)["0.weight"].full_tensor(), after["0.weight"].full_tensor())


@multi_rank(2, 4)
def test_ranks_that_differ_raise_on_all() -> None:
    model = shard(UNEVEN_MLP)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with comes_back(model):
        with pytest.raises(FSDPRuntimeError, match="the ranks differ"), full_parameters(model, writeback=is_last):
            pass
        with pytest.raises(FSDPRuntimeError, match="the ranks differ"), full_parameters(model[2] if is_last else model):
            pass
        loss_on(UNEVEN_MLP, model).backward()
        if is_last:
            model[2].bias.grad = None
        with pytest.raises(FSDPRuntimeError, match="the ranks differ"), full_parameters(model, with_grads=True):
            pass
        if is_last:
            model[2].bias.grad = torch.ones(33)
        expected = "was set to one that is not sharded" if is_last else "the ranks differ"
        with pytest.raises(FSDPRuntimeError, match=expected), full_parameters(model, with_grads=True):
            pass
        with full_parameters(model):
            pass


# ---- beside FSDP1 --------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize("arguments", [{}, {"writeback": False}, {"writeback": False, "rank0_only": True}], ids=str)
def test_what_fsdp1_shows_and_keeps(arguments: dict[str, bool]) -> None:
    case = UNEVEN_MLP
    model, theirs = shard(case), case.build()
    from torch.distributed.fsdp import FullyShardedDataParallel  # other tests of this process put ours in its place

    theirs = FullyShardedDataParallel(theirs, device_id=torch.device("cpu"), use_orig_params=True)
    with full_parameters(model, **arguments), FullyShardedDataParallel.summon_full_params(theirs, **arguments):
        if dist.get_rank() == 0 or "rank0_only" not in arguments:
            assert_same("parameters", parameters_of(model), parameters_of(theirs.module))
            for each in (model, theirs):
                for parameter in each.parameters():
                    parameter.data.mul_(2)
    with FullyShardedDataParallel.summon_full_params(theirs):
        assert_sharded_same("parameters", parameters_of(model), parameters_of(theirs.module))
