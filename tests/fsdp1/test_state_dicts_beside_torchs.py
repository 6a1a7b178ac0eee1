"""State dicts of torch's own FSDP1 and of the wrapper: the same programs, beside the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ModuleWrapPolicy,
    OptimStateKeyType,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from tests.fsdp1.helpers.both import (
    SUMS,
    backward,
    both,
    plain_name,
    sgd,
    whole_weights,
    wrapped,
)
from tests.harness import Reference, multi_rank
from tests.harness.compare import assert_same
from tests.harness.models import UNEVEN_MLP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT


# ---- state dicts ------------------------------------------------------------------------------------


@multi_rank(2)
@both
def test_what_full_state_dicts_hold(kind: str, world_size: int) -> None:
    model, plain = wrapped(kind), UNEVEN_MLP.build()
    assert_same("weights", {name: value.detach() for name, value in model.state_dict().items()}, plain.state_dict())
    config = FullStateDictConfig(offload_to_cpu=kind == "fsdp2", rank0_only=True)  # as of summoning
    with type(model).state_dict_type(model, FULL, config):
        saved = model.state_dict()
    assert list(saved) == (list(plain.state_dict()) if dist.get_rank() == 0 else [])


@multi_rank(2)
@both
@pytest.mark.parametrize("offload", [False, True])
def test_what_sharded_state_dicts_hold(kind: str, offload: bool, world_size: int) -> None:
    model, plain = wrapped(kind), UNEVEN_MLP.build()
    with type(model).state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=offload)):
        saved = model.state_dict()
    assert {name: tuple(value.size()) for name, value in saved.items()} == {
        name: tuple(value.shape) for name, value in plain.state_dict().items()
    }
    assert {type(value).__name__ for value in saved.values()} == {"ShardedTensor" if kind == "torch" else "DTensor"}
    for name, whole in plain.state_dict().items():
        value = saved[name]
        rows = value.to_local() if kind == "fsdp2" else _rows(value)
        parts = list(whole.chunk(world_size))
        expected = parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole[:0]
        assert torch.equal(rows, expected), name
        if kind == "fsdp2" and not offload:
            assert rows.data_ptr() == model.get_parameter(name).to_local().data_ptr(), "the parameters themselves"
    with type(model).state_dict_type(model, SHARDED):
        model.load_state_dict(saved)


def _rows(value: Any) -> Tensor:
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0, *value.size()[1:])


@multi_rank(2)
@both
def test_sharded_state_dicts_of_a_mesh_are_dtensors_in_both(kind: str, world_size: int) -> None:
    model = wrapped(kind, device_mesh=init_device_mesh("cpu", (world_size,)))
    with type(model).state_dict_type(model, SHARDED):
        saved = model.state_dict()
    assert all(isinstance(value, DTensor) for value in saved.values())
    plain = UNEVEN_MLP.build().state_dict()
    assert_same("weights", {name: value.full_tensor().detach() for name, value in saved.items()}, plain)


@multi_rank(2)
@both
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_local_state_dicts_hold(kind: str, use_orig_params: bool, world_size: int) -> None:
    model = wrapped(kind, use_orig_params=use_orig_params)
    with type(model).state_dict_type(model, LOCAL, LocalStateDictConfig()):
        saved = model.state_dict()
    units = {name.split(".")[0] for name, _ in UNEVEN_MLP.build().named_parameters()}
    flat = {f"{unit}._flat_param" for unit in units}
    pieces = {name for name, _ in UNEVEN_MLP.build().named_parameters()} if use_orig_params else set()
    assert set(saved) == flat | pieces


@multi_rank(2)
@both
def test_settings(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    cls = type(model)
    before = cls.get_state_dict_type(model)
    assert isinstance(before, StateDictSettings) and before.state_dict_type is FULL
    assert cls.set_state_dict_type(model, SHARDED).state_dict_type is FULL
    assert cls.get_state_dict_type(model).state_dict_type is SHARDED
    assert cls.get_state_dict_type(model[0]).state_dict_config == ShardedStateDictConfig()
    cls.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig())
    assert cls.get_state_dict_type(model).state_dict_config.rank0_only
    with cls.state_dict_type(model, LOCAL):
        assert cls.get_state_dict_type(model).state_dict_type is LOCAL
    assert cls.get_state_dict_type(model).state_dict_type is FULL
    with pytest.raises(RuntimeError):
        cls.set_state_dict_type(model, FULL, ShardedStateDictConfig())
    with pytest.raises(KeyError), cls.state_dict_type(model, SHARDED):
        raise KeyError
    after = cls.get_state_dict_type(model).state_dict_type
    assert after is (SHARDED if kind == "torch" else FULL)  # torch leaves it


@multi_rank(2)
@both
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@pytest.mark.parametrize("directly", [False, True])
def test_training_goes_on_from_state_dicts(kind: str, state_dict_type: str, directly: bool, world_size: int) -> None:
    chosen = StateDictType[state_dict_type]
    model = wrapped(kind, use_orig_params=False)
    optimizer = sgd(model.parameters())
    backward(model)
    optimizer.step()
    other = wrapped(kind, UNEVEN_MLP.build(1), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=False)
    others = sgd(other.parameters())
    cls = type(model)
    with cls.state_dict_type(model, chosen), cls.state_dict_type(other, chosen):
        other.load_state_dict(copy.deepcopy(model.state_dict()) if chosen is FULL else model.state_dict())
        state = cls.optim_state_dict(model, optimizer)
        names = [name for name, _ in UNEVEN_MLP.build().named_parameters()]
        assert sorted(state["state"]) == sorted(names)
        assert sorted(name for group in state["param_groups"] for name in group["params"]) == sorted(names)
        loaded = cls.optim_state_dict_to_load(other, others, state, load_directly=directly)
        if not directly:
            others.load_state_dict(loaded)
    reference = Reference(UNEVEN_MLP, world_size=world_size, make_optimizer=sgd)
    reference.step()
    record = reference.step()
    optimizer.zero_grad()
    backward(other, 1)
    others.step()
    assert_same("weights", whole_weights(other), record.parameters, tolerance=SUMS)


@multi_rank(2)
@both
def test_the_older_methods(kind: str, world_size: int) -> None:
    model = wrapped(kind, use_orig_params=False)
    optimizer, cls = sgd(model.parameters()), type(model)
    backward(model)
    optimizer.step()
    names = {name for name, _ in UNEVEN_MLP.build().named_parameters()}
    on_first = cls.full_optim_state_dict(model, optimizer)
    assert set(on_first.get("state", ())) == (names if dist.get_rank() == 0 else set())
    full = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert set(full["state"]) == names
    reference = Reference(UNEVEN_MLP, world_size=world_size, make_optimizer=sgd)
    reference.step()
    kept = zip(reference.model.named_parameters(), reference.optimizer.state.values(), strict=True)
    expected = {name: entry["momentum_buffer"] for (name, _), entry in kept}
    found = {name: entry["momentum_buffer"] for name, entry in full["state"].items()}
    assert_same("momentum", found, expected, tolerance=SUMS)
    own = optimizer.state_dict()["state"]
    ways: list[Callable[[], Any]] = [
        lambda: cls.shard_full_optim_state_dict(full, model, optim=optimizer),
        lambda: cls.scatter_full_optim_state_dict(on_first or None, model, optim=optimizer),
        lambda: cls.flatten_sharded_optim_state_dict(cls.sharded_optim_state_dict(model, optimizer), model, optimizer),
    ]
    for way in ways:
        made = way()["state"]
        assert made.keys() == own.keys()
        for key, entry in own.items():
            first, second = entry["momentum_buffer"], made[key]["momentum_buffer"]
            if isinstance(first, DTensor):
                first, second = first.to_local(), second.to_local()
            assert torch.equal(first, second)


@multi_rank(2)
@both
def test_rekeying(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    optimizer, cls = sgd(model.parameters()), type(model)
    backward(model)
    optimizer.step()
    named = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    numbered = cls.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    names = [name for name, _ in UNEVEN_MLP.build().named_parameters()]
    assert sorted(numbered["state"]) == list(range(len(names)))
    for number, name in enumerate(names):
        assert torch.equal(numbered["state"][number]["momentum_buffer"], named["state"][name]["momentum_buffer"])
    back = cls.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
    assert set(back["state"]) == set(names)


@multi_rank(2)
@both
def test_arguments_of_optimizers_state_dicts(kind: str, world_size: int) -> None:
    """A state that is given, a group, keys by name, and what an optimizer is built on in the place of it."""
    model = wrapped(kind)
    optimizer, cls, group = sgd(model.parameters()), type(model), dist.group.WORLD
    backward(model)
    optimizer.step()
    expected = cls.optim_state_dict(model, optimizer)
    given = copy.deepcopy(optimizer.state_dict())
    backward(model, 1)
    optimizer.step()
    found = cls.optim_state_dict(model, optimizer, given, group=group)
    assert_same("given", momentum(found), momentum(expected))
    loaded = cls.optim_state_dict_to_load(model, optimizer, found, is_named_optimizer=True, group=group)
    names = {name for name, _ in UNEVEN_MLP.build().named_parameters()}
    named = {plain_name(name) for name in loaded["state"]}
    assert named == names if kind == "fsdp2" else named <= names  # those that this rank has elements of
    parameters = list(model.parameters())
    full = cls.full_optim_state_dict(model, optimizer, optim_input=parameters, rank0_only=False, group=group)
    assert full["state"].keys() == names
    numbered = cls.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model, optim_input=parameters)
    assert sorted(numbered["state"]) == list(range(len(names)))
    scattered = cls.scatter_full_optim_state_dict(
        full if dist.get_rank() == 0 else None, model, optim_input=parameters, group=group
    )
    ways = (cls.shard_full_optim_state_dict(full, model, optim_input=parameters), scattered)
    for way in ways:
        assert way["state"].keys() == optimizer.state_dict()["state"].keys()
        for key, entry in optimizer.state_dict()["state"].items():
            first, second = entry["momentum_buffer"], way["state"][key]["momentum_buffer"]
            if isinstance(first, DTensor):
                first, second = first.to_local(), second.to_local()
            assert torch.equal(first, second)
    sharded = cls.sharded_optim_state_dict(model, optimizer, group=group)
    assert sharded["state"].keys() == names
    assert {type(entry["momentum_buffer"]).__name__ for entry in sharded["state"].values()} == {
        "ShardedTensor" if kind == "torch" else "DTensor"
    }


@multi_rank(2)
@both
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_what_was_saved_does_not_train_on(kind: str, state_dict_type: str, world_size: int) -> None:
    """But for the shards themselves in SHARDED, which are not copied here."""
    model = wrapped(kind)
    optimizer, cls = torch.optim.AdamW(model.parameters()), type(model)
    backward(model)
    optimizer.step()
    with cls.state_dict_type(model, StateDictType[state_dict_type]):
        state = cls.optim_state_dict(model, optimizer)["state"]
    before = copy.deepcopy(state) if state_dict_type == "FULL_STATE_DICT" else {}
    backward(model, 1)
    optimizer.step()
    assert {float(entry["step"]) for entry in state.values()} == {1.0}
    for name, entry in before.items():
        assert all(torch.equal(value, state[name][what]) for what, value in entry.items()), name


def momentum(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: entry["momentum_buffer"] for name, entry in state["state"].items()}
