"""A timeline as JSON for Perfetto (ui.perfetto.dev) and chrome://tracing, with one process for each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdp2.tools.timeline.analysis import EXCHANGES, PROGRAM, WAIT, segments, steps_of
from fsdp2.tools.timeline.records import RankRecord, Span
from fsdp2.tools.timeline.report import TimelineReport

STEPS, COMPUTE, GATHERS, REDUCTIONS = 0, 1, 10, 30
"""Numbers of tracks. Exchanges that are in flight at the same time get tracks of their own behind these."""


def trace(report: TimelineReport) -> dict[str, Any]:
    """The trace of all ranks of ``report``; times in microseconds."""
    events = [event for record in report.records for event in _events(record)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"made by": "fsdp2.timeline", "summary": report.headlines()},
    }


def _events(record: RankRecord) -> list[dict[str, Any]]:
    rank = record.rank
    clock = "device time" if record.has_streams else "host time"
    events = [
        _named(rank, "process_name", None, f"rank {rank} on {record.host} ({clock})"),
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        _named(rank, "thread_name", STEPS, "steps"),
        _named(rank, "thread_name", COMPUTE, "what the rank does"),
    ]
    for index, (begin, end) in enumerate(steps_of(record)):
        events.append(_lasting(rank, STEPS, f"step {index}", begin, end, "step"))
    for each in segments(record):
        if each.what != PROGRAM:
            name = f"waits for {each.name}" if each.what == WAIT else f"{each.what} {each.name}".strip()
            events.append(_lasting(rank, COMPUTE, name, each.begin, each.end, each.what))
    for first, title, kinds in (
        (GATHERS, "all-gathers in flight", EXCHANGES[:1]),
        (REDUCTIONS, "reductions in flight", EXCHANGES[1:]),
    ):
        for lane, spans in enumerate(lanes(each for each in record.spans if each.what in kinds)):
            events.append(_named(rank, "thread_name", first + lane, title if lane == 0 else f"{title} ({lane + 1})"))
            events += [_exchange(rank, first + lane, each) for each in spans]
    return events + _memory(record)


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """``spans``, split into lanes so that the spans of one lane do not overlap."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda each: each.begin):
        for lane in found:
            if lane[-1].end <= span.begin:
                lane.append(span)
                break
        else:
            found.append([span])
    return found


def _named(rank: int, what: str, track: int | None, name: str) -> dict[str, Any]:
    place = {} if track is None else {"tid": track}
    return {"ph": "M", "name": what, "pid": rank, **place, "args": {"name": name}}


def _lasting(
    rank: int, track: int, name: str, begin: float, end: float, category: str, **details: Any
) -> dict[str, Any]:
    times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
    return {"ph": "X", "pid": rank, "tid": track, "name": name, "cat": category, **times, "args": details}


def _exchange(rank: int, track: int, span: Span) -> dict[str, Any]:
    details = {"bytes": span.nbytes, "sent bytes": span.sent_bytes, "collectives": span.collectives}
    if span.what == EXCHANGES[0]:
        details |= {"for backward": span.for_backward, "ahead": span.ahead}
    return _lasting(rank, track, f"{span.what} {span.name}", span.begin, span.end, span.what, **details)


def _memory(record: RankRecord) -> list[dict[str, Any]]:
    found = []
    for each in record.memory:
        parts = {"unsharded": each.unsharded_bytes, "staging": each.staged_bytes, "reducing": each.reducing_bytes}
        name = "memory for communication, bytes"
        found.append({"ph": "C", "pid": record.rank, "ts": each.time * 1e6, "name": name, "args": parts})
    return found
