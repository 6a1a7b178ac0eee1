"""What a `RankRecord` means: steps, what ran when, exposed and overlapped communication, the slowest rank.

Pure functions: records go in, facts come out.

[Note: exposed and overlapped]
An exchange is *in flight* from when it is issued to when it is over. Without streams nobody learns when it is over
before the host waits for it, so the end of that wait counts. Time in which the computation stands still is *exposed*:
on the host the time inside of a wait (and of an exchange that blocks the host), on a device the time in which the
compute stream waits. Time in which an exchange is in flight while the computation goes on is *overlapped*. So a rank
that is late is not exposed itself; the others are, which wait for it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp2.tools.timeline.records import RankRecord, Span

WAIT = "wait"
PROGRAM = "program"
EXCHANGES = ("all-gather", "reduce-scatter", "all-reduce")
ACTIVITIES = ("forward", "recompute", "backward", "optimizer", "pack and launch")


@dataclass(frozen=True, slots=True)
class Segment:
    """One thing that a rank did for a while. Segments of a rank follow each other without a gap.

    Attributes:
        what: an activity; "wait": it stood still; "program": it was outside of the sharded modules.
        name: the name of the module, group or optimizer.
        begin: its begin, in seconds.
        end: its end, in seconds.
    """

    what: str
    name: str
    begin: float
    end: float


def is_wait(span: Span) -> bool:
    """Whether the computation stood still during ``span``."""
    return span.what.startswith("wait for") or span.blocks


def segments(record: RankRecord) -> list[Segment]:
    """What the rank did, from the beginning to the end of the context.

    Inside of nested modules it is the innermost one. Backwards of two modules may overlap; then it is the one that has
    begun last.
    """
    changes: list[tuple[float, int, int]] = []
    spans = [each for each in record.spans if each.what in ACTIVITIES or is_wait(each)]
    for index, span in enumerate(spans):
        if span.end > span.begin:
            changes += [(span.begin, 1, index), (span.end, 0, index)]
    changes.sort()
    found: list[Segment] = []
    active: list[int] = []
    since = min([record.begin, *(time for time, _, _ in changes[:1])])  # (a device's clock may be a little behind)
    for time, begins, index in changes:
        _extend(found, [spans[each] for each in active], since, time)
        since = max(since, time)
        if begins:
            active.append(index)
        else:
            active.remove(index)
    _extend(found, [], since, record.end)
    return found


def _extend(found: list[Segment], active: Sequence[Span], begin: float, end: float) -> None:
    if end <= begin:
        return
    what, name = PROGRAM, ""
    for span in active:
        if is_wait(span):
            what, name = WAIT, span.name
            break
        what, name = span.what, span.name
    if found and (found[-1].what, found[-1].name) == (what, name):
        begin = found.pop().begin
    found.append(Segment(what, name, begin, end))


def steps_of(record: RankRecord) -> list[tuple[float, float]]:
    """The begin and end of each step, in seconds.

    A step begins with a root's forward, if an optimizer of the model has stepped since the last step began. If no
    optimizer steps in the context, it begins if a backward has reduced gradients since. If nothing is trained, every
    forward begins a step.
    """
    ends = record.updates or record.reductions
    starts: list[float] = []
    for forward in sorted(record.forwards):
        if not starts or not ends or any(starts[-1] < end <= forward for end in ends):
            starts.append(forward)
    return list(itertools.pairwise([*starts, record.end]))


@dataclass(slots=True)
class Traffic:
    """The exchanges of one kind of one group, on one rank, over the whole context.

    Attributes:
        count: how many exchanges there are.
        nbytes: bytes of the full buffers.
        sent_bytes: bytes that the rank must send at least.
        in_flight_seconds: see [Note: exposed and overlapped].
        exposed_seconds: the time in which the computation stood still.
        overlapped_seconds: the time in which it went on.
    """

    count: int = 0
    nbytes: int = 0
    sent_bytes: int = 0
    in_flight_seconds: float = 0.0
    exposed_seconds: float = 0.0
    overlapped_seconds: float = 0.0

    def add(self, other: Traffic) -> None:
        """Add ``other`` to this."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def traffic_of(record: RankRecord) -> dict[tuple[str, str], Traffic]:
    """The traffic of a rank by group and kind of exchange."""
    found: dict[tuple[str, str], Traffic] = {}
    waits = [(each.begin, each.end) for each in record.spans if is_wait(each)]
    for span in record.spans:
        if span.what in EXCHANGES:
            covered = sum(max(0.0, min(end, span.end) - max(begin, span.begin)) for begin, end in waits)
            hidden = 0.0 if span.blocks else max(0.0, span.seconds - covered)
            found.setdefault((span.name, span.what), Traffic()).add(
                Traffic(1, span.nbytes, span.sent_bytes, span.seconds, 0.0, hidden)
            )
        if is_wait(span):
            kind = span.what.removeprefix("wait for ")
            found.setdefault((span.name, kind), Traffic()).exposed_seconds += span.seconds
    return found


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank, on average over its steps (times in seconds of one step, bytes of one step).

    Attributes:
        rank: its number.
        steps: how many steps there are.
        step_seconds: the length of a step.
        busy_seconds: the time in which the rank did not wait for communication.
        exposed_gather_seconds: the time in which it waited for parameters.
        exposed_reduce_seconds: the time in which it waited for reductions.
        sent_bytes: bytes that it must send at least.
        peak_unsharded_bytes: the most memory of unsharded parameters and their gather buffers at a time.
        busy: seconds by activity and name.
    """

    rank: int
    steps: int
    step_seconds: float
    busy_seconds: float
    exposed_gather_seconds: float
    exposed_reduce_seconds: float
    sent_bytes: float
    peak_unsharded_bytes: int
    busy: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def exposed_seconds(self) -> float:
        """The time in which it waited for communication."""
        return self.exposed_gather_seconds + self.exposed_reduce_seconds


def summary_of(record: RankRecord) -> RankSummary:
    """The average over the steps of ``record``; what comes before the first step does not count."""
    steps = steps_of(record)
    begin, count = (steps[0][0], len(steps)) if steps else (record.begin, 1)
    busy: dict[tuple[str, str], float] = {}
    for each in segments(record):
        seconds = each.end - max(each.begin, begin)
        if each.what != WAIT and seconds > 0:
            key = (each.what, each.name)
            busy[key] = busy.get(key, 0.0) + seconds / count
    inside = [each for each in record.spans if each.begin >= begin]
    waits = [each for each in inside if is_wait(each)]
    gathers = sum(each.seconds for each in waits if "all-gather" in each.what)
    return RankSummary(
        record.rank,
        len(steps),
        (record.end - begin) / count,
        sum(busy.values()),
        gathers / count,
        (sum(each.seconds for each in waits) - gathers) / count,
        sum(each.sent_bytes for each in inside) / count,
        max((each.unsharded_bytes + each.staged_bytes for each in record.memory), default=0),
        busy,
    )


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank that the others wait for.

    Attributes:
        rank: the rank that is busy for the longest time in a step.
        excess_seconds: how much longer than the median of the others.
        what: the activity in which most of that time is.
        name: the module, group or optimizer of this activity.
        where_seconds: how much longer it is busy there.
    """

    rank: int
    excess_seconds: float
    what: str
    name: str
    where_seconds: float


def slowest_of(ranks: Sequence[RankSummary]) -> Slowest | None:
    """The slowest of several ranks; None for one rank."""
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda each: each.busy_seconds)
    others = [each for each in ranks if each is not slowest]

    def excess(key: tuple[str, str]) -> float:
        return slowest.busy.get(key, 0.0) - statistics.median(each.busy.get(key, 0.0) for each in others)

    keys = sorted(slowest.busy) or [(PROGRAM, "")]
    where = max(keys, key=excess)
    whole = slowest.busy_seconds - statistics.median(each.busy_seconds for each in others)
    return Slowest(slowest.rank, whole, *where, excess(where))
