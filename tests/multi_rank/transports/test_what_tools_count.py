"""Tools that count collectives see those of peers as well: torch's numbers, on gloo."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import MixedPrecisionPolicy, fully_shard
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


@pytest.mark.full
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
