"""A model of the parameters that torch's `fully_shard` refuses: of no dims, not contiguous, uneven, packed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.models import Batch, ModelCase


class Part(nn.Module):
    """Every kind of odd parameter, used by its forward; ``stride_seen`` are the strides that it saw."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        conv = nn.Conv2d(channels, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.conv = conv
        self.gain = nn.Parameter(torch.tensor(0.7))  # no dims
        self.mix = nn.Parameter(torch.randn(6, 5).t())  # transposed: dims the other way round in memory
        self.stack = nn.Parameter(torch.randn(2, 6, 3).permute(1, 2, 0))  # uneven and permuted
        self.offset = nn.Parameter(torch.zeros(12)[::2])  # with gaps between its elements
        self.steps = nn.Parameter(torch.tensor(3), requires_grad=False)  # no dims, integer
        self.table = nn.Parameter(torch.arange(15, dtype=torch.int64).view(5, 3).t(), requires_grad=False)
        self.packed = nn.Parameter(torch.arange(-7, 7, dtype=torch.int8).view(7, 2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)) * self.gain  # (B, 6, H, W)
        pooled = x.mean(dim=(2, 3)) @ self.mix.t() @ self.mix  # (B, 6)
        pooled = pooled + self.stack.sum(dim=(1, 2)) + self.offset
        weights = (self.table.sum() + self.packed.sum() + self.steps).to(pooled.dtype)
        return x + (pooled / weights)[:, :, None, None]


class Odd(nn.Module):
    """Two such parts, the second with a head that the root owns."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(3), Part(6)])
        self.head = nn.Linear(6, 5)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x.mean(dim=(2, 3))) * self.temperature


def images(generator: torch.Generator) -> Batch:
    return Batch(torch.randn(3, 3, 4, 4, generator=generator), torch.randn(3, 5, generator=generator))


ODD = ModelCase("odd", Odd, images, ("parts.0", "parts.1"), F.mse_loss)
