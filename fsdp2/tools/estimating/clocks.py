"""`Clocks`, the streams of a simulated device, and `SimulatedDevice`, by which the engine reaches them.

Each stream has a time up to which it is busy. What is issued to a stream begins when the stream is free, and a stream
that waits for an event goes on no earlier than the event. So the order in which the engine issues things, and what it
lets wait for what, decide what overlaps: exactly as on a device, but for computation and communication that slow each
other down, and for a host that is too slow to issue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fsdp2.core.streams import Wait

COMPUTE = 0


@dataclass(slots=True)
class Clocks:
    """The time of each stream, in seconds.

    Attributes:
        times: by stream; the first computes.
        current: the stream that what is issued goes to.
        waited: for how long computation stood still, by what it waited for.
        busy: for how long anything ran on each stream.
    """

    times: list[float] = field(default_factory=lambda: [0.0])
    busy: list[float] = field(default_factory=lambda: [0.0])
    current: int = COMPUTE
    waited: dict[str, float] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        """Something runs on the current stream."""
        self.times[self.current] += seconds
        self.busy[self.current] += seconds

    def communicate(self, seconds: float) -> None:
        """A collective runs on the current stream; computation stands still if that is its own."""
        if self.current == COMPUTE:
            self.wait(COMPUTE, self.times[COMPUTE] + seconds, "ITS OWN")
        else:
            self.run(seconds)

    def wait(self, stream: int, until: float, why: str) -> None:
        """``stream`` goes on no earlier than ``until``."""
        gap = until - self.times[stream]
        if gap > 0:
            self.times[stream] = until
            if stream == COMPUTE:
                self.waited[why] = self.waited.get(why, 0.0) + gap

    def new(self) -> int:
        """One more stream."""
        self.times.append(self.times[COMPUTE])
        self.busy.append(0.0)
        return len(self.times) - 1

    def copy(self) -> Clocks:
        """As it is now."""
        return Clocks(list(self.times), list(self.busy), self.current, dict(self.waited))

    def repeat(self, since: Clocks, times: int) -> None:
        """All that has happened since the copy ``since`` happens ``times`` more times."""
        for stream, (time, busy) in enumerate(zip(since.times, since.busy, strict=False)):
            self.times[stream] += times * (self.times[stream] - time)
            self.busy[stream] += times * (self.busy[stream] - busy)
        for why, seconds in self.waited.items():
            self.waited[why] = seconds + times * (seconds - since.waited.get(why, 0.0))

    def reset(self) -> None:
        """Count from now on: times stay, what they were spent on does not."""
        self.waited = {}
        self.busy = [0.0] * len(self.times)


class SimulatedDevice:
    """The engine's `Device` protocol; streams are numbers, and events are times."""

    has_streams = True

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks

    def new_stream(self) -> int:
        """The next number."""
        return self._clocks.new()

    def current_stream(self) -> int:
        """Where operators go."""
        return self._clocks.current

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Let operators inside go to ``stream``."""
        before, self._clocks.current = self._clocks.current, stream
        try:
            yield
        finally:
            self._clocks.current = before

    def record(self, stream: int) -> float:
        """The time up to which ``stream`` is busy."""
        return self._clocks.times[stream]

    def wait(self, stream: int, event: float, why: Wait) -> None:
        """Let ``stream`` go on no earlier than ``event``."""
        self._clocks.wait(stream, event, why.name)

    def block_host(self, event: Any) -> None:
        """The host does nothing else, so that what it issues next begins no earlier."""
        self._clocks.wait(self._clocks.current, event, "HOST")

    def is_capturing(self) -> bool:
        """Never."""
        return False
