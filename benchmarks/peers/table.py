"""The table of all contenders, who is first in each column, and why where it is not this package."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.implementations import AGAIN, UNSHARDED, base_of
from benchmarks.peers.facts import Facts
from benchmarks.tables import Table
from benchmarks.throughput import REFERENCE, Interval, Samples

MIB = 1 << 20
OURS = "fsdp2"
EQUAL = 1.01
"""Within a hundredth, figures of memory are of equals: page by page, allocators round."""


@dataclass(frozen=True, slots=True)
class Contender:
    """What was measured of one. `own_bytes`: its parameters, gradients and optimizer state on a rank."""

    name: str
    times: Samples
    facts: Facts
    own_bytes: int


Value = Callable[[Contender], float | None]


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `digits` behind the point; of `reasons`, by implementation: why it is before this package."""

    title: str
    value: Value
    digits: int
    reasons: dict[str, str]


_NO_GATHERS = "it has all parameters on every rank, and so gathers none"
_MESSAGES = "ours sends each large parameter from where it lies, as messages of its own, which saves the copies"
COLUMNS = (
    Column(
        "wall ms",
        lambda each: 1e3 * statistics.median(each.times.wall),
        0,
        {"ddp": f"{_NO_GATHERS}; every rank steps on all of them, which takes less than to gather them here"},
    ),
    Column(
        "CPU ms",
        lambda each: 1e3 * statistics.median(each.times.cpu),
        0,
        {"ddp": f"{_NO_GATHERS}; every rank steps on all of them, which takes less than to gather them here"},
    ),
    Column("peak MiB", lambda each: each.facts.peak_bytes / MIB, 0, {}),
    Column(
        "over own state",
        lambda each: (each.facts.peak_bytes - each.own_bytes) / MIB,
        0,
        {},
    ),
    Column(
        "until optimizer",
        lambda each: (each.facts.computing_peak_bytes - each.own_bytes) / MIB,
        0,
        {"ddp": "its gradients are its communication buffers, and nothing is gathered"},
    ),
    Column(
        "copied MiB",
        lambda each: None if each.facts.copied_bytes is None else each.facts.copied_bytes / MIB,
        1,
        {
            "ddp": "its gradients lie in its buckets; ours packs the small parameters of a block for one collective",
            "simplefsdp": "one collective for each parameter; ours packs the small ones of a block for one",
        },
    ),
    Column("sent MiB", lambda each: each.facts.sent_bytes / MIB, 1, {"ddp": _NO_GATHERS}),
    Column("calls", lambda each: float(each.facts.calls), 0, {"ddp": "it has one hook for all, in C++, and no units"}),
    Column(
        "operations",
        lambda each: None if each.facts.operations is None else float(each.facts.operations),
        0,
        {
            "ddp": _NO_GATHERS,
            "fsdp1-flat": f"one parameter for each unit, few for the optimizer; {_MESSAGES}",
            "torch": f"one collective for each block; {_MESSAGES}",
        },
    ),
)
NOTES = (
    "wall of the slowest rank, CPU of all threads of all ranks: medians; / torch: 95 % interval of a bootstrap",
    "peak, of a rank: what it had allocated at most in a step, in blocks of 64 KiB and more; over own state: less "
    "parameters, gradients and both states of AdamW; until optimizer: the same before the optimizer steps",
    "copied by operations, outside of collectives; sent over TCP, counted by the kernel; calls of Python and built-in "
    "functions; operations dispatched: each of a rank and a step",
    "-: what is compiled does not run under the mode that counts operations",
)


def table_of(contenders: list[Contender], title: str, notes: tuple[str, ...] = ()) -> Table:
    """All of them; `contenders` has no name twice."""
    columns = [""]
    for column in COLUMNS:
        columns += [column.title, f"/ {REFERENCE}"] if _is_time(column) else [column.title]
    table = Table(title, columns, notes=(*notes, *NOTES, *_firsts(contenders)))
    reference = next((each for each in contenders if each.name == REFERENCE), None)
    for each in contenders:
        cells: list[str] = []
        for column in COLUMNS:
            value = column.value(each)
            cells.append("-" if value is None else f"{value:.{column.digits}f}")
            if _is_time(column):
                cells.append("" if reference in (None, each) else str(_over(each, reference, column)))
        table.add(each.name, *cells)
    return table


def _is_time(column: Column) -> bool:
    return column.title.endswith(" ms")


def _over(mine: Contender, other: Contender | None, column: Column) -> Interval:
    assert other is not None
    which = column.title.removesuffix(" ms").lower()
    return Interval.of(getattr(mine.times, which), getattr(other.times, which))


def _firsts(contenders: list[Contender]) -> list[str]:
    """One line for each column. Who shards nothing and sends nothing does not compete."""
    competing = [each for each in contenders if base_of(each.name) != UNSHARDED and not each.name.endswith(AGAIN)]
    ours = [each for each in competing if base_of(each.name) == OURS]
    if not ours:
        return []
    return [f"first in {column.title}: {_first(competing, ours, column)}" for column in COLUMNS]


def _first(competing: list[Contender], ours: list[Contender], column: Column) -> str:
    known = [(value, each) for each in competing if (value := column.value(each)) is not None]
    mine = [(value, each) for value, each in known if each in ours]
    if not mine:
        return "not known of ours"
    (least, first), (our_least, our_first) = (min(of, key=lambda pair: pair[0]) for of in (known, mine))
    if our_least == least:
        return " and ".join(each.name for value, each in known if value == least)
    if _is_time(column) and (interval := _over(our_first, first, column)).low <= 1:
        return f"{first.name} and {our_first.name}, which took {interval} of it"
    if column.title in ("peak MiB", "over own state") and _peaks_are_equal(our_first, first):
        return f"{first.name} and {our_first.name}, whose peaks are within a hundredth"
    reason = column.reasons.get(base_of(first.name), "the reason is not known")
    figures = f"{least:.{column.digits}f}, {our_first.name} {our_least:.{column.digits}f}"
    return f"{first.name} ({figures}): {reason}"


def _peaks_are_equal(mine: Contender, other: Contender) -> bool:
    return mine.own_bytes == other.own_bytes and mine.facts.peak_bytes <= EQUAL * other.facts.peak_bytes
