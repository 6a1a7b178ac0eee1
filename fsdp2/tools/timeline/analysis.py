"""What a `RankRecord` means: steps, what ran when, communication that computation hid or waited for, the slowest rank.

Pure: records go in, facts come out.

[Note: exposed and overlapped]
An exchange is *in flight* from when it is issued to when it is over. Without streams nobody learns when it is over
before the host waits for it, so that is taken for its end. What the computation stands still for is *exposed*: on the
host the time inside of a wait (and of an exchange that lets nothing run beside it), on a device the time for which the
stream that computes waits. What is in flight while the computation goes on is *overlapped*. So a rank that is late is
not exposed itself: the others are, which wait for it.
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
    """One thing that a rank did for a while; those of a rank follow each other without a gap.

    Attributes:
        what: an activity; "wait": it stood still; "program": what is outside of the sharded modules.
        name: of the module, group or optimizer.
        begin: seconds.
        end: seconds.
    """

    what: str
    name: str
    begin: float
    end: float


def is_wait(span: Span) -> bool:
    """Whether the computation stood still for as long."""
    return span.what.startswith("wait for") or span.blocks


def segments(record: RankRecord) -> list[Segment]:
    """What the rank did, from the beginning to the end of the context.

    Of modules that are inside of each other it is the innermost; backward of two modules may cross, and it is the one
    that began last.
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
    """Beginning and end of each step, in seconds.

    A step begins where a root's forward does, if an optimizer of the model has stepped since the last one did. Where
    no optimizer steps in the whole context: if a backward has reduced gradients since; and where nothing is trained,
    with every forward.
    """
    ends = record.updates or record.reductions
    starts: list[float] = []
    for forward in sorted(record.forwards):
        if not starts or not ends or any(starts[-1] < end <= forward for end in ends):
            starts.append(forward)
    return list(itertools.pairwise([*starts, record.end]))


@dataclass(slots=True)
class Traffic:
    """Exchanges of one kind of one group, on one rank, over the whole context.

    Attributes:
        count: exchanges.
        nbytes: of the whole buffers.
        sent_bytes: what the rank sent at the least.
        in_flight_seconds: see [Note: exposed and overlapped].
        exposed_seconds: for which the computation stood still.
        overlapped_seconds: for which it went on.
    """

    count: int = 0
    nbytes: int = 0
    sent_bytes: int = 0
    in_flight_seconds: float = 0.0
    exposed_seconds: float = 0.0
    overlapped_seconds: float = 0.0

    def add(self, other: Traffic) -> None:
        """Both together."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def traffic_of(record: RankRecord) -> dict[tuple[str, str], Traffic]:
    """By group and kind of exchange."""
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
    """One rank, on average over its steps (all times in seconds of one step, bytes of one step).

    Attributes:
        rank: its number.
        steps: how many.
        step_seconds: length of a step.
        busy_seconds: of it, for which the rank did not wait for communication.
        exposed_gather_seconds: of it, for which it waited for parameters.
        exposed_reduce_seconds: of it, for which it waited for reductions.
        sent_bytes: what it sent at the least.
        peak_unsharded_bytes: most memory of unsharded parameters and what they are gathered into, at a time.
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
        """For which it waited."""
        return self.exposed_gather_seconds + self.exposed_reduce_seconds


def summary_of(record: RankRecord) -> RankSummary:
    """Average over the steps of ``record``; what comes before the first does not count."""
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
        rank: that is busy for longest in a step.
        excess_seconds: for how much longer than the median of the others.
        what: in which activity most of that is.
        name: of which module, group or optimizer.
        where_seconds: for how much longer there.
    """

    rank: int
    excess_seconds: float
    what: str
    name: str
    where_seconds: float


def slowest_of(ranks: Sequence[RankSummary]) -> Slowest | None:
    """Of several ranks; None of one."""
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
