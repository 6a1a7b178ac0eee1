"""Frozen parameters that activation checkpointing gathers once more in backward are freed again afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from tests.harness import FakeWorlds
from tests.harness.internals import groups_of


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, frozen: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.reentrant = reentrant
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("frozen", [(0,), (3,), (0, 1, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_nothing_stays_gathered(reentrant: bool, frozen: tuple[int, ...], simulate: FakeWorlds) -> None:
    simulate(4)
    model = Checkpointed(reentrant, frozen)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        for group in groups_of(model):
            memory = [buffers.unsharded.storage.nbytes() for buffers in group.storage.buffers]
            assert not any(memory), group.name
        for index, block in enumerate(model.blocks):
            assert (block[0].weight.grad is None) is (index in frozen)
        model.zero_grad()
