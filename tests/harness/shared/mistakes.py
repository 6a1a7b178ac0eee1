"""A sharded model to make a mistake with, and the proof that it is as good as new afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import Reference, adamw, assert_trains_like, tolerance_for
from tests.harness.models import ModelCase
from tests.harness.shared.training import CASE, shard

INPUTS = torch.linspace(-1, 1, 4 * 13).view(4, 13)


def train(model: nn.Module, case: ModelCase = CASE, *, steps: int = 2) -> None:
    """The model is as good as new: it trains like the reference from the initial parameters."""
    world_size = dist.get_world_size()
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=steps, tolerance=tolerance_for(world_size))


def prepared(ran_before: bool) -> nn.Module:
    """A sharded model, before or after its first forward."""
    model = shard()
    if ran_before:
        with torch.no_grad():
            model(INPUTS)
    return model


BEFORE_AND_AFTER = pytest.mark.parametrize("ran_before", [False, True], ids=["before_first", "after_first"])
