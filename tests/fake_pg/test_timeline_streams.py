"""The timeline on a device with streams, against times worked out by hand: exact on a simulated clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from fsdp2.tools.observing.clocks import CLOCKS
from fsdp2.tools.timeline.analysis import EXCHANGES, segments
from fsdp2.tools.timeline.records import Span
from tests.fake_pg.helpers.clocked import COMPUTE, ClockedDevice, TimedBlock, clocked
from tests.harness import fake_world
from tests.harness.happens_before import Operation, TraceEvent, find_violations
from tests.harness.recording.recorder import Recorder, RecordingDevice, recording
from tests.harness.recording.training import Training

GATHER, SCATTER, ALL_REDUCE, FORWARD, BACKWARD = 5e-3, 4e-3, 2e-3, 2e-3, 3e-3


def exact(milliseconds: float) -> Any:
    return pytest.approx(milliseconds / 1e3, abs=1e-9)  # floats on the scale of the machine's uptime


class Checkpointed(nn.Module):
    def __init__(self, device: ClockedDevice) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TimedBlock(device, 8, forward=FORWARD, backward=BACKWARD) for _ in range(2))

    def forward(self) -> torch.Tensor:
        return checkpoint(self.both, torch.ones(2, 8), use_reentrant=False).sum()

    def both(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(device: ClockedDevice, steps: int, **options: Any) -> tuple[Any, Any]:
    """Three blocks, whose orders are known after ``steps``; and what runs one."""
    blocks = [TimedBlock(device, 8, forward=FORWARD, backward=BACKWARD) for _ in range(3)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
        device.now = dict.fromkeys(device.now, max(device.now.values()))  # a step begins with idle streams

    for _ in range(steps):
        step()
    return model, step


@fake_world(4)
def test_exposed_and_overlapped_seconds_of_each_group() -> None:
    """In ms from the beginning of the step::

    gathers    | 0 0-5 | 1 5-10 | 2 10-15      | 2 17-22 | 1 22-27 | 0 27-32
    compute            0 5-7    1 10-12  2 15-17         2 22-25   1 27-30   0 32-35
    reduces                                              2 25-29   1 30-34   0 35-39
    """
    with clocked(gather=GATHER, scatter=SCATTER) as device:
        model, step = trained(device, 2)
        with fsdp2.timeline(model) as timeline:
            step()
    groups = {each.name: each for each in timeline.groups}
    assert {name: each.gathers.count for name, each in groups.items()} == {"0": 2, "1": 2, "2": 2}
    assert {name: each.reductions.count for name, each in groups.items()} == {"0": 1, "1": 1, "2": 1}
    exposed = {name: each.gathers.exposed_seconds for name, each in groups.items()}
    assert exposed == {"0": exact(5 + 2), "1": exact(3 + 2), "2": exact(3 + 5)}, str(timeline)
    hidden = {name: each.gathers.overlapped_seconds for name, each in groups.items()}
    assert hidden == {"0": exact(0 + 3), "1": exact(2 + 3), "2": exact(2 + 0)}
    assert {name: each.reductions.exposed_seconds for name, each in groups.items()} == {
        "0": exact(4), "1": exact(0), "2": exact(0)
    }  # fmt: skip
    # Of 25-29 and of 30-34 the computation waits for a gather until 27 and 32: nothing hides that.
    assert {name: each.reductions.overlapped_seconds for name, each in groups.items()} == {
        "0": exact(0), "1": exact(2), "2": exact(2)
    }  # fmt: skip
    (rank,) = timeline.ranks
    assert rank.step_seconds == exact(39)
    assert rank.busy_seconds == exact(3 * 2 + 3 * 3) and rank.exposed_seconds == exact(24)
    assert timeline.slowest is None


@fake_world(4)
def test_spans_begin_and_end_where_streams_come_to_them() -> None:
    with clocked(gather=GATHER, scatter=SCATTER) as device:
        model, step = trained(device, 2)
        begin = device.now[COMPUTE]
        with fsdp2.timeline(model) as timeline:
            step()
    (record,) = timeline.report.records
    start = record.forwards[0]
    assert record.has_streams and begin > 0

    def places(what: str) -> list[tuple[str, Any, Any]]:
        found = sorted((each for each in record.spans if each.what == what), key=lambda each: each.begin)
        return [(each.name, exact_of(each, 0), exact_of(each, 1)) for each in found]

    def exact_of(span: Span, end: int) -> float:
        return round(((span.end if end else span.begin) - start) * 1e3, 6)

    gathers = [("0", 0, 5), ("1", 5, 10), ("2", 10, 15), ("2", 17, 22), ("1", 22, 27), ("0", 27, 32)]
    assert places("all-gather") == gathers
    assert places("reduce-scatter") == [("2", 25, 29), ("1", 30, 34), ("0", 35, 39)]
    assert places("wait for all-gather") == [
        ("0", 0, 5), ("1", 7, 10), ("2", 12, 15), ("2", 17, 22), ("1", 25, 27), ("0", 30, 32)
    ]  # fmt: skip
    ahead = [each.name for each in record.spans if each.what == "all-gather" and each.ahead]
    assert sorted(ahead) == ["0", "1", "1", "2"]


@fake_world(4)
def test_what_a_rank_does_has_no_gap_and_no_overlap() -> None:
    with clocked(gather=GATHER, scatter=SCATTER) as device:
        model, step = trained(device, 1)
        with fsdp2.timeline(model) as timeline:
            step()
            step()
    (record,) = timeline.report.records
    found = segments(record)
    assert all(one.end == other.begin for one, other in itertools.pairwise(found))
    assert found[-1].end == record.end
    assert [(each.what, each.name) for each in found if each.what == "forward"] == [
        ("forward", name) for name in ["0", "1", "2"] * 2
    ]
    assert len(timeline.report.steps) == 2, "each reduces"


@fake_world(4)
def test_reductions_over_replicas_are_two_exchanges() -> None:
    """As above; an all-reduce runs beside the next reduce-scatter::

    scatters | 2 25-29 | 1 30-34 | 0 35-39
    reduces  | 2 29-31 | 1 34-36 | 0 39-41
    compute  | 1 27-30   waits 30-32 for the gather  | 0 32-35   waits 35-41
    """
    with clocked(gather=GATHER, scatter=SCATTER, all_reduce=ALL_REDUCE) as device:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, step = trained(device, 2, mesh=mesh)
        with fsdp2.timeline(model) as timeline:
            step()
    groups = {each.name: each.reductions for each in timeline.groups}
    assert {name: each.count for name, each in groups.items()} == dict.fromkeys(groups, 2)
    assert {name: each.in_flight_seconds for name, each in groups.items()} == dict.fromkeys(groups, exact(4 + 2))
    assert {name: each.exposed_seconds for name, each in groups.items()} == {
        "0": exact(5), "1": exact(1), "2": exact(0)
    }  # fmt: skip
    assert timeline.ranks[0].step_seconds == exact(41)


@fake_world(4)
def test_recomputed_blocks_are_shown_as_that() -> None:
    with clocked(gather=GATHER, scatter=SCATTER) as device:
        whole = Checkpointed(device)
        for block in whole.blocks:
            fully_shard(block)
        fully_shard(whole)
        whole().backward()
        with fsdp2.timeline(whole) as timeline:
            whole().backward()
    (rank,) = timeline.ranks
    by_activity: dict[str, float] = {}
    for (what, _), seconds in rank.busy.items():
        by_activity[what] = by_activity.get(what, 0.0) + seconds
    assert by_activity["forward"] == exact(2 * 2)
    assert by_activity["recompute"] == exact(2), "of the first block"
    assert by_activity["backward"] == exact(2 * 3 + 2), "in which the second block is computed again"


class Places:
    """A clock that tells places in a recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._trace = recorder.trace

    def mark(self, stream: object) -> int:
        return len(self._trace)

    def settle(self) -> None:
        pass

    def seconds(self, mark: int) -> float:
        return float(mark)


