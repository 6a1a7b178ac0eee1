"""Which part of a timeline a picture shows, and as what: shared by the page and the PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2.tools.timeline.analysis import EXCHANGES, PROGRAM, Segment, segments
from fsdp2.tools.timeline.chrome_trace import lanes
from fsdp2.tools.timeline.records import MemorySample, RankRecord, Span
from fsdp2.tools.timeline.report import TimelineReport

MOST_RANKS = 8
MOST_STEPS = 4
MOST_MARKS = 6000
"""Of what is drawn, so that a page stays a page."""

COLOURS = {
    "forward": ("#2f6fde", "#7aa8ff"),
    "recompute": ("#7a5cc9", "#b49bf5"),
    "backward": ("#c8690c", "#f2a65a"),
    "optimizer": ("#6d5a4a", "#bba592"),
    "pack and launch": ("#7d8ba0", "#93a1b5"),
    "wait": ("#d6336c", "#ff7aa5"),
    "all-gather": ("#0e9aa7", "#4fd0da"),
    "reduce-scatter": ("#4b8f2a", "#8fd06b"),
    "all-reduce": ("#8f7a12", "#dcc65a"),
    "memory": ("#8b93a1", "#7c8594"),
}
"""By what is drawn: on a light ground, and on a dark one."""

WORDS = {
    "pack and launch": "packs and launches",
    "wait": "waits for communication",
    "all-gather": "all-gather in flight",
    "reduce-scatter": "reduce-scatter in flight",
    "all-reduce": "all-reduce in flight",
    "memory": "memory: unsharded and staged",
}


@dataclass(frozen=True, slots=True)
class RankView:
    """What is drawn of one rank, cut to the window.

    Attributes:
        rank: its number.
        segments: what it does.
        gathers: lanes of all-gathers in flight.
        reductions: lanes of reductions in flight.
        memory: (seconds, bytes) of unsharded parameters and what they are gathered into.
        is_slowest: whether the others wait for it.
    """

    rank: int
    segments: tuple[Segment, ...]
    gathers: tuple[tuple[Span, ...], ...]
    reductions: tuple[tuple[Span, ...], ...]
    memory: tuple[tuple[float, int], ...]
    is_slowest: bool


@dataclass(frozen=True, slots=True)
class View:
    """What is drawn.

    Attributes:
        begin: seconds.
        end: seconds.
        steps: numbers of those in the window, and when they begin.
        ranks: of them.
        peak_bytes: the most memory of any rank in the window.
        left_out: a sentence on what is not shown; "" if all is.
    """

    begin: float
    end: float
    steps: tuple[tuple[int, float], ...]
    ranks: tuple[RankView, ...]
    peak_bytes: int
    left_out: str

    @property
    def used(self) -> list[str]:
        """The kinds that are drawn, for a legend."""
        found = {each.what for rank in self.ranks for each in rank.segments}
        found |= {span.what for rank in self.ranks for lane in (*rank.gathers, *rank.reductions) for span in lane}
        return [kind for kind in COLOURS if kind in found or kind == "memory"]


def view_of(report: TimelineReport) -> View:
    """The last whole steps of ``report``, of all ranks or of a choice of them."""
    records = _chosen(report)
    steps = report.steps or [(report.records[0].begin, report.records[0].end)]
    count = min(MOST_STEPS, len(steps))
    while count > 1 and _marks(records, steps[-count][0]) > MOST_MARKS:
        count -= 1
    begin, end = steps[-count][0], steps[-1][1]
    slowest = report.slowest.rank if report.slowest is not None else -1
    views = tuple(_rank_view(record, begin, end, record.rank == slowest) for record in records)
    left_out = []
    if len(steps) > count:
        left_out.append(f"the last {count} of {len(steps)} steps" if count > 1 else f"the last of {len(steps)} steps")
    if len(records) < len(report.records):
        left_out.append(f"{len(records)} of {len(report.records)} ranks, the slowest and the fastest among them")
    return View(
        begin,
        end,
        tuple((len(steps) - count + index, start) for index, (start, _) in enumerate(steps[-count:])),
        views,
        max([1, *(nbytes for each in views for _, nbytes in each.memory)]),
        f"Shown are {' and '.join(left_out)}." if left_out else "",
    )


def _marks(records: Sequence[RankRecord], begin: float) -> int:
    return sum(1 for record in records for span in record.spans if span.end >= begin)


def _chosen(report: TimelineReport) -> list[RankRecord]:
    if len(report.records) <= MOST_RANKS:
        return list(report.records)
    by_busy = sorted(report.ranks, key=lambda each: each.busy_seconds)
    wanted = {by_busy[-1].rank, by_busy[0].rank}
    every = math.ceil(len(report.records) / (MOST_RANKS - 2))
    wanted |= {record.rank for record in report.records[::every]}
    return [record for record in report.records if record.rank in wanted][:MOST_RANKS]


def _rank_view(record: RankRecord, begin: float, end: float, is_slowest: bool) -> RankView:
    def within(kinds: Sequence[str]) -> tuple[tuple[Span, ...], ...]:
        spans = [each for each in record.spans if each.what in kinds and each.end > begin and each.begin < end]
        return tuple(map(tuple, lanes(spans)))

    shown = [each for each in segments(record) if each.what != PROGRAM and each.end > begin and each.begin < end]
    memory = _levels(record.memory, begin, end)
    return RankView(record.rank, tuple(shown), within(EXCHANGES[:1]), within(EXCHANGES[1:]), memory, is_slowest)


def _levels(samples: Sequence[MemorySample], begin: float, end: float) -> tuple[tuple[float, int], ...]:
    """Changes of the level, from ``begin`` on; it stays between them."""
    level = 0
    found: list[tuple[float, int]] = []
    for each in samples:
        nbytes = each.unsharded_bytes + each.staged_bytes
        if each.time <= begin:
            level = nbytes
        elif each.time < end and nbytes != (found[-1][1] if found else level):
            found.append((each.time, nbytes))
    return ((begin, level), *found)
