"""What records of ranks mean: steps, segments, the slowest rank, one scale; on records made by hand, in seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdp2.tools.timeline.analysis import Segment, segments, slowest_of, steps_of, summary_of, traffic_of
from fsdp2.tools.timeline.chrome_trace import lanes
from fsdp2.tools.timeline.collecting import on_one_scale
from fsdp2.tools.timeline.picture import MOST_RANKS, MOST_STEPS, shown
from fsdp2.tools.timeline.records import RankRecord, Span
from fsdp2.tools.timeline.report import TimelineReport


def record(rank: int = 0, **changes: Any) -> RankRecord:
    plain = RankRecord(
        rank=rank,
        host="here",
        clock_id="one",
        has_streams=False,
        begin=0.0,
        end=10.0,
        wall=1000.0,
        forwards=(1.0,),
        updates=(),
        reductions=(),
        spans=(),
        memory=(),
        model="Model",
    )
    return dataclasses.replace(plain, **changes)


def test_steps_begin_after_updates_or_reductions_or_with_each_forward() -> None:
    forwards = (1.0, 2.0, 4.0, 5.0)
    assert steps_of(record(forwards=forwards)) == [(1, 2), (2, 4), (4, 5), (5, 10)]
    assert steps_of(record(forwards=forwards, reductions=(3.0, 6.0))) == [(1, 4), (4, 10)]
    assert steps_of(record(forwards=forwards, reductions=(1.5, 3.0, 4.5, 6.0), updates=(3.5, 7.0))) == [(1, 4), (4, 10)]
    assert steps_of(record(forwards=())) == []


def test_segments_are_of_the_innermost_and_waits_come_first() -> None:
    spans = (
        Span("forward", "root", 1, 6),
        Span("forward", "block", 2, 5),
        Span("wait for all-gather", "block", 3, 4),
        Span("backward", "b", 6, 8),
        Span("backward", "a", 7, 9),  # begins before that of b has ended
    )
    assert segments(record(spans=spans)) == [
        Segment("program", "", 0, 1),
        Segment("forward", "root", 1, 2),
        Segment("forward", "block", 2, 3),
        Segment("wait", "block", 3, 4),
        Segment("forward", "block", 4, 5),
        Segment("forward", "root", 5, 6),
        Segment("backward", "b", 6, 7),
        Segment("backward", "a", 7, 9),
        Segment("program", "", 9, 10),
    ]


def test_what_is_in_flight_is_exposed_hidden_or_beside_another_wait() -> None:
    spans = (
        Span("all-gather", "a", 1, 5, nbytes=80, sent_bytes=60, collectives=1),
        Span("wait for all-gather", "a", 4, 5),
        Span("wait for reduce-scatter", "b", 2, 3),
        Span("reduce-scatter", "c", 6, 8, nbytes=80, sent_bytes=60, collectives=2, blocks=True),
    )
    found = traffic_of(record(spans=spans))
    gather, other, blocking = found["a", "all-gather"], found["b", "reduce-scatter"], found["c", "reduce-scatter"]
    assert (gather.in_flight_seconds, gather.exposed_seconds, gather.overlapped_seconds) == (4, 1, 2)
    assert (other.count, other.exposed_seconds) == (0, 1)
    assert (blocking.exposed_seconds, blocking.overlapped_seconds) == (2, 0)
    summary = summary_of(record(spans=spans))
    assert (summary.exposed_gather_seconds, summary.exposed_reduce_seconds) == (1, 3)
    assert summary.busy_seconds == 9 - 4 and summary.sent_bytes == 120


def test_the_slowest_is_the_one_that_does_not_wait() -> None:
    late = record(1, spans=(Span("backward", "a", 2, 6), Span("forward", "a", 1, 2)))
    others = [
        record(rank, spans=(Span("backward", "a", 2, 3), Span("wait for reduce-scatter", "a", 3, 6))) for rank in (0, 2)
    ]
    slowest = slowest_of([summary_of(each) for each in (others[0], late, others[1])])
    assert slowest is not None
    assert (slowest.rank, slowest.excess_seconds) == (1, 3)
    assert (slowest.what, slowest.name, slowest.where_seconds) == ("backward", "a", 3)
    assert slowest_of([summary_of(late)]) is None


def test_ranks_of_one_machine_share_a_clock_and_others_the_time_of_day() -> None:
    first, near = record(begin=5.0, end=9.0), record(1, begin=6.0, end=9.0)
    moved, shared = on_one_scale([first, near])
    assert shared and [each.begin for each in moved] == [0, 1]
    # Its own clock says 106 when the first one's says 6: 1,006 s of the day.
    far = record(1, clock_id="two", begin=106.0, end=109.0, wall=900.0)
    moved, shared = on_one_scale([first, far])
    assert not shared and [each.begin for each in moved] == [0, 1]
    assert "by the time of day" in "\n".join(TimelineReport.of([first, far]).headlines())


def test_a_group_is_averaged_over_the_ranks_that_have_it() -> None:
    both = [Span("all-gather", "a", 1, 3, nbytes=8), Span("all-gather", "a", 4, 5, nbytes=8)]
    records = [record(0, spans=tuple(both)), record(1, spans=(both[0],)), record(2)]
    (group,) = TimelineReport.of(records).groups
    assert (group.gathers.count, group.gathers.nbytes, group.gathers.in_flight_seconds) == (1.5, 12, 2.5)


def test_lanes_do_not_overlap() -> None:
    spans = [Span("all-gather", name, *place) for name, place in {"a": (0, 3), "b": (1, 2), "c": (3, 4)}.items()]
    assert [[each.name for each in lane] for lane in lanes(spans)] == [["a", "c"], ["b"]]


def test_a_picture_shows_the_last_steps_of_some_ranks_and_the_slowest() -> None:
    slow = 3 * MOST_RANKS - 1
    waits = (Span("wait for all-gather", "a", 6, 7),)
    starts = (-5.0, -3.0, -1.0, 1.0, 3.0, 5.0)
    records = [record(rank, forwards=starts, spans=waits if rank != slow else ()) for rank in range(slow + 1)]
    ranks, steps = shown(TimelineReport.of(records))
    assert [each.rank for each in ranks] == [*range(MOST_RANKS - 1), slow]
    assert steps == [(-1, 1), (1, 3), (3, 5), (5, 10)] and len(steps) == MOST_STEPS
