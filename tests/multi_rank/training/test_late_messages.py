"""Training is the same, bit by bit, however late messages arrive and in whatever order; a missing wait is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.core.streams import CommHandle
from tests.harness import multi_rank
from tests.harness.compare import tolerance_for
from tests.harness.jitter import late_messages
from tests.harness.models import TRANSFORMER
from tests.harness.pooling import needs_pool
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import trainable
from tests.harness.shared.ways import hybrid
from tests.harness.training import assert_trains_like

SEEDS = 2


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "pooled": dict,
    "several in flight": dict,
    "replicas": hybrid,
    "neighbours": lambda: {"reshard_after_forward": 2},
}


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("way", [pytest.param(each, marks=needs_pool if each == "pooled" else ()) for each in WAYS])
def test_training_equals_the_reference(way: str, world_size: int) -> None:
    for seed in range(SEEDS):
        with late_messages(seed):
            model = TRANSFORMER.build()
            for unit in TRANSFORMER.units(model):
                fully_shard(unit, **WAYS[way]())
            if way == "pooled":
                model.set_communication_memory_pool(True)
            if way == "several in flight":
                model.set_reduce_scatter_max_input_buffers(3)
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
