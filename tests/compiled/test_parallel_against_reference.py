"""Compiled models beside tensor parallelism, over shards and replicas, against the unsharded reference.

The model is the small language model of the parity tests, which tensor parallelism cuts first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import MixedPrecisionPolicy
from tests.compiled.helpers.models import CHECKPOINTS, multi_rank, shard, shard_checkpointed, whole
from tests.compiled.helpers.twins import Graphs, compiling
from tests.harness import ModelCase
from tests.harness.parity.language import EVEN, UNEVEN, data_axes, tensor_parallel, train_2d, world

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def parallel(case: ModelCase, mesh: DeviceMesh, *, where: str | None = None, **arguments: Any) -> nn.Module:
    """Tensor parallel over the last axis, sharded over the others, checkpointed ``where``."""
    model = tensor_parallel(case.build(), mesh["tp"], sequence=arguments.pop("sequence", False))
    if where is None:
        shard(model, mesh=data_axes(mesh), **arguments)
    else:
        shard_checkpointed(model, where, mesh=data_axes(mesh), **arguments)
    return model


def compiled_like(graphs: Graphs, case: ModelCase, mesh: DeviceMesh, model: nn.Module, **options: Any) -> None:
    way = options.pop("way", whole)
    options.setdefault("steps", 5)
    train_2d(case, way(model, graphs.backend()), mesh, **options)


SHAPES = [(2, 2), (4, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)]


# Full: DTensor makes a trace several times as long, 10 s each.
@multi_rank(4)
@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_over_shards_replicas_and_parts(shape: tuple[int, ...]) -> None:
    mesh = world(*shape)
    with compiling() as graphs:
        compiled_like(graphs, UNEVEN, mesh, parallel(UNEVEN, mesh))
        assert len(graphs.forward) == len(graphs.backward) == 1


@multi_rank(8, timeout=600)
@pytest.mark.full  # 30 s: no axis is of one rank
def test_on_three_axes_of_two() -> None:
    mesh = world(2, 2, 2)
    with compiling() as graphs:
        compiled_like(graphs, UNEVEN, mesh, parallel(UNEVEN, mesh))


@multi_rank(4)
@pytest.mark.full  # 10 s
def test_sequence_parallel() -> None:
    """The whole; single blocks fail in torch's DTensor, without any sharding by rows too (2.13)."""
    mesh = world(2, 2)
    with compiling() as graphs:
        compiled_like(graphs, EVEN, mesh, parallel(EVEN, mesh, sequence=True))


@multi_rank(4)
@pytest.mark.full  # 10 s each
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("where", CHECKPOINTS)
def test_compiled_tensor_parallelism_with_activation_checkpointing(where: str, shape: tuple[int, ...]) -> None:
    mesh = world(*shape)
    with compiling() as graphs:
        compiled_like(graphs, EVEN, mesh, parallel(EVEN, mesh, where=where))
        assert len(graphs.forward) == len(graphs.backward) == 1
