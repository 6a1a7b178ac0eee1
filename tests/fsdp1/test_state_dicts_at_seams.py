"""State dicts of FSDP1's wrapper where units are cut further, used twice, checkpointed, compiled, or not sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import FSDPRuntimeError
from fsdp2.compat.fsdp1 import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    flat_optim_state_dict,
    flat_optim_state_dict_to_load,
)
from tests.fsdp1.helpers.both import both, class_of
from tests.fsdp1.helpers.models import Block, blocks
from tests.harness import multi_rank

FULL = StateDictType.FULL_STATE_DICT
ON_FIRST = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
OF_TYPE = FullyShardedDataParallel.state_dict_type


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), *more)


def assert_on_first_rank(state: dict[str, Any], plain: nn.Module) -> None:
    """Whole tensors on the first rank, nothing on the others."""
    expected = plain.state_dict() if dist.get_rank() == 0 else {}
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert type(state[name]) is torch.Tensor and torch.equal(state[name], value), name


@multi_rank(4)
@pytest.mark.full
@pytest.mark.parametrize("cut", [(0, 1), (1,)], ids=["all", "the second"])
def test_rank0_only_beside_tensor_parallelism(cut: tuple[int, ...], world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = blocks()
    model: Any = copy.deepcopy(plain)
    for index in cut:
        parallelize_module(model[index], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], auto_wrap_policy=ModuleWrapPolicy({Block}))
    with OF_TYPE(model, FULL, ON_FIRST):
        assert_on_first_rank(model.state_dict(), plain)


@multi_rank(2)
@pytest.mark.full
def test_rank0_only_with_an_ignored_parameter_that_is_sharded_already(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    plain = layers()
    module = copy.deepcopy(plain)
    for layer in module:
        layer.register_buffer("table", distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]))
    own = nn.Parameter(distribute_tensor(torch.arange(5.0), mesh, [Replicate()]))
    module.register_parameter("own", own)
    model = FullyShardedDataParallel(module, ignored_states=[own])
    with OF_TYPE(model, FULL, ON_FIRST):
        state = model.state_dict()
    assert torch.equal(state["own"], torch.arange(5.0)), "ignored: each rank has its own"
    if dist.get_rank():
        assert list(state) == ["own"]
    else:
        assert torch.equal(state["0.table"], torch.arange(6.0))
        assert torch.equal(state["0.weight"], plain[0].weight)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return dist.get_rank()

    def set_extra_state(self, state: Any) -> None:
        assert state == dist.get_rank()


class Experts(nn.Module):
    """Of which each rank has one, beside one under a name that all have."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.mine = WithExtraState(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleDict({str(dist.get_rank()): nn.Linear(4, 4)})
        with torch.no_grad():
            for parameter in (*self.mine.parameters(), *self.experts.parameters()):
                parameter.fill_(1.0 + dist.get_rank())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself
