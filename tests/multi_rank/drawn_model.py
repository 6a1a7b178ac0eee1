"""The model of drawn programs: small, with every kind of parameter that a drawn program may have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.multi_rank.drawing import ModelDraw, Program

ROWS = 3
OWN = "own"  # the name of the parameter that `fully_shard` ignores


class FeedForward(nn.Module):
    """Two layers, which tensor parallelism cuts by columns and rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """``extra`` is used where the caller says so, ``unused`` never."""

    def __init__(self, draw: ModelDraw, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(draw.width)
        self.feed = FeedForward(draw.width, draw.hidden)
        self.extra = nn.Parameter(torch.randn(draw.width))
        if draw.unused:
            self.unused = nn.Parameter(torch.randn(5, draw.width))

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        y = self.norm(x)
        if self.kind.startswith("feed") and torch.is_grad_enabled():
            y = checkpoint(self.feed, y, use_reentrant=self.kind == "feed_reentrant")
        else:
            y = self.feed(y)
        return x + y + self.extra if use_extra else x + y


class Shift(nn.Module):
    """Its backward does not need its parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.amount


class Drawn(nn.Module):
    """Input layer, shift, blocks, head; ``own`` is for `fully_shard` to ignore."""

    def __init__(self, draw: ModelDraw, *, own: bool) -> None:
        super().__init__()
        self.draw = draw
        self.inp = nn.Linear(draw.width, draw.width)
        self.shift = Shift(draw.width)
        self.blocks = nn.ModuleList(Block(draw, kind) for kind in draw.checkpoint)
        self.head = nn.Linear(draw.width, draw.width)
        if draw.tied:
            self.head.weight = self.inp.weight
        self.own = nn.Parameter(torch.randn(draw.width)) if own else None
        for name, parameter in self.named_parameters():
            if name.startswith(draw.frozen):
                parameter.requires_grad_(False)

    def forward(self, x: Tensor, use_extra: bool, skipped: int | None) -> Tensor:
        x = self.shift(self.inp(x))
        for index, block in enumerate(self.blocks):
            for _ in range(2 if index == 0 and self.draw.repeated else 1):
                if index == skipped:
                    continue
                if block.kind.startswith("block") and torch.is_grad_enabled():
                    x = checkpoint(block, x, use_extra, use_reentrant=block.kind == "block_reentrant")
                else:
                    x = block(x, use_extra)
        if self.own is not None:
            x = x + self.own.to(x.dtype)
        return self.head(F.silu(x))


def build(program: Program) -> Drawn:
    """The same parameters wherever it is built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(program.seed)
        return Drawn(program.model, own=program.ignored)


def inputs(program: Program, step: int, number: int, forward: int, rank: int) -> tuple[Tensor, Tensor, bool]:
    """Inputs, targets, and whether ``extra`` is used: of one forward of one data-parallel rank."""
    generator = torch.Generator().manual_seed((((program.seed * 7 + step) * 11 + number) * 5 + forward) * 13 + rank)
    x = torch.randn(ROWS, program.model.width, generator=generator)
    y = torch.randn(ROWS, program.model.width, generator=generator)
    return x, y, not program.model.some_ranks or (step + number + rank) % 2 == 0
