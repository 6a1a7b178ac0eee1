"""Several steps of training with `clip_grad_norm_`, on every kind of mesh, beside the unsharded reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import CPUOffloadPolicy, clip_grad_norm_, fully_shard
from tests.harness import Reference, Tolerance, assert_same, assert_sharded_same, multi_rank
from tests.harness.compare import parameters_of
from tests.harness.models import CONV, FROZEN, PARTLY_USED, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.language import EVEN, PARTIAL_SUMS, UNEVEN, parallelized, world
from tests.harness.parity.spmd import EVEN as SPMD
from tests.harness.parity.spmd import sharded as sharded_spmd
from tests.harness.parity.spmd import spmd_loss, spmd_mesh
from tests.harness.shared.clipping import (
    MAX_NORM,
    TRAINED,
    all_reduces,
    assert_plain_and_the_same_everywhere,
    named_mesh,
)
from tests.harness.shared.optimizers import Parameters, loss_of
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


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [CASE, TRANSFORMER, TIED, FROZEN, PARTLY_USED, CONV], ids=str)
def test_training_on_one_axis(case: ModelCase) -> None:
    """Uneven and empty shards, frozen parts, parts that are not used: one number is sent."""
    train_clipped(case, shard(case), carried=[1])


@multi_rank(4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TRANSFORMER], ids=str)
def test_training_with_replicas(case: ModelCase) -> None:
    mesh, model = named_mesh(replicate=2, shard=2), case.build()
    for unit in case.units(model):
        fully_shard(unit, mesh=mesh)
    train_clipped(case, model, carried=[1])


@multi_rank(4)
@pytest.mark.parametrize("case", [EVEN, UNEVEN], ids=str)
@pytest.mark.parametrize("sequence", [False, True], ids=["colwise_rowwise", "sequence_parallel"])
def test_training_with_tensor_parallelism(case: ModelCase, sequence: bool) -> None:
    """Cut over both axes, or over the data axis only: both share its all-reduce."""
    mesh = world(2, 2)
    model = parallelized(case, mesh, sequence=sequence)
    train_clipped(case, model, data_size=2, carried=[2, 1], tolerance=PARTIAL_SUMS)


@multi_rank(4)
def test_training_with_replicas_and_tensor_parallelism() -> None:
    mesh = world(2, 1, 2)
    train_clipped(EVEN, parallelized(EVEN, mesh), data_size=2, carried=[1], tolerance=PARTIAL_SUMS)


@multi_rank(4)
@pytest.mark.parametrize("dims", [{"shard": "dp"}, {"replicate": "dp"}], ids=str)
def test_training_on_an_spmd_mesh(dims: dict[str, Any]) -> None:
    mesh = spmd_mesh(dp=2, tp=2)
    model = sharded_spmd(SPMD, mesh, dims=dims)
    axes = 2 if "shard" in dims else 1
    loss = partial(spmd_loss, mesh)
    train_clipped(SPMD, model, data_size=2, loss=loss, carried=[1] * axes, tolerance=PARTIAL_SUMS)


@multi_rank(4)
def test_training_on_flattened_axes() -> None:
    mesh = spmd_mesh(outer=2, inner=2)
    model = sharded_spmd(SPMD, mesh, dims={"shard": ("outer", "inner")})
    train_clipped(SPMD, model, loss=partial(spmd_loss, mesh), carried=[1], tolerance=PARTIAL_SUMS)


@multi_rank(2)
def test_training_with_offloaded_gradients() -> None:
    model = TRANSFORMER.build()
    for unit in TRANSFORMER.units(model):
        fully_shard(unit, offload_policy=CPUOffloadPolicy(pin_memory=False))
    train_clipped(TRANSFORMER, model, carried=[1])


@multi_rank(2, 4)
def test_training_with_ignored_parameters() -> None:
    """Which stay plain; their gradients are averaged here, as the user of ``ignored_params`` has to."""
    model = CASE.build()
    ignored = set(model[2].parameters())
    fully_shard(model, ignored_params=ignored)
    reference = Reference(CASE, world_size=dist.get_world_size(), make_optimizer=momentum, max_norm=MAX_NORM)
    optimizer = momentum(trainable(model))
    for step in range(3):
        record = reference.step()
        loss_of(CASE, model, step).backward()
        for parameter in ignored:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        assert_plain_and_the_same_everywhere(norm)
        assert_same("norm", {"": norm}, {"": record.gradient_norm}, tolerance=TRAINED)
        optimizer.step()
        optimizer.zero_grad()
        assert_sharded_same("parameters", parameters_of(model), record.parameters, tolerance=TRAINED)