def issued(trace: Sequence[TraceEvent]) -> list[tuple[Any, ...]]:
    """What was issued to which stream, and what waits for what; without the numbers of events and blocks."""
    names = ("stream", "name", "why", "nbytes")
    return [(type(each).__name__, *(getattr(each, name, None) for name in names)) for each in trace]


@fake_world(4)
def test_what_streams_are_given_is_the_same_with_a_timeline() -> None:
    with recording() as recorder:
        clock = {RecordingDevice: lambda through, device: Places(recorder)}
        training = Training.of_stack(recorder)
        training.steps(3)
        begin = len(recorder.trace)
        training.steps(1)
        middle = len(recorder.trace)
        with mock.patch.dict(CLOCKS, clock), fsdp2.timeline(training.model) as timeline:
            begin_inside = len(recorder.trace)
            training.steps(1)
    assert issued(recorder.trace[begin_inside:]) == issued(recorder.trace[begin:middle])
    assert not list(find_violations(recorder.trace))
    # Each exchange of the recording lies in the span that stands for it.
    record = timeline.report.records[0].moved(timeline._recorder._began)  # places again
    collectives = [
        index
        for index, event in enumerate(recorder.trace)
        if index >= begin_inside and isinstance(event, Operation) and event.name.startswith("c10d.")
    ]
    spans = [each for each in record.spans if each.what in EXCHANGES]
    assert [any(round(each.begin) <= index < round(each.end) for each in spans) for index in collectives] == [
        True
    ] * len(collectives)
    assert len(collectives) == len(spans) == 4 + 3 + 4, "gathers of four groups and of three again, four reductions"
