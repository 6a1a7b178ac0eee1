"""Raw optimizer states of torch's FSDP1, of flat parameters or their pieces: loaded into the wrapper's optimizers, and
written as torch has them; the layout of wrapped models; what each kind of state dict communicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2 import FSDPValueError
from fsdp2.compat.fsdp1 import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    flat_layout,
    flat_optim_state_dict,
    flat_optim_state_dict_to_load,
)
from tests.fsdp1.helpers.flat import (
    OPTIMIZERS,
    flat_units_of_torch,
    local_state_dict,
    quiet,
    tower,
    tower_units,
    train,
    wrap_with_torch,
)
from tests.harness import FakeWorlds, multi_rank
from tests.harness.models import UNEVEN_MLP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself
LOCAL = StateDictType.LOCAL_STATE_DICT


def ours(use_orig_params: bool, *, seed: int = 0, odd_memory: bool = False, **arguments: Any) -> Any:
    """The tower, each unit under a wrapper of ours."""
    model = tower(seed=seed, odd_memory=odd_memory)
    arguments = {"use_orig_params": use_orig_params, "ignored_modules": [model.ignored], **arguments}
    for parent, name in ((model.blocks, "0"), (model.blocks, "1"), (model, "frozen")):
        setattr(parent, name, FullyShardedDataParallel(getattr(parent, name), **arguments))
    return FullyShardedDataParallel(model, **arguments)


def torchs(use_orig_params: bool, *, seed: int = 0, **arguments: Any) -> Any:
    model = tower(seed=seed)
    return wrap_with_torch(model, tower_units(model), use_orig_params, ignored_modules=[model.ignored], **arguments)


def parameters(model: nn.Module, given: str = "trainable") -> list[nn.Parameter]:
    return [each for each in model.parameters() if given == "all" or each.requires_grad]


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert type(found) is type(expected) and found.dtype == expected.dtype and found.shape == expected.shape, where
        local = [each.to_local() if isinstance(each, DTensor) else each for each in (found, expected)]
        assert torch.equal(*local), where
    else:
        assert found == expected, where


def whole(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Whole state by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {
            key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in kept.items()
        }
        for parameter, kept in optimizer.state.items()
    }


@multi_rank(2, 4)
@pytest.mark.full
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("given", ["all", "trainable"])
def test_what_torchs_optimizers_wrote_is_loaded_and_written(
    use_orig_params: bool, optimizer: str, given: str, world_size: int
) -> None:
    """Weights by LOCAL, state raw; then both train on alike, and what ours writes torch's optimizer loads."""
    rank = dist.get_rank()
    theirs = torchs(use_orig_params)
    made = OPTIMIZERS[optimizer](parameters(theirs, given))
    train(theirs, made, rank, range(2))
    model = ours(use_orig_params, seed=1)
    other = OPTIMIZERS[optimizer](parameters(model, given))
    local = local_state_dict(theirs)
    with FullyShardedDataParallel.state_dict_type(model, LOCAL):
        model.load_state_dict(local, strict=False)
    raw = made.state_dict()
    other.load_state_dict(flat_optim_state_dict_to_load(model, other, raw))
    for parameter, kept in other.state.items():
        for key, value in kept.items():
            if key != "step":
                assert isinstance(value, DTensor) is isinstance(parameter, DTensor), key
    written = flat_optim_state_dict(model, other)
    assert_same(written["state"], raw["state"], "state")
    assert [len(group["params"]) for group in written["param_groups"]] == [
        len(group["params"]) for group in raw["param_groups"]
    ]
    train(theirs, made, rank, range(2, 4))
    train(model, other, rank, range(2, 4))
    with FullyShardedDataParallel.state_dict_type(model, LOCAL):
        ended = model.state_dict()
    for name, value in local_state_dict(theirs).items():
        if hasattr(value, "local_shards"):
            for own, shard in zip(ended[name].local_shards, value.local_shards(), strict=True):
                torch.testing.assert_close(own.tensor, shard.tensor, rtol=1e-5, atol=1e-6)
    again = torchs(use_orig_params, seed=2)
    fresh = OPTIMIZERS[optimizer](parameters(again, given))
    fresh.load_state_dict(flat_optim_state_dict(model, other))
    assert len(fresh.state) == len(made.state)


