"""A mixture of fewer experts than ranks, and other stacks, whose leading dims are merged to rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import BlockShard, fully_shard
from tests.harness.models import Batch, ModelCase
from tests.multi_rank.placements.helpers.training import train as train_beside

LEADING = {
    "experts.up": 2,  # (3, 5, 4): 15 rows; on 4 ranks cuts fall inside experts, and the last rank has 3 of 4
    "experts.down": 2,  # (3, 4, 5): 12 rows, even on 2 and 4 ranks
    "experts.bias": 2,  # (3, 4, 1): rows of one element
    "deep": 3,  # (2, 1, 3, 4): 6 rows; on 4 ranks 2, 2, 2, 0
    "few": 2,  # (1, 3, 4): fewer rows than 4 ranks
    "gain": 2,  # (2, 4): all dims
    "table": 2,  # (2, 3, 2), int32, frozen
}
"""How many leading dims are merged; of the other parameters none."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 5, 4) / 2)
        self.down = nn.Parameter(torch.randn(3, 4, 5) / 2)
        self.bias = nn.Parameter(torch.randn(3, 4, 1) / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.bmm(x.expand(3, -1, -1), self.up.transpose(1, 2)))
        return torch.bmm(hidden, self.down.transpose(1, 2)) + self.bias.transpose(1, 2)

    def reset_parameters(self) -> None:
        for each in (self.up, self.down, self.bias):
            nn.init.uniform_(each, -0.5, 0.5)


class Mixture(nn.Module):
    """3 experts, and stacks of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = Experts()
        self.deep = nn.Parameter(torch.randn(2, 1, 3, 4) / 2)
        self.few = nn.Parameter(torch.randn(1, 3, 4) / 2)
        self.gain = nn.Parameter(torch.randn(2, 4))
        self.table = nn.Parameter(torch.arange(12, dtype=torch.int32).view(2, 3, 2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.router(x), -1)
        mixed = torch.einsum("ne,ned->nd", shares, self.experts(x).transpose(0, 1))
        stacked = (self.deep.sum((0, 1)) + self.few[0]) * self.gain.prod(0) + self.table.sum() / 100
        return mixed @ stacked.t()

    def reset_parameters(self) -> None:
        for each in (self.deep, self.few, self.gain):
            nn.init.normal_(each)


def _batch(generator: torch.Generator) -> Batch:
    return Batch(torch.randn(4, 4, generator=generator), torch.randn(4, 3, generator=generator))


MIXTURE = ModelCase("mixture", Mixture, _batch, ("experts",), F.mse_loss)
_LEADING_OF_SHAPE = {
    tuple(parameter.shape): LEADING[name] for name, parameter in Mixture().named_parameters() if name in LEADING
}


@dataclass(frozen=True)
class merged:
    """A ``shard_placement_fn``, as a function that pickles."""

    def __call__(self, parameter: nn.Parameter) -> BlockShard | None:
        k = _LEADING_OF_SHAPE.get(tuple(parameter.shape))
        return None if k is None else BlockShard.split_leading(parameter.shape, k)


def sharded(model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = MIXTURE.build() if model is None else model
    for unit in MIXTURE.units(model):
        fully_shard(unit, shard_placement_fn=merged(), **options)
    return model


train = partial(train_beside, MIXTURE)


def rows_of(whole: Tensor, leading: int, world_size: int, rank: int) -> Tensor:
    """What ``rank`` is to have, by hand."""
    rows = whole.flatten(0, leading - 1).reshape(math.prod(whole.shape[:leading]), -1)
    q = math.ceil(len(rows) / world_size)
    return rows[rank * q : (rank + 1) * q]


def assert_lies_in_rows(model: nn.Module, world_size: int, rank: int, plain: nn.Module | None = None) -> None:
    """Every stack has the rows of ``rank``, of those of ``plain`` if it is given."""
    wholes = dict((MIXTURE.build() if plain is None else plain).named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.shape == wholes[name].shape
        if name not in LEADING:
            continue
        expected = rows_of(wholes[name].detach(), LEADING[name], world_size, rank)
        assert parameter.placements[-1] == BlockShard.split_leading(parameter.shape, LEADING[name]), name
        assert parameter.to_local().shape == expected.shape, name
        if plain is not None:
            assert torch.equal(parameter.to_local(), expected), name
