"""`TimelineReport`: the records of all ranks on one scale, and what they mean. Traces and pictures are made from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2.tools.quantities import shown_bytes, table
from fsdp2.tools.timeline.analysis import (
    RankSummary,
    Slowest,
    Traffic,
    slowest_of,
    steps_of,
    summary_of,
    traffic_of,
)
from fsdp2.tools.timeline.collecting import on_one_scale
from fsdp2.tools.timeline.records import RankRecord

MIB = 2**20


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The communication of one group in a step, on average over steps and over the ranks that have the group.

    Attributes:
        name: the name of its module, below the root.
        gathers: the gathers of its parameters, in forward and backward.
        reductions: the reductions of its gradients, over shards and replicas.
    """

    name: str
    gathers: Traffic
    reductions: Traffic

    @property
    def exposed_seconds(self) -> float:
        """The time in which the computation stood still for this group."""
        return self.gathers.exposed_seconds + self.reductions.exposed_seconds

    @property
    def overlapped_seconds(self) -> float:
        """The time in which its exchanges were in flight while the computation went on."""
        return self.gathers.overlapped_seconds + self.reductions.overlapped_seconds


@dataclass(frozen=True, slots=True)
class TimelineReport:
    """What was seen on all ranks.

    Attributes:
        records: the records in the order of ranks; times in seconds since the first rank entered the context.
        shares_clock: whether all ranks run on one machine. If not, they are compared by the time of day.
        ranks: a summary of each rank.
        groups: a summary of each group, in the order in which they were first gathered.
        slowest: the rank that the others wait for; None for one rank.
    """

    records: tuple[RankRecord, ...]
    shares_clock: bool
    ranks: tuple[RankSummary, ...]
    groups: tuple[GroupSummary, ...]
    slowest: Slowest | None

    @classmethod
    def of(cls, records: Sequence[RankRecord]) -> TimelineReport:
        """Make a report of what all ranks have seen."""
        moved, shared = on_one_scale(records)
        ranks = tuple(map(summary_of, moved))
        return cls(tuple(moved), shared, ranks, tuple(_groups(moved)), slowest_of(ranks))

    @property
    def steps(self) -> list[tuple[float, float]]:
        """The steps of the first rank, (begin, end) each."""
        return steps_of(self.records[0])

    @property
    def step_seconds(self) -> float:
        """The length of a step, on average over ranks."""
        return sum(each.step_seconds for each in self.ranks) / len(self.ranks)

    @property
    def exposed_share(self) -> float:
        """The share of the time of all ranks that was spent in waits for communication, from 0 to 1."""
        whole = sum(each.step_seconds for each in self.ranks)
        return sum(each.exposed_seconds for each in self.ranks) / whole if whole else 0.0

    @property
    def in_graphs(self) -> tuple[str, ...]:
        """Groups whose communication is part of graphs of `torch.compile`, where nothing sees it."""
        return tuple(dict.fromkeys(name for each in self.records for name in each.in_graphs))

    def headlines(self) -> list[str]:
        """The most important results, in sentences."""
        first = self.records[0]
        count = len(self.steps)
        said = [
            f"{first.model}: {count} step{'' if count == 1 else 's'} on {len(self.records)} "
            f"rank{'' if len(self.records) == 1 else 's'}, {_ms(self.step_seconds)} a step; "
            f"{self.exposed_share:.1%} of the time ranks wait for communication."
        ]
        if self.slowest is not None:
            said.append(_slowest_line(self.slowest))
        said += [f"Rank {each.rank} left the context by {each.failure}." for each in self.records if each.failure]
        if self.in_graphs:
            said.append(
                f"The communication of {len(self.in_graphs)} groups is part of graphs of torch.compile and not shown; "
                "torch.profiler shows it."
            )
        if not self.shares_clock:
            said.append("Ranks of different machines are compared by the time of day: within milliseconds.")
        return said

    def table(self) -> str:
        """Ranks and groups as plain text; milliseconds and bytes of a step."""
        headers = ("rank", "step", "busy", "waits for gathers", "for reductions", "sent", "unsharded at most")
        rows = [
            [
                str(each.rank),
                *map(_ms, (each.step_seconds, each.busy_seconds)),
                *map(_ms, (each.exposed_gather_seconds, each.exposed_reduce_seconds)),
                *map(shown_bytes, (each.sent_bytes, each.peak_unsharded_bytes)),
            ]
            for each in self.ranks
        ]
        lines = [*self.headlines(), "", *table(headers, rows, right=range(7)), ""]
        sides = ("gathers", "bytes", "hidden", "exposed", "reductions", "bytes", "hidden", "exposed")
        rows = [
            [each.name, *(cell for side in (each.gathers, each.reductions) for cell in _cells(side))]
            for each in self.groups
        ]
        return "\n".join([*lines, *table(("group", *sides), rows, right=range(1, 9))])

    def to_dict(self) -> dict[str, object]:
        """The report as data for programs; seconds and bytes of a step on average."""
        return {
            "headlines": self.headlines(),
            "steps": len(self.steps),
            "step_seconds": self.step_seconds,
            "exposed_share": self.exposed_share,
            "slowest": None if self.slowest is None else dataclasses.asdict(self.slowest),
            "ranks": [
                {key: value for key, value in dataclasses.asdict(each).items() if key != "busy"} for each in self.ranks
            ],
            "groups": [dataclasses.asdict(each) for each in self.groups],
        }


def _groups(records: Sequence[RankRecord]) -> list[GroupSummary]:
    """A summary of each group, the average over the ranks that have it. (A pipeline's ranks have different groups.)"""
    found: dict[str, dict[int, tuple[Traffic, Traffic]]] = {}
    for record in records:
        steps = max(1, len(steps_of(record)))
        for (name, kind), traffic in traffic_of(record).items():
            sides = found.setdefault(name, {}).setdefault(record.rank, (Traffic(), Traffic()))
            sides[kind != "all-gather"].add(scaled(traffic, 1.0 / steps))
    summaries = []
    for name, by_rank in found.items():
        sums = Traffic(), Traffic()
        for sides in by_rank.values():
            for total, side in zip(sums, sides, strict=True):
                total.add(scaled(side, 1.0 / len(by_rank)))
        summaries.append(GroupSummary(name, *sums))
    return summaries


def scaled(traffic: Traffic, weight: float) -> Traffic:
    """``traffic`` with all numbers multiplied by ``weight``."""
    return Traffic(**{name: weight * getattr(traffic, name) for name in Traffic.__slots__})


def _cells(side: Traffic) -> list[str]:
    times = map(_ms, (side.overlapped_seconds, side.exposed_seconds))
    return [f"{side.count:.1f}", shown_bytes(side.nbytes), *times]


def _slowest_line(slowest: Slowest) -> str:
    line = f"Rank {slowest.rank} is the slowest: it computes for {_ms(slowest.excess_seconds)} longer in a step than "
    if slowest.where_seconds <= 0:
        return f"{line}the others."
    place = f"the {slowest.what} of '{slowest.name}'" if slowest.name else "the program outside of the model"
    return f"{line}the others, {_ms(slowest.where_seconds)} of that in {place}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
