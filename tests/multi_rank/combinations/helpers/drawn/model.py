"""The model of drawn programs: small, with every kind of parameter that a drawn program may have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.multi_rank.combinations.helpers.drawn.programs import ModelDraw, Program

ROWS = 3
OWN = "own"  # the name of the parameter that `fully_shard` ignores


class Linear(nn.Linear):
    """Its input has the name that those of the other modules have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class FeedForward(nn.Module):
    """Two layers, which tensor parallelism cuts by columns and rows."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Norm(nn.LayerNorm):
    """Computes in the dtype of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Strided(nn.Module):
    """Weights that are not contiguous: transposed, permuted, channels-last."""

    def __init__(self, width: int, *, convolves: bool) -> None:
        super().__init__()
        self.convolves = convolves
        self.mix = nn.Parameter((torch.randn(3, width) / 3).t())
        self.stack = nn.Parameter((torch.randn(2, width, 3) / 9).permute(1, 2, 0))
        self.kernel = nn.Parameter((torch.randn(2, 2, 1, 3) / 3).contiguous(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.linear(x @ self.mix, self.mix) + self.stack.sum(dim=(1, 2))
        if not self.convolves:
            return x + self.kernel.sum()
        images = torch.stack([x, -x], dim=1)[:, :, None]  # (rows, 2, 1, width)
        return x + F.conv2d(images, self.kernel, padding=(0, 1)).mean(dim=(1, 2))


class Block(nn.Module):
    """``extra`` is used where the caller says so, ``unused`` never; ``turn`` is of dtype `expected`, if that is set."""

    expected: torch.dtype | None = None

    def __init__(self, draw: ModelDraw, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = Norm(draw.width)
        self.feed = FeedForward(draw.width, draw.hidden)
        self.extra = nn.Parameter(torch.randn(draw.width))
        if draw.unused:
            self.unused = nn.Parameter(torch.randn(5, draw.width))
        self.strided = Strided(draw.width, convolves=draw.strided == "conv") if draw.strided != "no" else None
        self.gain = nn.Parameter(torch.tensor(0.7)) if draw.gain else None
        codes = torch.arange(-7, 8, dtype=torch.int8).view(5, 3)
        self.codes = nn.Parameter(codes, requires_grad=False) if draw.codes else None

    def forward(self, x: Tensor, use_extra: bool, turn: Tensor) -> Tensor:
        assert self.expected in (None, turn.dtype), turn.dtype
        y = self.norm(x) + turn.to(x.dtype)
        if self.strided is not None:
            y = self.strided(y)
        if self.codes is not None:
            y = y + self.codes.square().sum().to(x.dtype) / 256
        if self.kind.startswith("feed") and torch.is_grad_enabled():
            y = checkpoint(self.feed, y, use_reentrant=self.kind == "feed_reentrant")
        else:
            y = self.feed(y)
        if self.gain is not None:
            y = y * self.gain
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
        self.inp = Linear(draw.width, draw.width)
        self.shift = Shift(draw.width)
        self.blocks = nn.ModuleList(Block(draw, kind) for kind in draw.checkpoint)
        self.head = Linear(draw.width, draw.width)
        self.register_buffer("turn", torch.randn(draw.width) / 8)
        self.temperature = nn.Parameter(torch.tensor(1.3)) if draw.gain else None
        self._tie()
        self.own = nn.Parameter(torch.randn(draw.width)) if own else None
        for name, parameter in self.named_parameters():
            if name.startswith(draw.frozen):
                parameter.requires_grad_(False)

    def _tie(self) -> None:
        if self.draw.tied in ("blocks", "norms"):
            first, last = self.blocks[0], self.blocks[-1]
            last.norm.weight = first.norm.weight
            if self.draw.tied == "blocks":
                last.feed.up.weight = first.feed.up.weight
        elif self.draw.tied != "no":
            self.head.weight = self.inp.weight

    def forward(self, x: Tensor, use_extra: bool, skipped: int | None) -> Tensor:
        x = self.shift(self.inp(x))
        for index, block in enumerate(self.blocks):
            for _ in range(2 if index == 0 and self.draw.repeated else 1):
                if index == skipped:
                    continue
                if block.kind.startswith("block") and torch.is_grad_enabled():
                    x = checkpoint(block, x, use_extra, self.turn, use_reentrant=block.kind == "block_reentrant")
                else:
                    x = block(x, use_extra, self.turn)
        if self.own is not None:
            x = x + self.own.to(x.dtype)
        output = self.head(F.silu(x))
        return output if self.temperature is None else output * self.temperature


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
