"""A model whose parameters have few rows, many, and rows behind another dim in memory; shards that cut no block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import RowBlocks, fully_shard
from tests.harness.models import Batch, ModelCase
from tests.multi_rank.placements.helpers.training import train as train_beside

BLOCK_ROWS = [1, 4, 5, 64]
"""Rows of a block: no constraint; some that divide no size; more than most parameters have."""


class Blocky(nn.Module):
    """Sizes in dim 0: 1, 3, 5, 7, 12 and 18, one parameter frozen, one transposed, one of no dims, one tied."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 7), nn.Linear(7, 18)])
        self.gain = nn.Parameter(torch.randn(1, 18))
        self.mix = nn.Parameter(torch.randn(18, 5).t())  # (5, 18), columns first in memory
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.table = nn.Parameter(torch.arange(10, dtype=torch.int32).view(5, 2), requires_grad=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        x = (x * self.gain) @ self.mix.t() * self.scale + self.table.sum() / 100
        return self.head(x)


def _batch(generator: torch.Generator) -> Batch:
    return Batch(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator))


BLOCKY = ModelCase("blocky", Blocky, _batch, ("parts.0", "parts.1", "parts.2"), F.mse_loss)


@dataclass(frozen=True)
class in_blocks:
    """A ``shard_placement_fn``, as a function that pickles."""

    rows: int

    def __call__(self, parameter: nn.Parameter) -> RowBlocks | None:
        return RowBlocks(self.rows) if parameter.dim() else None


def sharded(rows: int, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = BLOCKY.build() if model is None else model
    for unit in BLOCKY.units(model):
        fully_shard(unit, shard_placement_fn=in_blocks(rows), **options)
    return model


train = partial(train_beside, BLOCKY)


def expected_rows(size: int, block_rows: int, world_size: int) -> list[int]:
    """How many rows each rank is to have, by dealing out whole blocks."""
    blocks = [min(block_rows, size - start) for start in range(0, size, block_rows)]
    each = -(-len(blocks) // world_size)
    return [sum(blocks[rank * each : (rank + 1) * each]) for rank in range(world_size)]


def assert_no_block_is_cut(model: nn.Module, block_rows: int, world_size: int, rank: int) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if parameter.dim():
            rows = expected_rows(parameter.shape[0], block_rows, world_size)
            assert parameter.to_local().shape == (rows[rank], *parameter.shape[1:]), name
