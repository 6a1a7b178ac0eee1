"""A happens-before checker for work issued to streams: finds races, memory reused too early, and unwritten reads.

Pure: a trace goes in, violations come out. Knows nothing of torch or fsdp2; `recording` makes the traces.

[Note: what is checked]
Every stream has a vector clock: its own component counts its operations, the others say how far it has waited for
other streams. An operation happens before another iff the later one's clock has reached it.

* RACE: two operations on different streams touch the same bytes, at least one of them writes, and neither happens
  before the other.
* REUSE: allocators of stream devices (CUDA's caching allocator) hand memory that the host has freed to the next
  allocation *on the same stream* at once, whatever the device is still doing. So whoever touches a block must happen
  after every operation on any block that was freed on its stream before it was allocated. This is how a buffer that is
  freed while a collective still uses it shows up.
* UNWRITTEN: an operation reads bytes that nothing has written since they were allocated.

The host is a stream of its own, `HOST`: what it computes itself is over before it issues anything else. To wait for the
device lets only its own later operations follow; that what it then issues follows too is left out, so host
synchronization never hides a missing wait between streams. Allocators of (pinned) host memory hand it on only after
the copies that they know of, so it is never reused too early.

Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978; the last access per stream is
enough, as in Flanagan and Freund, "FastTrack", 2009.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

HOST = -1
"""The stream of what the host computes itself, in its own memory."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes ``[start, stop)`` of a block that an operation reads, writes, or both."""

    block: int
    start: int
    stop: int
    reads: bool = False
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel or collective, issued to ``stream``."""

    stream: int
    name: str
    accesses: tuple[Access, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The host allocates a block on ``stream``. Block numbers are never used again.

    Attributes:
        storage: names the storage that the block is the memory of; a storage that is resized has one block at a time.
        written: it came with contents, from outside of what is recorded.
    """

    block: int
    stream: int
    nbytes: int
    storage: int = 0
    written: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """The host frees a block: its stream may reuse the memory from now on."""

    block: int


