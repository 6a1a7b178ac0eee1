"""A device with streams whose time is simulated: collectives and `spend` take as long as a test says, all else nothing.

What runs on a stream begins when the stream is free and has waited for what it must; the host issues at no cost. So a
step takes the time that can be worked out by hand, and an event has a time as soon as it is recorded.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2.core.state
from fsdp2.tools.observing.clocks import CLOCKS

COMPUTE = 0


class ClockedDevice:
    """fsdp2's `Device` protocol, and its own `Clock`; events are times.

    Attributes:
        now: by stream, when it is free; seconds on the scale of `time.perf_counter`.
        stream: the current one.
    """

    has_streams = True

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.now = {COMPUTE: self.began}
        self.stream = COMPUTE
        self._numbers = itertools.count(1)

    def new_stream(self) -> int:
        """The next number."""
        stream = next(self._numbers)
        self.now[stream] = self.began
        return stream

    def current_stream(self) -> int:
        """Where time is spent."""
        return self.stream

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Spend on ``stream``."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def record(self, stream: int) -> float:
        """When ``stream`` is free."""
        return self.now[stream]

    def wait(self, stream: int, event: float, why: object) -> None:
        """What comes next begins after ``event``."""
        self.now[stream] = max(self.now[stream], event)

    def block_host(self, event: float) -> None:
        """The host has no time."""

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def spend(self, seconds: float) -> None:
        """Something runs on the current stream for as long."""
        self.now[self.stream] += seconds

    # -- as a clock

    def mark(self, stream: int | None) -> float:
        """An event."""
        return self.now[COMPUTE if stream is None else stream]

    def settle(self) -> None:
        """Nothing is left to come."""

    def seconds(self, mark: float) -> float:
        """It is the time."""
        return mark


class _Collectives(TorchDispatchMode):
    """Spends on the current stream what a collective takes."""

    def __init__(self, device: ClockedDevice, seconds: dict[str, float]) -> None:
        super().__init__()
        self._device, self._seconds = device, seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname
            kind = "gather" if "gather" in name else "scatter" if "scatter" in name else "all_reduce"
            self._device.spend(self._seconds[kind])
        return func(*args, **(kwargs or {}))


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, device: ClockedDevice, forward: float, backward: float, x: Tensor) -> Tensor:
        ctx.device, ctx.seconds = device, backward
        device.spend(forward)
        ctx.save_for_backward(x)  # so that a recompute comes here
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        ctx.device.spend(ctx.seconds)
        return None, None, None, gradient


class TimedBlock(nn.Module):
    """A linear layer whose forward and backward take as long as it says."""

    def __init__(self, device: ClockedDevice, width: int, *, forward: float, backward: float) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self._timed = (device, forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, width)."""
        device, forward, backward = self._timed
        return _Spend.apply(device, forward, backward, self.layer(x).requires_grad_())


@contextlib.contextmanager
def clocked(*, gather: float, scatter: float, all_reduce: float = 0.0) -> Iterator[ClockedDevice]:
    """Roots that are initialized inside run on a `ClockedDevice`, whose collectives take so many seconds."""
    device = ClockedDevice()
    seconds = {"gather": gather, "scatter": scatter, "all_reduce": all_reduce}
    with (
        mock.patch.object(fsdp2.core.state, "device_for", lambda _: device),
        mock.patch.dict(CLOCKS, {ClockedDevice: lambda through, _: through}),
        _Collectives(device, seconds),
    ):
        yield device
