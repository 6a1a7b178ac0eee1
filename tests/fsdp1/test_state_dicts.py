"""State dicts of the wrapper and of optimizers: each type, there and back, and to and from torch's own FSDP1."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPRuntimeError
from fsdp2.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from tests.harness import multi_rank
from tests.harness.models import UNEVEN_MLP

CPU = torch.device("cpu")
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def torchs() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

    return Torchs


def wrapped(kind: Any = FullyShardedDataParallel, *, seed: int = 0, **arguments: Any) -> Any:
    return kind(UNEVEN_MLP.build(seed), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=CPU, **arguments)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, *others = model.parameters()
    groups: Any = [{"params": [first], "weight_decay": 0.1}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, step, dist.get_rank()))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@multi_rank(2, 4)
@pytest.mark.full
def test_on_the_first_rank_only(world_size: int) -> None:
    model, other = wrapped(), wrapped(seed=1)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, FULL, config):
        saved = model.state_dict()
    assert bool(saved) is (dist.get_rank() == 0)
    with FullyShardedDataParallel.state_dict_type(other, FULL, config):
        other.load_state_dict(saved)
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local()), name


@multi_rank(2)
def test_values_that_are_sharded_already_are_not_sent_by_the_first_rank(world_size: int) -> None:
    """As PEFT gives them: it makes DTensors of whole adapters, where the parameters are DTensors."""
    model, other = wrapped(), wrapped(seed=1)
    given = {
        name: value.detach() if name.endswith("weight") else value.full_tensor().detach()
        for name, value in model.named_parameters()
    }
    with FullyShardedDataParallel.state_dict_type(other, FULL, FullStateDictConfig(True, rank0_only=True)):
        other.load_state_dict(given)
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local()), name
    unit: Any = FullyShardedDataParallel(nn.Linear(3, 5, bias=False))
    given = {"weight": unit.weight.detach()} if dist.get_rank() == 0 else {}
    refused = contextlib.nullcontext() if given else pytest.raises(FSDPRuntimeError, match="'weight' is to be loaded")
    with refused, FullyShardedDataParallel.state_dict_type(unit, FULL, FullStateDictConfig(rank0_only=True)):
        unit.load_state_dict(given, strict=False)


class ReadWhenAsked:
    """What Lightning puts in the place of tensors of a file: torch's functions find the values."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[each.value if isinstance(each, cls) else each for each in args], **(kwargs or {}))


@multi_rank(2)
def test_tensors_that_are_read_when_torch_asks(world_size: int) -> None:
    model, other = wrapped(), wrapped(seed=1)
    with FullyShardedDataParallel.state_dict_type(model, FULL):
        other.load_state_dict({name: ReadWhenAsked(value) for name, value in model.state_dict().items()})
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local()), name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))


@multi_rank(2)
def test_ties_have_all_their_names(world_size: int) -> None:
    torch.manual_seed(0)
    plain = Tied()
    model = FullyShardedDataParallel(nn.ModuleDict({"a": nn.Sequential(copy.deepcopy(plain))})["a"])
    saved = model.state_dict()
    assert list(saved) == ["0.scale", "0.embedding.weight", "0.head.weight"]
    assert saved["0.head.weight"] is saved["0.embedding.weight"]
    model.load_state_dict({name: torch.full_like(value, 3.0) for name, value in saved.items()})
    assert (whole(model[0].head.weight) == 3).all() and (model[0].scale == 3).all()


@multi_rank(2)
def test_what_does_not_fit_is_told_by_its_name(world_size: int) -> None:
    model = wrapped()
    saved = model.state_dict()
    name, value = next(iter(saved.items()))
    with pytest.raises(RuntimeError, match=name):
        model.load_state_dict({name: value[:-1], **{key: each for key, each in saved.items() if key != name}})
    found = model.load_state_dict({"other": value}, strict=False)
    assert found.missing_keys == list(saved) and found.unexpected_keys == ["other"]
    with pytest.raises(FSDPRuntimeError, match="state_dict_config of type FullStateDictConfig for FULL_STATE_DICT"):
        FullyShardedDataParallel.set_state_dict_type(model, FULL, ShardedStateDictConfig())


@multi_rank(2)
def test_settings_come_back_after_an_exception(world_size: int) -> None:
    model = wrapped()
    before = FullyShardedDataParallel.get_state_dict_type(model)
    with pytest.raises(KeyError), FullyShardedDataParallel.state_dict_type(model, SHARDED):
        assert FullyShardedDataParallel.get_state_dict_type(model[0]).state_dict_type is SHARDED
        raise KeyError
    assert FullyShardedDataParallel.get_state_dict_type(model) == before
    FullyShardedDataParallel.set_state_dict_type(model[0], SHARDED)
    with pytest.raises(FSDPRuntimeError, match="different state dict types"):
        FullyShardedDataParallel.get_state_dict_type(model)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself
@multi_rank(2, 4)
@pytest.mark.parametrize(
    ("kind", "writer"),  # SHARDED is never ShardedTensor here: torch's reads DTensors only with a device mesh
    [("FULL_STATE_DICT", "torch"), ("FULL_STATE_DICT", "fsdp2"), ("SHARDED_STATE_DICT", "torch")],
)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_checkpoints_of_torchs_fsdp1(kind: str, use_orig_params: bool, writer: str, world_size: int) -> None:
    """Written there and read here (without communication, of one rank each), and the reverse for whole tensors."""
    theirs = wrapped(torchs(), use_orig_params=use_orig_params, seed=2)
    ours = wrapped(seed=1)
    first, second = (theirs, ours) if writer == "torch" else (ours, theirs)
    optimizer = optimizer_of(first, "SGD")
    train(first, optimizer, 0, 2)
    settings = (StateDictType[kind],)
    with type(first).state_dict_type(first, *settings):
        weights = first.state_dict()
        state = type(first).optim_state_dict(first, optimizer)
    others = optimizer_of(second, "SGD")
    with type(second).state_dict_type(second, *settings):
        second.load_state_dict(weights)
        others.load_state_dict(type(second).optim_state_dict_to_load(second, others, state))
    for one, other in zip(train(first, optimizer, 2, 3), train(second, others, 2, 3), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@multi_rank(4)
@pytest.mark.full
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_first_rank_of_a_model_on_a_part_of_the_ranks(hybrid: bool, world_size: int) -> None:
    """Whose rank 0 is none of its ranks, as of the second stage of a pipeline; or whose mesh has two dims."""
    arguments: dict[str, Any] = {}
    if hybrid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        arguments = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    else:
        arguments = {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]}
    first = 0 if hybrid or dist.get_rank() < 2 else 2
    model, other = wrapped(**arguments), wrapped(seed=1, **arguments)
    optimizers = [optimizer_of(each, "SGD") for each in (model, other)]
    train(model, optimizers[0], 0, 1)
    settings = (FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    with (
        FullyShardedDataParallel.state_dict_type(model, *settings),
        FullyShardedDataParallel.state_dict_type(other, *settings),
    ):
        saved = model.state_dict()
        state = FullyShardedDataParallel.optim_state_dict(model, optimizers[0])
        assert bool(saved) is bool(state) is (dist.get_rank() == first)
        other.load_state_dict(saved)
        optimizers[1].load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, optimizers[1], state))
    assert train(model, optimizers[0], 1, 2) == train(other, optimizers[1], 1, 2)


@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_was_saved_to_the_cpu_stays_as_it_was(strategy: str, world_size: int) -> None:
    model = wrapped(sharding_strategy=ShardingStrategy[strategy])
    with FullyShardedDataParallel.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)):
        saved = model.state_dict()
    before = copy.deepcopy(saved)
    train(model, optimizer_of(model, "SGD"), 0, 2)
    assert all(torch.equal(saved[name], value) for name, value in before.items())


@multi_rank(2)
@pytest.mark.full
def test_parameters_that_share_a_step_count_for_themselves_afterwards(world_size: int) -> None:
    """Torch's FULL state of a flat parameter has one tensor as the step of all parameters in it."""
    model, other = wrapped(), wrapped(seed=1)
    optimizers = [optimizer_of(each, "AdamW") for each in (model, other)]
    train(model, optimizers[0], 0, 2)
    state = FullyShardedDataParallel.optim_state_dict(model, optimizers[0])
    step = torch.tensor(2.0)
    for entry in state["state"].values():
        assert entry["step"] == step
        entry["step"] = step
    optimizers[1].load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, optimizers[1], state))
    train(other, optimizers[1], 2, 1)
    assert step == 2 and [entry["step"].item() for entry in optimizers[1].state.values()] == [3.0] * len(state["state"])


class _SavesTwice(nn.Module):
    """Asks for a part's state dict in the middle of its own, as programs do that keep an average of the weights."""

    def __init__(self, part: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.others = [other]  # no submodule
        self.bias = nn.Parameter(torch.ones(3))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        for key, value in self.others[0].state_dict().items():
            found[f"other.{key}"] = value
        for key, value in self.part.state_dict().items():
            found[f"again.{key}"] = value
        return found


@multi_rank(2)
@pytest.mark.full
def test_state_dicts_inside_of_a_state_dict() -> None:
    """Units are gathered together for one call; what was gathered already, or lies elsewhere, by itself."""
    part, other = wrapped(seed=1), wrapped(seed=2)
    model = FullyShardedDataParallel(_SavesTwice(part, other), device_id=CPU)
    found = model.state_dict()
    for prefix, seed in (("part.", 1), ("again.", 1), ("other.", 2)):
        for name, expected in UNEVEN_MLP.build(seed).state_dict().items():
            assert torch.equal(found[f"{prefix}{name}"], expected), (prefix, name)
    assert not any(isinstance(value, DTensor) for value in found.values())


@multi_rank(2)
@pytest.mark.full
def test_a_state_dict_after_one_that_failed() -> None:
    """What was gathered for the one that failed is not taken for another: the weights have changed since."""
    model = wrapped()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    handle = model.module.register_state_dict_post_hook(fail)
    with pytest.raises(OSError, match="disk full"):
        model.state_dict()
    handle.remove()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    found = model.state_dict()
    for name, expected in UNEVEN_MLP.build(0).state_dict().items():
        assert torch.equal(found[name], expected + 1), name