@multi_rank(2)
@both
@pytest.mark.parametrize("argument", ["modules", "parameters"])
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Experts})], ids=["root", "units"])
def test_rank0_only_leaves_each_rank_its_experts(kind: str, argument: str, policy: Any, world_size: int) -> None:
    cls, rank = class_of(kind), dist.get_rank()

    def wrapped(change: float = 0.0) -> Any:
        blocks = [Experts() for _ in range(2)]
        with torch.no_grad():
            for parameter in (parameter for each in blocks for parameter in each.parameters()):
                parameter.add_(change)
        modules = [module for each in blocks for module in (each.mine, each.experts)]
        given = modules if argument == "modules" else [p for each in modules for p in each.parameters()]
        model = nn.Sequential(*blocks)
        return cls(
            model, auto_wrap_policy=policy, ignored_states=given, device_id=torch.device("cpu"), use_orig_params=True
        )

    config = FullStateDictConfig(offload_to_cpu=kind == "fsdp2", rank0_only=True)
    model = wrapped()
    with cls.state_dict_type(model, FULL, config):
        state = model.state_dict()
    router = {f"{block}.router.{name}" for block in (0, 1) for name in ("weight", "bias")}
    own = {name.replace("router", each) for name in router for each in ("mine", f"experts.{rank}")}
    extra = {f"{block}.router._extra_state" for block in (0, 1)}
    assert set(state) == own | extra | (set() if rank else router)
    assert all((state[name] == 1.0 + rank).all() for name in own)
    if kind == "fsdp2":  # torch loads on every rank what that has, and needs all of it there
        other = wrapped(9.0)
        with cls.state_dict_type(other, FULL, config):
            other.load_state_dict(state)
        loaded, expected = other.state_dict(), model.state_dict()
        for name, value in expected.items():
            assert loaded[name] == value if name in extra else torch.equal(loaded[name], value), name
        given = {name: value for name, value in state.items() if "mine" not in name or not rank}
        with cls.state_dict_type(other, FULL, config):
            other.load_state_dict(given)
        assert (other.module[0].mine.weight == 1).all(), "a rank that has nothing gets the first's"


@multi_rank(2)
def test_parameters_that_a_module_saves_under_other_names_are_whole(world_size: int) -> None:
    plain = layers()

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state[f"{prefix}w"] = state.pop(f"{prefix}weight")

    module = copy.deepcopy(plain)
    module[0].register_state_dict_post_hook(rename)
    model = FullyShardedDataParallel(module)
    with OF_TYPE(model, FULL, FullStateDictConfig()):
        state = model.state_dict()
    assert type(state["0.w"]) is torch.Tensor and torch.equal(state["0.w"], plain[0].weight)


@multi_rank(2)
def test_a_unit_around_a_checkpoint_wrapper_is_the_unit(world_size: int) -> None:
    """State dicts, `summon_full_params` of it alone, `no_sync`, the order of gathers."""
    plain = layers()
    inner, outer = copy.deepcopy(plain)
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(checkpoint_wrapper(inner)), outer))
    with OF_TYPE(model, FULL, ON_FIRST):
        assert_on_first_rank(model.state_dict(), plain)
    with FullyShardedDataParallel.summon_full_params(model[0], recurse=False):
        assert torch.equal(model[0].weight.detach(), plain[0].weight)
        assert not isinstance(model[0].weight, DTensor)
    root = FullyShardedDataParallel(
        checkpoint_wrapper(copy.deepcopy(plain[0])), backward_prefetch=BackwardPrefetch.BACKWARD_POST
    )
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    with root.no_sync():
        root(x).sum().backward()
    assert all(parameter.grad is None for parameter in root.parameters())
    root(x).sum().backward()
    whole = sum(torch.randn(2, 4, generator=torch.Generator().manual_seed(rank)).sum(0) for rank in range(world_size))
    expected = 2 * whole.expand(4, 4) / world_size
    torch.testing.assert_close(root.weight.grad.full_tensor(), expected)


@multi_rank(2)
def test_a_wrong_shape_on_the_first_rank_is_said_on_all(world_size: int) -> None:
    module = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 4))
    model = FullyShardedDataParallel(module)
    other = {
        name: value.clone() for name, value in nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)).state_dict().items()
    }
    with OF_TYPE(model, FULL, ON_FIRST):
        for wrong, shape in ((other, r"\[10, 4\]"), (other | {"0.weight": 3}, "None")):
            with pytest.raises(
                FSDPRuntimeError, match=rf"'0\.weight' is to be loaded with the shape {shape}.*\[12, 4\]"
            ):
                model.load_state_dict(wrong if dist.get_rank() == 0 else {})
        state = model.state_dict()
        state = {name: value + 1 for name, value in state.items()}
        model.load_state_dict(state)
    with OF_TYPE(model, FULL, FullStateDictConfig()):
        loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def _copied(value: Any) -> Any:
    """A flat parameter's record is a copy already."""
    return value.clone() if type(value) in (torch.Tensor, DTensor) else value


