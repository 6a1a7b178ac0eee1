"""Training is the same, bit by bit, however late messages arrive and in whatever order; a missing wait is not."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from fsdp2.core.streams import CommHandle
from tests.harness import multi_rank
from tests.harness.compare import tolerance_for
from tests.harness.jitter import late_messages
from tests.harness.models import TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.pooling import needs_pool
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import shard, trainable
from tests.harness.training import assert_trains_like

SEEDS = 2


@multi_rank(2, full=[4])
@pytest.mark.parametrize("way", ["plain", pytest.param("pooled", marks=needs_pool), "several in flight"])
@pytest.mark.parametrize("case", [TRANSFORMER, UNEVEN_MLP], ids=str)
def test_training_equals_the_reference(case: ModelCase, way: str, world_size: int) -> None:
    for seed in range(SEEDS):
        with late_messages(seed):
            model = shard(case, case.build())
            if way == "pooled":
                model.set_communication_memory_pool(True)
            if way == "several in flight":
                model.set_reduce_scatter_max_input_buffers(3)
            assert_trains_like(
                Reference(case, world_size=world_size),
                model,
                adamw(trainable(model)),
                steps=3,
                tolerance=tolerance_for(world_size),
            )


@multi_rank(full=[4])
@pytest.mark.parametrize("reshard_after_forward", [None, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_on_replicas_and_neighbours(replicas: int, reshard_after_forward: int | None, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    if replicas == 1:
        mesh = mesh["shard"]
    elif reshard_after_forward:
        pytest.skip("two ranks have no smaller neighbourhood")
    for seed in range(SEEDS):
        with late_messages(seed):
            model = TRANSFORMER.build()
            for unit in TRANSFORMER.units(model):
                fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
            reference = Reference(TRANSFORMER, world_size=world_size)
            assert_trains_like(reference, model, adamw(trainable(model)), steps=3, tolerance=tolerance_for(world_size))


@multi_rank(2)
def test_a_missing_wait_shows(world_size: int) -> None:
    """Blocks compute before their parameters have arrived. (All memory is kept, so that nothing else is harmed.)"""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    batch = torch.ones(2, 512)
    expected = model(batch).detach()
    skipped: list[dist.Work] = []
    found = []
    for seed in range(5):
        model.reshard()
        for layer in model:
            layer.reshard()
        with late_messages(seed):
            with mock.patch.object(CommHandle, "wait_for_works", lambda handle: skipped.extend(handle.works)):
                found.append(model(batch).detach())
            for work in skipped:
                work.wait()
            skipped.clear()
    assert any(not torch.equal(output, expected) for output in found)
    assert torch.equal(model(batch), expected)
