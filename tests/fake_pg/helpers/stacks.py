"""A stack of equal layers, and the most memory that its unsharded parameters ever take."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.internals import unsharded_bytes_now


class Block(nn.Module):
    """``layers`` equal linear layers without bias, one after the other."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class PeakMeter(TorchDispatchMode):
    """The largest amount of unsharded memory at any operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.peak = model, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.peak = max(self.peak, unsharded_bytes_now(self.model))
        return func(*args, **(kwargs or {}))
