"""A small language model, sharded block by block: what tools explain and estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard


class Block(nn.Module):
    """Two matrices, the first of 1 MiB in fp32 where ``width`` is 256, and what is small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class LM(nn.Module):
    """An embedding, blocks, a head; ``tied``: of one weight."""

    def __init__(self, *, width: int = 16, blocks: int = 3, words: int = 50, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step(model: nn.Module) -> None:
    model(torch.zeros(2, 3, dtype=torch.long)).float().sum().backward()


def sharded(model: nn.Module, *, root: dict[str, Any] | None = None, **arguments: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **arguments)
    return fully_shard(model, **{**arguments, **(root or {})})


def two_axes() -> Any:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
