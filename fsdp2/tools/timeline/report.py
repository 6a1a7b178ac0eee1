"""`TimelineReport`: the records of all ranks on one scale, with what they mean. Traces and pictures are made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2.tools.timeline.analysis import (
    LITTLE,
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
    """The communication of one group in a step, on average over steps and the ranks that have it.

    Attributes:
        name: of its module, below the root.
        gathers: of its parameters, in forward and backward.
        reductions: of its gradients, over shards and replicas.
    """

    name: str
    gathers: Traffic
    reductions: Traffic

    @property
    def exposed_seconds(self) -> float:
        """For which the computation stood still for this group."""
        return self.gathers.exposed_seconds + self.reductions.exposed_seconds

    @property
    def overlapped_seconds(self) -> float:
        """For which its exchanges were in flight while the computation went on."""
        return self.gathers.overlapped_seconds + self.reductions.overlapped_seconds


@dataclass(frozen=True, slots=True)
class TimelineReport:
    """What was seen on all ranks.

    Attributes:
        records: in the order of ranks; times in seconds since the first rank entered the context.
        shares_clock: whether all ranks run on one machine. If not, they are compared by the time of day.
        ranks: what is to be said of each.
        groups: in the order in which they were first gathered.
        slowest: the rank that the others wait for; None of one rank.
    """

    records: tuple[RankRecord, ...]
    shares_clock: bool
    ranks: tuple[RankSummary, ...]
    groups: tuple[GroupSummary, ...]
    slowest: Slowest | None

    @classmethod
    def of(cls, records: Sequence[RankRecord]) -> TimelineReport:
        """Put together what ranks have seen."""
        moved, shared = on_one_scale(records)
        ranks = tuple(map(summary_of, moved))
        return cls(tuple(moved), shared, ranks, tuple(_groups(moved)), slowest_of(ranks))

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Those of the first rank."""
        return steps_of(self.records[0])

    @property
    def step_seconds(self) -> float:
        """Of a step, on average over ranks."""
        return sum(each.step_seconds for each in self.ranks) / len(self.ranks)

    @property
    def exposed_share(self) -> float:
        """Which part of the time of all ranks was spent in waits for communication, from 0 to 1."""
        whole = sum(each.step_seconds for each in self.ranks)
        return sum(each.exposed_seconds for each in self.ranks) / whole if whole else 0.0

    @property
    def in_graphs(self) -> tuple[str, ...]:
        """Groups whose communication is part of graphs of `torch.compile`, where nothing sees it."""
        return tuple(dict.fromkeys(name for each in self.records for name in each.in_graphs))

    def headlines(self) -> list[str]:
        """The sentences that matter."""
        first = self.records[0]
        count = len(self.steps)
        said = [
            f"{first.model}: {count} step{'' if count == 1 else 's'} on {len(self.records)} "
            f"rank{'' if len(self.records) == 1 else 's'}, {_ms(self.step_seconds)} a step; "
            f"{self.exposed_share:.1%} of the time ranks wait for communication."
        ]
        if self.slowest is not None:
            said.append(self._slowest_line(self.slowest))
        said += [f"Rank {each.rank} left the context by {each.failure}." for each in self.records if each.failure]
        if self.in_graphs:
            said.append(
                f"The communication of {len(self.in_graphs)} groups is part of graphs of torch.compile and not shown; "
                "torch.profiler shows it."
            )
        if not self.shares_clock:
            said.append("Ranks of different machines are compared by the time of day: within milliseconds.")
        return said

    def _slowest_line(self, slowest: Slowest) -> str:
        share = slowest.excess_seconds / self.step_seconds if self.step_seconds else 0.0
        line = f"Rank {slowest.rank} is the slowest: it computes for {_ms(slowest.excess_seconds)} longer in a step "
        line += f"than the others ({share:.1%} of it)"
        if slowest.where_seconds <= 0:
            return line + "."
        line += f", {_ms(slowest.where_seconds)} of that in {_place(slowest.what, slowest.name)}"
        line += "".join(f", {_ms(seconds)} in {_place(what, name)}" for what, name, seconds in slowest.also)
        rest = slowest.excess_seconds - slowest.where_seconds - sum(seconds for _, _, seconds in slowest.also)
        return f"{line}; the rest is in many places." if rest > LITTLE * slowest.excess_seconds else f"{line}."

    def table(self) -> str:
        """Ranks and groups as plain text."""
        lines = [*self.headlines(), ""]
        lines.append("rank   step ms   busy ms   waits ms: gathers  reductions   sent MiB   unsharded MiB at most")
        for each in self.ranks:
            lines.append(
                f"{each.rank:>4} {each.step_seconds * 1e3:>9.2f} {each.busy_seconds * 1e3:>9.2f} "
                f"{each.exposed_gather_seconds * 1e3:>18.2f} {each.exposed_reduce_seconds * 1e3:>11.2f} "
                f"{each.sent_bytes / MIB:>10.2f} {each.peak_unsharded_bytes / MIB:>23.2f}"
            )
        width = max([5, *(len(each.name) for each in self.groups)])
        sides = "   gathers      MiB  hidden ms  exposed ms   reductions      MiB  hidden ms  exposed ms"
        lines += ["", f"{'group':<{width}}{sides}"]
        for group in self.groups:
            cells = [
                f"{each.count:>{10 if index == 0 else 12}.1f} {each.nbytes / MIB:>8.2f} "
                f"{each.overlapped_seconds * 1e3:>10.2f} {each.exposed_seconds * 1e3:>11.2f}"
                for index, each in enumerate((group.gathers, group.reductions))
            ]
            lines.append(f"{group.name:<{width}}{cells[0]} {cells[1]}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """The same for programs: seconds and bytes, of a step on average."""
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
    """On average over the ranks that have the group: those of a pipeline have different ones."""
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
    """``weight`` times as much of everything."""
    return Traffic(**{name: weight * getattr(traffic, name) for name in Traffic.__slots__})


def _place(what: str, name: str) -> str:
    return f"the {what} of '{name}'" if name else "the program outside of the model"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
