"""Graphs exchange what the eager runtime does: as many collectives, as large, in the same dtypes and process groups.

On simulated worlds; the eager step beside is recorded where torch dispatches its collectives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import MixedPrecisionPolicy
from tests.compiled.helpers.models import WIDTH, build, build_parallel, parallelized, shard, whole
from tests.compiled.helpers.twins import Exchange, compiling
from tests.harness import FakeWorlds, others_full
from tests.harness.parity.trace import Collective, Trace, traced

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MESHES: dict[str, tuple[int, ...]] = {
    "shard": (8,),
    "replicate shard": (2, 4),
    "shard tp": (4, 2),
    "replicate shard tp": (2, 2, 2),
}


def prepared(mesh: DeviceMesh, **arguments: Any) -> nn.Module:
    """A model with uneven rows, and ranks that have none of some parameters; beside tensor parallelism if there is."""
    names = mesh.mesh_dim_names or ()
    model = build_parallel(10) if "tp" in names else build()
    if "tp" in names:
        parallelized(model, mesh["tp"])
    shard(model, mesh=mesh[tuple(name for name in names if name != "tp")], **arguments)
    return model


def of_data(found: list[Exchange], mesh: DeviceMesh) -> list[Exchange]:
    """Those that are not tensor parallelism's own."""
    names = mesh.mesh_dim_names or ()
    other = mesh["tp"].get_group().group_name if "tp" in names else ""
    return sorted((each for each in found if each[3] != other), key=str)


def of_eager(trace: Trace) -> list[Exchange]:
    events = [each for each in trace.events if isinstance(each, Collective)]
    return [(each.kind, each.numel, each.dtype, each.group) for each in events]


def eager_step(model: nn.Module) -> tuple[list[Exchange], list[Exchange]]:
    """What the second step exchanges, forward and backward: the first one has bookkeeping of its own."""
    model(torch.ones(2, WIDTH)).sum().backward()
    with traced() as forward:
        loss = model(torch.ones(2, WIDTH)).sum()
    with traced() as backward:
        loss.backward()
    return of_eager(forward), of_eager(backward)


def compiled_step(model: nn.Module) -> tuple[list[Exchange], list[Exchange]]:
    """What the graphs of a step exchange, forward and backward."""
    with compiling() as graphs:
        whole(model, graphs.backend())(torch.ones(2, WIDTH)).sum().backward()
        (one, forward), (other, backward) = graphs.exchanged
        assert (one, other) == ("forward", "backward")
        return forward, backward


def assert_exchanged_alike(axes: str, **arguments: Any) -> None:
    mesh = init_device_mesh("cpu", MESHES[axes], mesh_dim_names=tuple(axes.split()))
    expected, model = eager_step(prepared(mesh, **arguments)), prepared(mesh, **arguments)
    found = compiled_step(model)
    for one, other in zip(found, expected, strict=True):
        assert of_data(one, mesh) == of_data(other, mesh)
    kinds = [kind for kind, *_ in of_data(found[1], mesh)]
    units = len(model.blocks) + 1
    assert kinds.count("reduce_scatter") == units
    assert kinds.count("all_reduce") == (units if "replicate" in axes else 0)


QUICK = {"replicate shard"}


# Full: 1 s each, beside tensor parallelism 3 s.
@pytest.mark.parametrize("axes", others_full(MESHES, QUICK))
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), HALF], ids=["fp32", "bf16"])
def test_dtypes(simulate: FakeWorlds, axes: str, policy: MixedPrecisionPolicy) -> None:
    simulate(8, rank=7)  # has no rows of the smaller parameters
    assert_exchanged_alike(axes, mp_policy=policy)


@pytest.mark.full  # 1 to 3 s each
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("reshard", [True, False])
def test_resharding(simulate: FakeWorlds, axes: str, reshard: bool) -> None:
    simulate(8)
    assert_exchanged_alike(axes, reshard_after_forward=reshard)
