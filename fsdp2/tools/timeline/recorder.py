"""`Recorder`: the listener that times everything an `Observation` tells, and makes a `RankRecord` of it.

On devices with streams a mark of an activity or a wait goes onto the compute stream, that of an exchange onto the
stream that it is issued to. Without streams the host's clock is read.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2.core.root import FSDPRoot
from fsdp2.core.streams import Device
from fsdp2.tools.observing.clocks import Clock, clock_for
from fsdp2.tools.observing.observation import Activity, Exchange, Kind, Listener, Observation
from fsdp2.tools.timeline.records import MemorySample, RankRecord, Span


@dataclass(slots=True)
class _Open:
    """A span that has begun, and maybe ended."""

    clock: Clock
    begin: Any
    what: str
    name: str
    exchange: Exchange | None = None
    end: Any = None
    blocks: bool = False


class Recorder(Listener):
    """Records what is told, from `begin` to `end`.

    Attributes:
        observation: the observation that tells it; set it before `begin`.
    """

    observation: Observation

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {}
        self._spans: list[_Open] = []
        self._activities: list[_Open] = []
        self._exchanges: dict[int, _Open] = {}
        self._wait: _Open | None = None
        self._marks: dict[str, list[tuple[Clock, Any]]] = {"forwards": [], "updates": [], "reductions": []}
        self._held: dict[str, tuple[int, int]] = {}
        self._reducing: dict[int, int] = {}
        self._totals = [0, 0, 0]
        self._samples: list[tuple[Clock, Any, tuple[int, int, int]]] = []
        self._began = 0.0

    def begin(self) -> None:
        """Take the time of the beginning."""
        self._began = time.perf_counter()

    # -- what is told

    def _clock(self, device: Device) -> Clock:
        known = self._clocks.get(id(device))
        if known is None:
            known = self._clocks[id(device)] = clock_for(device, self.observation.devices[id(device)][1])
        return known

    def begin_step(self, root: FSDPRoot) -> None:
        """Note the forward. Activities that are still open were left by an exception: end them."""
        clock = self._clock(root.comm.device)
        mark = clock.mark(root.comm.device.current_stream())
        for left in self._activities:
            self._finish(left, mark)
        self._activities.clear()
        self._marks["forwards"].append((clock, mark))
        self._sample(clock, mark)

    def end_iteration(self, root: FSDPRoot, *, reduced: bool) -> None:
        """Note the end of a backward, if it has reduced gradients."""
        clock = self._clock(root.comm.device)
        mark = clock.mark(root.comm.device.current_stream())
        if reduced:
            self._marks["reductions"].append((clock, mark))

    def open(self, activity: Activity, name: str, device: Device) -> None:
        """Begin a span on the compute stream."""
        clock = self._clock(device)
        self._activities.append(_Open(clock, clock.mark(device.current_stream()), activity.value, name))

    def close(self, activity: Activity, name: str, device: Device) -> None:
        """End the last span of this activity and name that is open; if there is none, do nothing."""
        for index in range(len(self._activities) - 1, -1, -1):
            found = self._activities[index]
            if found.name == name and found.what == activity.value:
                del self._activities[index]
                mark = found.clock.mark(device.current_stream())
                self._finish(found, mark)
                if activity is Activity.OPTIMIZER:
                    self._marks["updates"].append((found.clock, mark))
                return

    def begin_exchange(self, exchange: Exchange, device: Device) -> None:
        """Begin a span on the stream that the exchange is issued to."""
        clock = self._clock(device)
        mark = clock.mark(device.current_stream())
        self._exchanges[exchange.number] = _Open(clock, mark, exchange.kind.value, exchange.group, exchange)
        if exchange.kind is Kind.REDUCE_SCATTER:
            self._reducing[exchange.number] = exchange.nbytes
            self._totals[2] += exchange.nbytes
            self._sample(clock, mark)

    def issued(self, exchange: Exchange, device: Device, *, is_over: bool) -> None:
        """End the span, if there are streams: the exchange ends there. Else only if it is over already."""
        if is_over or device.has_streams:
            self._exchanges[exchange.number].blocks = is_over and exchange.sent_bytes > 0
            self.end_exchange(exchange, device)

    def end_exchange(self, exchange: Exchange, device: Device) -> None:
        """End the span of the exchange, unless that was done when it was issued."""
        found = self._exchanges.pop(exchange.number, None)
        if found is not None:
            mark = found.clock.mark(device.current_stream())
            self._finish(found, mark)
            self._totals[2] -= self._reducing.pop(exchange.number, 0)
            if exchange.kind is Kind.REDUCE_SCATTER:
                self._sample(found.clock, mark)

    def begin_wait(self, group: str, kind: Kind, device: Device) -> None:
        """Begin a wait on the compute stream."""
        clock = self._clock(device)
        self._wait = _Open(clock, clock.mark(device.current_stream()), f"wait for {kind.value}", group)

    def end_wait(self, group: str, kind: Kind, device: Device) -> None:
        """End the wait."""
        wait, self._wait = self._wait, None
        if wait is not None:
            self._finish(wait, wait.clock.mark(device.current_stream()))

    def hold(self, group: str, unsharded_bytes: int, staged_bytes: int, device: Device) -> None:
        """Add the memory of the group to the totals, and sample them if they change."""
        before = self._held.get(group, (0, 0))
        self._held[group] = (unsharded_bytes, staged_bytes)
        self._totals[0] += unsharded_bytes - before[0]
        self._totals[1] += staged_bytes - before[1]
        if before != (unsharded_bytes, staged_bytes):
            clock = self._clock(device)
            self._sample(clock, clock.mark(device.current_stream()))

    def _finish(self, span: _Open, mark: Any) -> None:
        span.end = mark
        self._spans.append(span)

    def _sample(self, clock: Clock, mark: Any) -> None:
        unsharded, staged, reducing = self._totals
        self._samples.append((clock, mark, (unsharded, staged, reducing)))

    # -- the end

    def record(self, *, rank: int, failure: str, model: str, in_graphs: tuple[str, ...]) -> RankRecord:
        """The record of everything that was told. Blocks the host until the device has come to the last mark."""
        ends = {id(clock): clock.mark(None) for clock in self._clocks.values()}
        for clock in self._clocks.values():
            clock.settle()
        for left in [*self._activities, *self._exchanges.values()]:
            self._finish(left, ends[id(left.clock)])
        end = max([clock.seconds(ends[id(clock)]) for clock in self._clocks.values()] or [time.perf_counter()])
        devices = [device for device, _ in self.observation.devices.values()]
        times = {name: tuple(clock.seconds(mark) for clock, mark in marks) for name, marks in self._marks.items()}
        return RankRecord(
            rank=rank,
            host=socket.gethostname(),
            clock_id=_clock_id(),
            has_streams=any(device.has_streams for device in devices),
            begin=self._began,
            end=end,
            wall=time.time() - time.perf_counter(),
            spans=tuple(sorted(map(_span, self._spans), key=lambda each: (each.begin, -each.end))),
            memory=tuple(MemorySample(clock.seconds(mark), *held) for clock, mark, held in self._samples),
            in_graphs=in_graphs,
            failure=failure,
            model=model,
            **times,
        )


def _span(found: _Open) -> Span:
    begin, end = found.clock.seconds(found.begin), found.clock.seconds(found.end)
    exchange = found.exchange
    if exchange is None:
        return Span(found.what, found.name, begin, end)
    sizes = (exchange.nbytes, exchange.sent_bytes, exchange.collectives)
    return Span(found.what, found.name, begin, end, *sizes, exchange.for_backward, exchange.ahead, found.blocks)


def _clock_id() -> str:
    """A name that is equal for processes whose `time.perf_counter` counts from the same moment."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if sys.platform == "linux" and boot.exists():  # CLOCK_MONOTONIC counts from the start of the machine
        return boot.read_text().strip()
    return f"{platform.node()}/{os.getpid()}"
