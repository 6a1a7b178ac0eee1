"""Trains a model of any layout beside the unsharded one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from tests.harness import Reference, adamw
from tests.harness.compare import Tolerance, tolerance_for
from tests.harness.models import ModelCase
from tests.harness.shared.training import trainable
from tests.harness.training import assert_trains_like


def train(
    case: ModelCase, model: nn.Module, *, steps: int = 2, tolerance: Tolerance | None = None, **options: Any
) -> None:
    """Collective."""
    world_size = dist.get_world_size()
    tolerance = tolerance_for(world_size) if tolerance is None else tolerance
    reference = Reference(case, world_size=world_size, **options)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=steps, tolerance=tolerance)
