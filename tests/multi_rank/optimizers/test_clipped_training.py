"""Several steps of training with `clip_grad_norm_`, on every kind of mesh, beside the unsharded reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import clip_grad_norm_
from tests.harness import Reference, Tolerance, assert_same, assert_sharded_same, multi_rank
from tests.harness.compare import parameters_of
from tests.harness.models import FROZEN, PARTLY_USED, TIED, ModelCase
from tests.harness.parity.language import PARTIAL_SUMS
from tests.harness.parity.spmd import EVEN as SPMD
from tests.harness.parity.spmd import sharded as sharded_spmd
from tests.harness.parity.spmd import spmd_loss, spmd_mesh
from tests.harness.shared.clipping import (
    MAX_NORM,
    TRAINED,
    all_reduces,
    assert_plain_and_the_same_everywhere,
)
from tests.harness.shared.optimizers import Parameters
from tests.harness.shared.training import CASE, shard, trainable


def momentum(parameters: Parameters) -> torch.optim.Optimizer:
    """Sees every norm so far; one parameter at a time, as they may lie on several meshes."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def train_clipped(
    case: ModelCase,
    model: nn.Module,
    *,
    data_size: int | None = None,
    loss: Any = None,
    carried: list[int] | None = None,
    tolerance: Tolerance = TRAINED,
    steps: int = 4,
) -> None:
    """Train with clipping beside the reference on ``data_size`` ranks; neighbours share data if that is fewer."""
    data_size = data_size or dist.get_world_size()
    data_rank = dist.get_rank() // (dist.get_world_size() // data_size)
    reference = Reference(case, world_size=data_size, make_optimizer=momentum, max_norm=MAX_NORM)
    optimizer = momentum(trainable(model))
    for step in range(steps):
        record = reference.step()
        (loss or case.loss)(model, case.batch(0, step, data_rank)).backward()
        with all_reduces() as found:
            norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        assert carried is None or found == carried
        assert_plain_and_the_same_everywhere(norm)
        assert record.gradient_norm is not None and record.gradient_norm > MAX_NORM, "something was clipped"
        assert_same(f"norm in step {step}", {"": norm}, {"": record.gradient_norm}, tolerance=tolerance)
        optimizer.step()
        optimizer.zero_grad()
        assert_sharded_same(
            f"parameters after step {step}", parameters_of(model), record.parameters, tolerance=tolerance
        )


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [CASE, TIED, FROZEN, PARTLY_USED], ids=str)
def test_training_on_one_axis(case: ModelCase) -> None:
    """Uneven and empty shards, frozen parts, parts that are not used: one number is sent."""
    train_clipped(case, shard(case), carried=[1])


@multi_rank(4)
def test_training_on_flattened_axes() -> None:
    mesh = spmd_mesh(outer=2, inner=2)
    model = sharded_spmd(SPMD, mesh, dims={"shard": ("outer", "inner")})
    train_clipped(SPMD, model, loss=partial(spmd_loss, mesh), carried=[1], tolerance=PARTIAL_SUMS)
