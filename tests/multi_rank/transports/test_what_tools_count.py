"""Tools that count collectives see those of peers as well: torch's numbers, on gloo."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.compat import install
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.models import UNEVEN_MLP

# Of CommDebugMode's, whose hooks are on modules without a differentiable input.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

NEW_NAMES = hasattr(dist, "all_gather_single")
GATHER = "all_gather_single" if NEW_NAMES else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if NEW_NAMES else "reduce_scatter_tensor"
# Of three units: gathered before forward and, as they reshard, before backward; reduced once.
EXPECTED = {"gathers": 6, "reductions": 3}


def sharded(replicated: bool = False, **options: Any) -> Any:
    model = UNEVEN_MLP.build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if replicated else None
    for unit in UNEVEN_MLP.units(model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def loss_of(model: Any) -> torch.Tensor:
    return UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, dist.get_rank()))


def counted(mode: CommDebugMode) -> Counter[str]:
    return Counter({str(key).partition("c10d.")[2].strip("')>"): n for key, n in mode.get_comm_counts().items()})


@multi_rank(2)
def test_comm_debug_mode_counts_what_torchs_does(world_size: int) -> None:
    model = sharded()
    loss_of(model).backward()
    model.zero_grad()
    with CommDebugMode() as mode:
        loss_of(model).backward()
    assert mode.get_total_counts() == 9, mode.get_comm_counts()
    assert counted(mode) == {"_allgather_base_": 6, "_reduce_scatter_base_": 3}


@multi_rank(4)
def test_comm_debug_mode_counts_reductions_over_replicas_too() -> None:
    model = sharded(replicated=True)
    with CommDebugMode() as mode:
        loss_of(model).backward()
    assert counted(mode) == {"_allgather_base_": 6, "_reduce_scatter_base_": 3, "allreduce_": 3}


@multi_rank(2)
def test_patched_functions_see_the_traffic_and_change_none_of_it(world_size: int) -> None:
    """On one rank only: what the others do must not depend on it."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model, seen = sharded(mp_policy=policy), Counter[str]()

    def patched(name: str) -> Any:
        original = getattr(dist, name)

        def function(output: Any, input: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            seen[name] += 1
            assert dist.get_rank(group) == dist.get_rank() and dist.get_world_size(group) == 2
            return original(output, input, *args, group=group, **kwargs)

        return function

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            for name in (GATHER, SCATTER):
                patch.setattr(dist, name, patched(name))
        reference = Reference(UNEVEN_MLP, world_size=world_size)
        assert_trains_like(
            reference, model, adamw(list(model.parameters())), steps=1, tolerance=tolerance_for(world_size)
        )
    assert seen[SCATTER] == (EXPECTED["reductions"] if dist.get_rank() == 0 else 0)
    assert seen[GATHER] == (EXPECTED["gathers"] if dist.get_rank() == 0 else 0)


@multi_rank(2)
def test_a_gather_in_several_pieces_is_counted_once(world_size: int) -> None:
    """Parameters of a megabyte travel on their own."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
    fully_shard(model, reshard_after_forward=True)
    batch = torch.randn(2, 512)
    model(batch).sum().backward()
    with CommDebugMode() as mode:
        model(batch).sum().backward()
    assert counted(mode) == {"_allgather_base_": 2, "_reduce_scatter_base_": 1}


# ---- torch's memory tracker ----------------------------------------------------------------------


def bytes_by_kind(tracker: Any, module: nn.Module, when: str) -> dict[str, int]:
    """What the first snapshot of ``module`` at that point says."""
    state = next(each for each in tracker.memory_tracking[module].snapshots if each.value == when)
    (snapshot,) = tracker.memory_tracking[module].snapshots[state][0].values()
    return {getattr(kind, "value", kind): size for kind, size in snapshot.items()}


@multi_rank(2)
def test_the_memory_tracker_of_torch(world_size: int) -> None:
    """It knows our modules after `install`, in whatever order it is imported; and leaves them as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    with install():
        tracking = importlib.import_module("torch.distributed._tools.fsdp2_mem_tracker")
        for unit in (*model, model):
            fully_shard(unit)
        optimizer = torch.optim.Adam(model.parameters())
        hooks = [dict(unit._forward_pre_hooks) for unit in model]
        x = torch.randn(4, 8)
        tracker = tracking.FSDPMemTracker(model, optimizer)
        assert type(tracker).__module__ == "fsdp2.compat.memory_tracking"
        tracker.track_inputs((x,))
        with tracker:
            model(x).square().sum().backward()
            optimizer.step()
    assert tracking.FSDPMemTracker.__module__ == tracking.__name__
    with install():  # now it has been imported before
        assert tracking.FSDPMemTracker.__module__ == "fsdp2.compat.memory_tracking"
    whole = sum(parameter.numel() for parameter in model[1].parameters()) * 4
    shards = sum(parameter.to_local().numel() for parameter in model.parameters()) * 4  # type: ignore[attr-defined]
    middle = model[1]
    for when, unsharded in [
        ("Before Pre-Forward", 0),
        ("After Pre-Forward", whole),
        ("After Post-Forward", 0),
        ("Before Pre-Backward", 0),
        ("After Pre-Backward", whole),
        ("Before Post-Backward", whole),
        ("After Post-Backward", 0),
    ]:
        found = bytes_by_kind(tracker, middle, when)
        assert found["Unsharded Param"] == unsharded, when
        assert found["Sharded Param"] == shards
        assert found["Inputs"] == 4 * 8 * 4
    assert bytes_by_kind(tracker, middle, "Before Post-Backward")["Unsharded Grad"] == whole
    (now,) = tracker.get_tracker_snapshot("current").values()
    sizes = {getattr(kind, "value", kind): size for kind, size in now.items()}
    assert sizes["Sharded Grad"] >= shards
    assert sizes["OptState"] >= 2 * shards
    assert tracker.get_tracker_snapshot("peak")
    assert hooks == [dict(unit._forward_pre_hooks) for unit in model]
    assert not [name for unit in model for name in unit._get_fsdp_state().__dict__ if name == "_gather_for_backward"]
    model(x).square().sum().backward()


@multi_rank(2)
def test_the_memory_tracker_of_torch_with_a_list_of_modules(world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with install():
        tracking = importlib.import_module("torch.distributed._tools.fsdp2_mem_tracker")
        fully_shard(list(model))
        fully_shard(model)
        tracker = tracking.FSDPMemTracker(model)
        with tracker:
            model(torch.randn(4, 8)).sum().backward()
    for when in ("Before Pre-Backward", "After Post-Backward"):
        assert bytes_by_kind(tracker, model[0], when)["Unsharded Param"] in (0, 2 * 72 * 4)
    snapshots = {state.value: found for state, found in tracker.memory_tracking[model[0]].snapshots.items()}
    assert len(snapshots["After Post-Backward"]) == 1
    model(torch.randn(4, 8)).sum().backward()