@multi_rank(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_parameters_that_do_not_lie_in_rows(use_orig_params: bool, world_size: int) -> None:
    """A transposed one is gathered by itself, both ways; weights and state are what they were."""
    model = ours(use_orig_params, odd_memory=True)
    made = OPTIMIZERS["amsgrad"](parameters(model))
    train(model, made, dist.get_rank(), range(2))
    other = ours(use_orig_params, seed=3, odd_memory=True)
    again = OPTIMIZERS["amsgrad"](parameters(other))
    with FullyShardedDataParallel.state_dict_type(model, LOCAL), FullyShardedDataParallel.state_dict_type(other, LOCAL):
        other.load_state_dict(model.state_dict(), strict=False)
    again.load_state_dict(flat_optim_state_dict_to_load(other, again, flat_optim_state_dict(model, made)))
    assert_same(whole(again, other), whole(made, model), "state")
    assert_same(other.state_dict(), model.state_dict(), "weights")


@multi_rank(4)
@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_strategies(strategy: str, use_orig_params: bool, world_size: int) -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    shard, replicate = groups[dist.get_rank() // 2], groups[2 + dist.get_rank() % 2]
    arguments: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "HYBRID_SHARD":
        arguments["process_group"] = (shard, replicate)
    theirs, model = torchs(use_orig_params, **arguments), ours(use_orig_params, **arguments)
    made, other = (OPTIMIZERS["sgd"](parameters(each)) for each in (theirs, model))
    train(theirs, made, dist.get_rank(), range(2))
    other.load_state_dict(flat_optim_state_dict_to_load(model, other, made.state_dict()))
    assert_same(flat_optim_state_dict(model, other)["state"], made.state_dict()["state"], "state")


@multi_rank(2)
def test_what_does_not_fit_is_refused_on_all_ranks(world_size: int) -> None:
    theirs, model = torchs(True), ours(True)
    made, other = (OPTIMIZERS["sgd"](parameters(each)) for each in (theirs, model))
    train(theirs, made, dist.get_rank(), range(1))
    raw = made.state_dict()
    with pytest.raises(FSDPValueError, match=r"optimizer state.* has 3 parameters; the model has"):
        flat_optim_state_dict_to_load(
            model, other, {**raw, "param_groups": [{**raw["param_groups"][0], "params": [0, 1, 2]}]}
        )
    flat = ours(False)
    with pytest.raises(FSDPValueError, match="parameters; the model has"):
        flat_optim_state_dict_to_load(flat, OPTIMIZERS["sgd"](parameters(flat)), raw)
    short = {**raw, "state": {n: {k: v[:2] if v.dim() else v for k, v in e.items()} for n, e in raw["state"].items()}}
    with pytest.raises(FSDPValueError, match=r"'momentum_buffer' of '.*' is of shape"):
        flat_optim_state_dict_to_load(model, other, short)
    with pytest.raises(FSDPValueError, match="rank 1 was given a dict, which is no state dict of an optimizer"):
        flat_optim_state_dict_to_load(model, other, raw if dist.get_rank() == 0 else {"optimizer": raw})
    with pytest.raises(FSDPValueError, match="no FullyShardedDataParallel is in this Linear"):
        flat_optim_state_dict(nn.Linear(2, 2), made)


# ---- layouts ------------------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_layouts_of_wrapped_models_are_torchs(use_orig_params: bool, world_size: int) -> None:
    theirs, model = torchs(use_orig_params), ours(use_orig_params)
    layout = flat_layout(model)
    expected = flat_units_of_torch(theirs)
    assert [unit.name for unit in layout.units] == list(expected)
    handles = dict(zip([unit.name for unit in layout.units], model._all_handles, strict=True))
    for unit in layout.units:
        handle = expected[unit.name]
        assert handles[unit.name].shard_metadata() == handle.shard_metadata()
        assert type(handles[unit.name].shard_metadata())._fields == type(handle.shard_metadata())._fields
        assert unit.numel == handle.flat_param._unpadded_unsharded_size.numel()
        assert [info.param_name for info in unit.shared_param_infos()] == [
            info.param_name for info in handle.flat_param._shared_param_infos
        ]


@pytest.mark.full
def test_layouts_for_other_ranks_and_forms(simulate: FakeWorlds) -> None:
    simulate(4)
    model = ours(True)
    for use_orig_params in (True, False):
        for ranks in (2, 3):
            again = flat_layout(model, use_orig_params, ranks)
            assert (again.use_orig_params, again.world_size) == (use_orig_params, ranks)
            for unit in again.units:
                assert sum(unit.saved_numel(rank) for rank in range(ranks)) == unit.numel
                assert unit.world_size == ranks
    whole = ours(True, sharding_strategy=ShardingStrategy.NO_SHARD)
    assert {unit.world_size for unit in flat_layout(whole).units} == {1}


def test_layouts_of_sharded_modules(simulate: FakeWorlds) -> None:
    """Those of `fully_shard`, without a wrapper."""
    simulate(2)
    wrapped = FullyShardedDataParallel(UNEVEN_MLP.build(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model = UNEVEN_MLP.build()
    for each in model.modules():
        if isinstance(each, nn.Linear):
            fsdp2.fully_shard(each)
    fsdp2.fully_shard(model)
    assert flat_layout(model, False) == flat_layout(wrapped, False)
    with pytest.raises(FSDPValueError, match=r"nothing in this Linear is sharded.*layout\.units_of"):
        flat_layout(nn.Linear(2, 2))


# ---- what is communicated -----------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_one_exchange_for_a_unit(use_orig_params: bool, world_size: int) -> None:
    """LOCAL: an all-to-all for each; SHARDED: nothing; FULL: small units travel together, by one all-gather."""
    model = ours(use_orig_params)
    units = len(flat_layout(model).units)
    counts: dict[str, dict[str, int]] = {}
    for kind in StateDictType:
        with FullyShardedDataParallel.state_dict_type(model, kind), CommDebugMode() as mode, quiet():
            saved = model.state_dict()
        counts[kind.name] = {op.__name__: n for op, n in mode.get_comm_counts().items()}
        with FullyShardedDataParallel.state_dict_type(model, kind), CommDebugMode() as mode, quiet():
            model.load_state_dict(saved, strict=kind is not LOCAL)
        counts[f"load {kind.name}"] = {op.__name__: n for op, n in mode.get_comm_counts().items()}
    assert counts["SHARDED_STATE_DICT"] == counts["load SHARDED_STATE_DICT"] == counts["load FULL_STATE_DICT"] == {}
    assert counts["LOCAL_STATE_DICT"] == {"alltoall_base_": units}
    assert counts["load LOCAL_STATE_DICT"]["alltoall_base_"] == units
    assert units > 1
    assert counts["FULL_STATE_DICT"] == {"_allgather_base_": 1}


@multi_rank(2)
def test_whole_optimizer_states_travel_together(world_size: int) -> None:
    """One all-gather for all that is cut alike; each value is that of the tensor gathered by itself."""
    model = ours(True, odd_memory=True)
    made = OPTIMIZERS["amsgrad"](parameters(model))
    train(model, made, dist.get_rank(), range(2))
    with CommDebugMode() as mode:
        found = FullyShardedDataParallel.optim_state_dict(model, made)["state"]
    gathers = {op.__name__: n for op, n in mode.get_comm_counts().items()}
    # Three of the transposed parameter, one of all others; and two in which ranks agree on what they gather.
    assert sum(gathers.values()) <= 4 + 2, gathers
    expected = whole(made, model)
    assert found.keys() == expected.keys()
    assert_same(found, expected, "state")