@dataclass(frozen=True, slots=True)
class EventRecord:
    """``event`` is recorded at the present end of ``stream``."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """What is issued to ``stream`` from now on runs after ``event``.

    Attributes:
        why: the reason given.
        sites: the functions that led to the wait, innermost first.
    """

    stream: int
    event: int
    why: object = None
    sites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """The host program has come to a point with a name."""

    name: str


TraceEvent = Operation | Allocation | Release | EventRecord | StreamWait | Mark
WaitFilter = Callable[[int, StreamWait], bool]
"""Given a wait and its index in the trace: whether it takes place."""


class Kind(enum.Enum):
    """What can be wrong."""

    RACE = "race"
    REUSE = "memory reused before its last use"
    UNWRITTEN = "read before written"
    UNMAPPED = "memory given back to the device before its last use"


@dataclass(frozen=True, slots=True)
class Violation:
    """``later`` (an index in the trace) does not follow operation ``earlier`` as it should."""

    kind: Kind
    block: int
    earlier: int | None
    later: int

    def describe(self, trace: Sequence[TraceEvent]) -> str:
        """One line for a message."""
        first = "" if self.earlier is None else f" after {_describe(trace, self.earlier)}, unordered"
        return f"{self.kind.value}: {_describe(trace, self.later)}{first} (block {self.block})"


def _describe(trace: Sequence[TraceEvent], index: int) -> str:
    operation = trace[index]
    if isinstance(operation, Release):
        return f"#{index} release"
    assert isinstance(operation, Operation), "violations are between operations, or a release and one before"
    return f"#{index} {operation.name} on stream {operation.stream}"


class _Clocks:
    """The vector clocks of all streams (the last is `HOST`), moved on by one trace event after the other."""

    def __init__(self, trace: Iterable[TraceEvent]) -> None:
        streams = 2 + max((event.stream for event in trace if not isinstance(event, (Release, Mark))), default=0)
        self.now = [[0] * streams for _ in range(streams)]
        self._events: dict[int, tuple[int, ...]] = {}

    def operate(self, stream: int) -> list[int]:
        """The clock of ``stream`` at its next operation."""
        now = self.now[stream]
        now[stream] += 1
        if stream == HOST:
            for clock in self.now:
                clock[HOST] = now[HOST]
        return now

    def record(self, event: EventRecord) -> None:
        self._events[event.event] = tuple(self.now[event.stream])

    def wait(self, event: StreamWait) -> None:
        # An event that was never recorded counts as done, as on CUDA: it orders nothing.
        recorded = self._events.get(event.event)
        if recorded is not None:
            self.now[event.stream] = list(map(max, self.now[event.stream], recorded))


@dataclass(slots=True)
class _Use:
    """The last access of one stream to one range of a block."""

    stream: int
    start: int
    stop: int
    epoch: int
    index: int


_Last = dict[int, tuple[int, int]]
"""By stream: the epoch and the index of its last operation on something."""


@dataclass(slots=True)
class _Block:
    """What has happened to a block, and what must have happened before anybody touches it (``follows``)."""

    stream: int
    written: bool
    follows: _Last
    reads: dict[tuple[int, int, int], _Use] = field(default_factory=dict)
    writes: dict[tuple[int, int, int], _Use] = field(default_factory=dict)
    last: _Last = field(default_factory=dict)


def beside(trace: Sequence[TraceEvent], name: str, stream: int, *, since: int) -> Iterator[int]:
    """For each operation ``name`` from index ``since`` on: how many of ``stream`` are neither before nor after it."""
    clocks, found = _Clocks(trace), []
    for index, event in enumerate(trace):
        if isinstance(event, Operation):
            found.append((index, event, tuple(clocks.operate(event.stream))))
        elif isinstance(event, EventRecord):
            clocks.record(event)
        elif isinstance(event, StreamWait):
            clocks.wait(event)
    late = [(event, clock) for index, event, clock in found if index >= since]
    others = [clock for event, clock in late if event.stream == stream]
    for event, clock in late:
        if event.name == name:
            yield sum(clock[stream] < other[stream] and other[event.stream] < clock[event.stream] for other in others)


def find_violations(
    trace: Sequence[TraceEvent], keep: WaitFilter | None = None, *, unmaps: bool = False
) -> Iterator[Violation]:
    """Yield what is wrong with ``trace``, in the order of the later operation.

    Args:
        trace: events in the order in which the host issued them.
        keep: the waits to take into account; default all. Leaving some out is how mutations are tested: what the host
            does depends on no wait, so the trace is that of a program without them.
        unmaps: the allocator may give freed memory back to the device as soon as the stream that it belongs to is done
            with what was issued so far, as CUDA's does with expandable segments.
    """
    clocks = _Clocks(trace)
    blocks: dict[int, _Block] = {}
    freed: dict[int, _Last] = {}
    for index, event in enumerate(trace):
        if isinstance(event, Operation):
            yield from _operate(index, event, clocks.operate(event.stream), blocks)
        elif isinstance(event, EventRecord):
            clocks.record(event)
        elif isinstance(event, StreamWait):
            if keep is None or keep(index, event):
                clocks.wait(event)
        elif isinstance(event, Allocation):
            blocks[event.block] = _Block(event.stream, event.written, dict(freed.get(event.stream, {})))
        elif isinstance(event, Release):
            block = blocks.pop(event.block)
            if block.stream != HOST:
                if unmaps:
                    now = clocks.now[block.stream]
                    for other, (epoch, at) in block.last.items():
                        if other != block.stream and now[other] < epoch:
                            yield Violation(Kind.UNMAPPED, event.block, at, index)
                _advance(freed.setdefault(block.stream, {}), block.last)


def _advance(known: _Last, more: _Last) -> None:
    for stream, last in more.items():
        known[stream] = max(known.get(stream, last), last)


def _operate(index: int, operation: Operation, now: list[int], blocks: dict[int, _Block]) -> Iterator[Violation]:
    stream = operation.stream
    epoch = now[stream]
    for access in operation.accesses:
        block = blocks[access.block]
        if stream not in block.last:
            for other, (needed, at) in block.follows.items():
                if now[other] < needed:
                    yield Violation(Kind.REUSE, access.block, at, index)
        key = (stream, access.start, access.stop)
        if access.reads and not block.written and key not in block.reads and not _overlap(block.writes, access):
            yield Violation(Kind.UNWRITTEN, access.block, None, index)
        if not block.last.keys() <= {stream}:
            for use in _conflicts(block, access):
                if now[use.stream] < use.epoch:
                    yield Violation(Kind.RACE, access.block, use.index, index)
    for access in operation.accesses:
        block = blocks[access.block]
        use = _Use(stream, access.start, access.stop, epoch, index)
        if access.reads:
            block.reads[stream, access.start, access.stop] = use
        if access.writes:
            block.writes[stream, access.start, access.stop] = use
        block.last[stream] = (epoch, index)


def _overlap(uses: dict[tuple[int, int, int], _Use], access: Access) -> list[_Use]:
    return [use for use in uses.values() if use.start < access.stop and access.start < use.stop]


def _conflicts(block: _Block, access: Access) -> list[_Use]:
    """Earlier accesses that must not run at the same time. (Those on the same stream never do.)"""
    writes = _overlap(block.writes, access)
    return writes + _overlap(block.reads, access) if access.writes else writes


class Order:
    """Which operations of a trace happen before which, whatever memory they touch."""

    def __init__(self, trace: Sequence[TraceEvent]) -> None:
        clocks = _Clocks(trace)
        self._clock: dict[int, tuple[int, tuple[int, ...]]] = {}
        for index, event in enumerate(trace):
            if isinstance(event, Operation):
                self._clock[index] = (event.stream, tuple(clocks.operate(event.stream)))
            elif isinstance(event, EventRecord):
                clocks.record(event)
            elif isinstance(event, StreamWait):
                clocks.wait(event)

    def before(self, first: int, second: int) -> bool:
        """Whether operation ``first`` has ended before ``second`` begins (indices in the trace)."""
        stream, clock = self._clock[first]
        return first != second and self._clock[second][1][stream] >= clock[stream]

    def concurrent(self, one: int, other: int) -> bool:
        """Whether the two may run at the same time: that is what overlap means."""
        return one != other and not self.before(one, other) and not self.before(other, one)
