"""torch 2.15's new backend for NCCL calls itself "nccl2" and launches every collective by itself."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import _torch, fully_shard
from tests.harness import fake_world
from tests.harness.internals import groups_of

WIDTHS = {"16 MiB": 2048, "64 MiB": 4096}


@pytest.fixture(params=["nccl", "nccl2"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Its name, which stands for that of the fake group."""
    with mock.patch.object(_torch, "backend_name", lambda group, device: request.param), fake_world(8):
        yield request.param


@pytest.mark.parametrize("size", WIDTHS)
def test_what_takes_less_time_to_copy_than_to_launch_is_packed(size: str, backend: str) -> None:
    """Where several collectives are one launch, everything of 1 MiB travels alone."""
    model = nn.Sequential(*(nn.Linear(WIDTHS[size], WIDTHS[size], bias=False, device="meta") for _ in range(3)))
    fully_shard(model).to_empty(device="cpu")
    (group,) = groups_of(model)
    (plan,) = group.plan.gathers
    group.reducer.lay_out(group.params)
    (bucket,) = group.reducer.buckets
    travels_alone = backend == "nccl" or size == "64 MiB"
    assert [slot.direct for slot in plan.layout.slots] == [travels_alone] * 3
    assert [slot.direct for slot in bucket.layout.slots] == [travels_alone] * 3


def test_both_scale_as_they_sum(backend: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.set_gradient_divide_factor(3.0)
    (group,) = groups_of(model)
    scaling = group.reducer._scaling(model.weight.dtype)
    assert scaling.scatter_op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    assert (scaling.before, scaling.after, scaling.factor) == (1.0, 1.0, 3.0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_labels_are_the_same_on_all_ranks(replicas: int, backend: str) -> None:
    """Operations that multiply by a factor say in their text where they lie in memory, which no other rank has."""
    mesh = init_device_mesh("cpu", (replicas, 8 // replicas), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh if replicas > 1 else mesh["shard"])
    model.set_gradient_divide_factor(3.0)
    (group,) = groups_of(model)
    reducer = group.reducer
    kept, found = [], []
    for _ in range(3):
        reducer.lay_out(group.params)
        over = reducer.transport.among_replicas
        kept.append(reducer._scalings)  # an operation in the memory of the one before would say the same
        found.append([each.bits for each in (*reducer._labels, *([over.label] if over is not None else []))])
    assert len(found[0]) == 1 + replicas and found[1:] == found[:2]
    model.set_gradient_divide_factor(5.0)
    assert not {each.bits for each in reducer._labels}.intersection(found[0])
