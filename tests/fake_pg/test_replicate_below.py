"""`replicate_below`: how many collectives and Python calls a model of many small modules needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.counts import OperationCounter
from fsdp2 import fully_shard
from tests.harness import fake_world
from tests.harness.counting import python_calls

WIDTH = 32


class Block(nn.Module):
    """One matrix of 4 KiB, and four vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)) * self.scale


def stack(blocks: int, below: int) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    for block in model:
        fully_shard(block, replicate_below=below)
    return fully_shard(model, replicate_below=below)


def step(model: nn.Module) -> None:
    model(torch.zeros(2, WIDTH)).sum().backward()


@pytest.mark.parametrize(("below", "gathers", "scatters", "reduces"), [(0, 2, 1, 0), (1024, 2, 1, 1), (8192, 0, 0, 1)])
def test_collectives_of_a_step(below: int, gathers: int, scatters: int, reduces: int) -> None:
    """``gathers`` and ``scatters`` for each block, ``reduces`` for all."""
    blocks = 6
    with fake_world(8):
        model = stack(blocks, below)
        step(model)
        with OperationCounter() as counter:
            step(model)
        found = {kind: each.calls for kind, each in counter.counts.collectives.items()}
    expected = {"allgather_base": gathers * blocks, "reduce_scatter_base": scatters * blocks, "allreduce": reduces}
    assert found == {kind: count for kind, count in expected.items() if count}


def calls_of_a_block(below: int) -> float:
    counts = []
    for blocks in (8, 16):
        with fake_world(8):
            model = stack(blocks, below)
            step(model)
            counts.append(python_calls(lambda model=model: step(model)))
    return (counts[1] - counts[0]) / 8


def test_calls_of_a_block_without_parameters_of_its_own_are_half() -> None:
    assert calls_of_a_block(8192) <= 0.5 * calls_of_a_block(0)
