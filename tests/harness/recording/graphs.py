"""Graphs without a device that has them: what `fsdp2.make_graphed_step` records is run again in the place of a replay.

`RepeatedStep` only runs it again, on the arguments of the recording, as a replay reads them: for ranks on gloo.
`RehearsedGraph` is for a `Recorder`: it says that a graph is being captured, and compares what each further run
launches with the first: names, order, streams and waits, and the memory that was there before the recording.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch

from fsdp2.model.graphed_step import recording
from tests.harness.happens_before import HOST, Allocation, EventRecord, Operation, Release, StreamWait, TraceEvent
from tests.harness.recording.recorder import COMPUTE, Recorder


class RepeatedStep:
    """Records by running, so the first replay has been run already."""

    pool = "the memory of the process"

    def __init__(self) -> None:
        self._run: Callable[[], None] | None = None
        self._was_replayed = False

    def warm_up(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def record(self, run: Callable[[], None]) -> None:
        """Run it."""
        self._run = run
        run()

    def replay(self) -> None:
        """Run it again, but for the first time."""
        assert self._run is not None, "nothing was recorded"
        if self._was_replayed:
            self._run()
        self._was_replayed = True

    def close(self) -> None:
        """Forget it."""
        self._run = None


class RehearsedGraph(RepeatedStep):
    """The same under a recorder; runs must launch the same."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._launches: list[Any] = []

    def record(self, run: Callable[[], None]) -> None:
        """Run it, as captured."""
        known = {event.block for event in self._recorder.trace if isinstance(event, Allocation)}
        known -= {event.block for event in self._recorder.trace if isinstance(event, Release)}
        super().record(lambda: self._compare(run, known))

    def _compare(self, run: Callable[[], None], known: set[int]) -> None:
        recorder = self._recorder
        assert streams_beside(recorder.trace) == set(), "the graph does not wait for what was issued before it"
        start, synchronized = len(recorder.trace), len(recorder.synchronizing)
        recorder.captures = True
        try:
            run()
        finally:
            recorder.captures = False
        trace = recorder.trace[start:]
        assert recorder.synchronizing[synchronized:] == [], "the host waits for the device"
        refuse_what_no_capture_allows(trace)
        assert streams_beside(trace) == set(), "not all streams come back to that of the graph"
        launches = list(_launches(trace, known))
        assert not self._launches or launches == self._launches
        self._launches = launches


def refuse_what_no_capture_allows(trace: list[TraceEvent]) -> None:
    """A graph of CUDA begins on one stream; another joins when it waits for an event of one that takes part.

    Only those that take part may be launched on, and only their events waited for: the others are executed at once, or
    come before the graph.
    """
    joined, recorded = {COMPUTE}, set()
    for event in trace:
        if isinstance(event, EventRecord) and event.stream in joined:
            recorded.add(event.event)
        elif isinstance(event, Operation) and event.stream != HOST:
            assert event.stream in joined, f"is launched on a stream that takes no part in the graph: {event}"
        elif isinstance(event, StreamWait):
            assert event.stream != HOST, event
            assert event.event in recorded, f"waits for what takes no part in the graph: {event}"
            joined.add(event.stream)


def streams_beside(trace: list[TraceEvent]) -> set[int]:
    """Streams with something that the compute stream does not wait for at the end of ``trace``."""
    seen: dict[int, dict[int, int]] = {COMPUTE: {}}  # by stream, what it comes after: by stream, the last index
    recorded: dict[int, dict[int, int]] = {}
    for index, event in enumerate(trace):
        if isinstance(event, Operation) and event.stream != HOST:
            seen.setdefault(event.stream, {})[event.stream] = index
        elif isinstance(event, EventRecord):
            recorded[event.event] = dict(seen.get(event.stream, {}))
        elif isinstance(event, StreamWait):
            after = seen.setdefault(event.stream, {})
            for stream, last in recorded.get(event.event, {}).items():
                after[stream] = max(last, after.get(stream, -1))
    return {stream for stream, own in seen.items() if own.get(stream, -1) > seen[COMPUTE].get(stream, -1)} - {COMPUTE}


def _launches(trace: list[TraceEvent], known: set[int]) -> Iterator[tuple[Any, ...]]:
    """What runs launch alike: memory and events of the run itself by the order of their first use."""
    numbers: dict[Any, int] = {}
    for event in trace:
        if isinstance(event, Operation):
            places = tuple(
                (
                    each.block if each.block in known else ("own", numbers.setdefault(each.block, len(numbers))),
                    each.start,
                )
                for each in event.accesses
            )
            yield event.stream, event.name, places
        elif isinstance(event, EventRecord):
            yield event.stream, "event", numbers.setdefault(("event", event.event), len(numbers))
        elif isinstance(event, StreamWait):
            yield event.stream, "wait", numbers.setdefault(("event", event.event), len(numbers))


@contextlib.contextmanager
def graphs(make: Callable[[], recording.Recording]) -> Iterator[None]:
    """Models on the CPU have graphs that ``make`` makes."""

    def of_device(device: torch.device, pool: Any) -> recording.Recording:
        return make()

    with mock.patch.dict(recording.OF_DEVICES, {"cpu": of_device}):
        yield