@multi_rank(2)
@pytest.mark.parametrize("kind", [FULL, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT])
def test_a_unit_under_two_names_is_loaded_under_both(kind: Any, world_size: int) -> None:
    unit = FullyShardedDataParallel(layers()[0])
    model = FullyShardedDataParallel(nn.Sequential(unit, unit))
    with OF_TYPE(model, kind, ON_FIRST if kind is FULL else None):
        state = {name: _copied(value) for name, value in model.state_dict().items()}
        before = unit.weight.full_tensor().clone()
        with torch.no_grad():
            unit.weight.zero_()
        model.load_state_dict(state)
    assert torch.equal(unit.weight.full_tensor(), before)


@multi_rank(2)
def test_flat_forms_of_units_with_a_compiled_part(world_size: int) -> None:
    """LOCAL state dicts, and optimizer state as of flat parameters: names in the files are those of the plain model."""
    module = layers()
    module[0] = torch.compile(module[0], backend="eager")
    model = FullyShardedDataParallel(module, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = model[1].weight.full_tensor().clone()
    with OF_TYPE(model, StateDictType.LOCAL_STATE_DICT):
        state = {name: _copied(value) for name, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(state)
    assert torch.equal(model[1].weight.full_tensor(), before)
    saved = flat_optim_state_dict(model, optimizer)
    exp_avg = optimizer.state[model[1].weight]["exp_avg"].full_tensor().clone()
    loaded = flat_optim_state_dict_to_load(model, optimizer, saved)
    optimizer.load_state_dict(loaded)
    assert torch.equal(optimizer.state[model[1].weight]["exp_avg"].full_tensor(), exp_avg)


@multi_rank(2)
def test_a_root_that_is_not_sharded_leaves_sharded_state_dicts_of_its_units(world_size: int) -> None:
    inner, outer = layers()
    module = nn.Sequential(FullyShardedDataParallel(inner), outer)
    model = FullyShardedDataParallel(module, sharding_strategy=ShardingStrategy.NO_SHARD)
    with OF_TYPE(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    assert isinstance(state["0.weight"], DTensor) and type(state["1.weight"]) is torch.Tensor


@multi_rank(2)
def test_settings_that_the_new_optimizer_does_not_know_are_loaded(world_size: int) -> None:
    """As a scheduler's, or the program's own."""
    model = FullyShardedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.param_groups[0]["of the program"] = "matrices"
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    other.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, other, state))
    assert other.param_groups[0]["of the program"] == "matrices" and other.param_groups[0]["initial_lr"] == 0.1
    torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0, last_epoch=5)


@multi_rank(2)
def test_inputs_of_the_root_are_cast_by_either_setting() -> None:
    for of_all, of_root in ((True, False), (False, True)):
        precision = MixedPrecision(
            param_dtype=torch.bfloat16, cast_forward_inputs=of_all, cast_root_forward_inputs=of_root
        )
        model = FullyShardedDataParallel(layers(), mixed_precision=precision)
        assert model(torch.randn(2, 4)).dtype is torch.bfloat16


class Twice(nn.Module):
    """One parameter under two names of one module."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.ones(4, 4, device=device))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.first, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first @ self.second


@multi_rank(2)
def test_a_parameter_that_one_module_has_twice_stays_one(world_size: int) -> None:
    """Also from the meta device, and in state dicts and flat forms."""
    model = FullyShardedDataParallel(Twice("meta"))
    assert model.first is model.second
    with OF_TYPE(model, FULL, FullStateDictConfig()):
        state = model.state_dict()
    assert list(state) == ["first", "second"] and state["first"].eq(2.0).all() and state["second"] is state["first"]
    plain = Twice("cpu")
    plain.reset_parameters()
    x = torch.ones(2, 4)
    model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(model.first.grad.full_tensor(), plain.first.grad)
