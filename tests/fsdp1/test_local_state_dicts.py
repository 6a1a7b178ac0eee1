"""LOCAL state dicts of the wrapper, beside those that torch's FSDP1 writes and reads."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import FSDPNotImplementedError, FSDPRuntimeError
from fsdp2.compat.fsdp1 import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, StateDictType
from tests.fsdp1.helpers.models import Block, blocks
from tests.harness import multi_rank
from tests.harness.models import UNEVEN_MLP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself
LOCAL = StateDictType.LOCAL_STATE_DICT


def torchs() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

    return Torchs


def wrapped(kind: Any = FullyShardedDataParallel, *, seed: int = 0, **arguments: Any) -> Any:
    policy = ModuleWrapPolicy({nn.Linear})
    return kind(UNEVEN_MLP.build(seed), auto_wrap_policy=policy, device_id=torch.device("cpu"), **arguments)


def local_state_dict(model: Any) -> dict[str, Any]:
    with type(model).state_dict_type(model, LOCAL):
        found: dict[str, Any] = model.state_dict()
    return found


def from_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


def elements(value: Any) -> torch.Tensor:
    if not hasattr(value, "local_shards"):
        return value.detach()  # type: ignore[no-any-return]
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0)


@multi_rank(2, 4)
@pytest.mark.full
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("writer", ["torch", "fsdp2", "both"])
def test_what_one_writes_the_other_reads(use_orig_params: bool, writer: str, world_size: int) -> None:
    theirs = wrapped(torchs(), use_orig_params=use_orig_params, seed=2)
    ours = wrapped(use_orig_params=use_orig_params, seed=1)
    other = wrapped(use_orig_params=use_orig_params, seed=3) if writer == "both" else theirs
    first, second = (theirs, ours) if writer == "torch" else (ours, other)
    written = local_state_dict(first)
    if writer == "fsdp2" and use_orig_params:  # torch reads these neither of ours nor its own
        for given in (from_file(written), local_state_dict(theirs)):
            with theirs.state_dict_type(theirs, LOCAL), pytest.raises(RuntimeError, match="Unexpected key"):
                theirs.load_state_dict(given)
        return
    with type(second).state_dict_type(second, LOCAL):
        second.load_state_dict(from_file(written) if writer != "torch" else written)
    full = [model.state_dict() for model in (first, second)]
    assert list(full[0]) == list(full[1])
    for name, value in full[0].items():
        assert torch.equal(value, full[1][name]), name


@multi_rank(4)
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_strategies(strategy: str, world_size: int) -> None:
    arguments: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "HYBRID_SHARD":
        arguments["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, other = wrapped(**arguments), wrapped(seed=1, **arguments)
    written = local_state_dict(model)
    assert any(name.endswith("_flat_param") for name in written) is (strategy != "NO_SHARD")
    with FullyShardedDataParallel.state_dict_type(other, LOCAL):
        other.load_state_dict(written)
    for (name, found), expected in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found.to_local(), expected.to_local()), name


@multi_rank(2)
def test_another_wrapping_is_refused(world_size: int) -> None:
    written = local_state_dict(wrapped())
    other = FullyShardedDataParallel(UNEVEN_MLP.build(1))
    with (
        FullyShardedDataParallel.state_dict_type(other, LOCAL),
        pytest.raises((FSDPRuntimeError, RuntimeError), match=r"Unexpected key.*_flat_param|_flat_param' has \["),
    ):
        other.load_state_dict(written)
    again = wrapped(seed=1)
    name = next(name for name in written if name.endswith("_flat_param"))
    partly = {key: value for key, value in written.items() if key != name or dist.get_rank() == 0}
    with (
        FullyShardedDataParallel.state_dict_type(again, LOCAL),
        pytest.raises(FSDPRuntimeError, match=f"'{name}' has .*fsdp2.compat.fsdp1.convert"),
    ):
        again.load_state_dict(partly)


@multi_rank(4)
def test_tensor_parallel_parameters_are_refused(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = copy.deepcopy(blocks())
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], auto_wrap_policy=ModuleWrapPolicy({Block}))
    with (
        FullyShardedDataParallel.state_dict_type(model, LOCAL),
        pytest.raises(FSDPNotImplementedError, match="SHARDED"),
    ):
        model.state_dict()


@multi_rank(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_copies_of_them_stay_as_they_are(use_orig_params: bool, world_size: int) -> None:
    """Also where a rank has no element: there is one parameter of one."""
    model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), use_orig_params=use_orig_params)
    saved, before = copy.deepcopy(local_state_dict(model)), model.state_dict()["weight"]
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        model.weight.fill_(7)
    assert model.state_dict()["weight"] == 7
    with FullyShardedDataParallel.state_dict_type(model, LOCAL):
        model.load_state_dict(saved)
    assert torch.equal(model.state_dict()["weight"], before)
