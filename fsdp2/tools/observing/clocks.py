"""Clocks: the time of something that happens on the host or on a device's stream, in seconds of `time.perf_counter`.

A `Clock` is asked for a mark while the program runs, and for the mark's time once that is known. Marks of a stream are
events with timing, which the device reaches later than the host records them; nothing waits for them before they are
read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fsdp2.core.streams import Device, HostDevice, StreamDevice
from fsdp2.errors import FSDPRuntimeError


class Clock(Protocol):
    """How time is taken on one device."""

    def mark(self, stream: Any) -> Any:
        """A mark at the present end of ``stream``; None: of the stream on which the caller computes."""

    def settle(self) -> None:
        """Block the host until all marks have been reached."""

    def seconds(self, mark: Any) -> float:
        """The time at which ``mark`` was reached, as `time.perf_counter` counts. Call `settle` before."""

    def between(self, begin: Any, end: Any) -> float:
        """The seconds from one mark to the other, as exact after a day as at first. Call `settle` before."""


class HostClock:
    """The clock of devices without streams: things happen when the host comes to them."""

    def mark(self, stream: Any) -> float:
        """The present time."""
        return time.perf_counter()

    def settle(self) -> None:
        """Do nothing, as every mark has been reached."""

    def seconds(self, mark: float) -> float:
        """The mark itself, which is a time."""
        return mark

    def between(self, begin: float, end: float) -> float:
        """The difference of the two marks."""
        return end - begin


class StreamClock:
    """For CUDA and devices like it: events with timing, compared with one that was recorded when the clock was made."""

    def __init__(self, device: torch.device) -> None:
        """Synchronize ``device`` once, so that its time can be compared with the host's."""
        self._device = device
        self._module = torch.get_device_module(device)
        self._module.synchronize(device)
        self._origin = self._event(None)
        self._module.synchronize(device)
        self._began = time.perf_counter()

    def _event(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device) if stream is None else stream)
        return event

    def mark(self, stream: Any) -> Any:
        """An event on ``stream``.

        Raises:
            FSDPRuntimeError: a graph is being captured, in which an event has no time.
        """
        asks = getattr(self._module, "is_current_stream_capturing", None)
        if asks is not None and asks():
            raise FSDPRuntimeError(
                "a graph is being captured inside of fsdp2.timeline() or while fsdp2.metrics() observes the model: "
                "events in a graph have no time. Capture before, or give metrics(observe=False)."
            )
        return self._event(stream)

    def settle(self) -> None:
        """Synchronize the device."""
        self._module.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        """The time by the device's clock, to about half a microsecond; later to the seven digits that it returns."""
        return self._began + float(self._origin.elapsed_time(mark)) / 1e3

    def between(self, begin: Any, end: Any) -> float:
        """The seconds between two marks, as the device compares them."""
        return float(begin.elapsed_time(end)) / 1e3


CLOCKS: dict[type, Callable[[Device, torch.device], Clock]] = {
    HostDevice: lambda through, device: HostClock(),
    StreamDevice: lambda through, device: StreamClock(device),
}
"""A port: what makes a clock for each type of the engine's `Device`. Tests add devices with clocks of their own."""


def clock_for(through: Device, device: torch.device) -> Clock:
    """A clock of ``device``, which the engine reaches ``through`` a `Device`. With streams it synchronizes it once."""
    return CLOCKS[type(through)](through, device)
