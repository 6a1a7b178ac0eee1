"""The checker on hand-written traces, and the recorder on single operations: neither passes by seeing nothing."""

from __future__ import annotations

import pytest
import torch

from tests.harness.happens_before import (
    HOST,
    Access,
    Allocation,
    EventRecord,
    Kind,
    Mark,
    Operation,
    Order,
    Release,
    StreamWait,
    TraceEvent,
    find_violations,
)
from tests.harness.recording.recorder import (
    BLOCKED,
    COMPUTE,
    COPIED,
    LAUNCHED,
    WORKED,
    Recorder,
    RecordingDevice,
    recording,
    with_recorded_works,
)

A, B, C = 0, 1, 2
"""Streams."""


def reads(stream: int, block: int, start: int = 0, stop: int = 8) -> Operation:
    return Operation(stream, "read", (Access(block, start, stop, reads=True),))


def writes(stream: int, block: int, start: int = 0, stop: int = 8) -> Operation:
    return Operation(stream, "write", (Access(block, start, stop, writes=True),))


def kinds(*trace: TraceEvent) -> list[Kind]:
    return [violation.kind for violation in find_violations(trace)]


# ---- races -----------------------------------------------------------------------------------------------


def test_unordered_accesses_of_which_one_writes_are_a_race() -> None:
    block = Allocation(1, A, 8)
    assert kinds(block, writes(A, 1), reads(B, 1)) == [Kind.RACE]
    assert kinds(block, writes(A, 1), writes(B, 1)) == [Kind.RACE]
    assert kinds(Allocation(1, A, 8, written=True), reads(A, 1), writes(B, 1)) == [Kind.RACE]
    assert kinds(Allocation(1, A, 8, written=True), reads(A, 1), reads(B, 1)) == []


def test_one_stream_runs_in_order() -> None:
    assert kinds(Allocation(1, A, 8), writes(A, 1), reads(A, 1), writes(A, 1)) == []


def test_a_wait_for_an_event_after_the_access_orders() -> None:
    block = Allocation(1, A, 8)
    assert kinds(block, writes(A, 1), EventRecord(A, 7), StreamWait(B, 7), reads(B, 1)) == []
    assert kinds(block, EventRecord(A, 7), writes(A, 1), StreamWait(B, 7), reads(B, 1)) == [Kind.RACE]
    assert kinds(block, writes(A, 1), EventRecord(A, 7), reads(B, 1), StreamWait(B, 7)) == [Kind.RACE]
    assert kinds(block, writes(A, 1), EventRecord(A, 7), StreamWait(C, 7), reads(B, 1)) == [Kind.RACE]
    assert kinds(block, writes(A, 1), StreamWait(B, 7), EventRecord(A, 7), reads(B, 1)) == [Kind.RACE]


def test_order_is_transitive() -> None:
    first, second = [EventRecord(A, 1), StreamWait(B, 1)], [EventRecord(B, 2), StreamWait(C, 2)]
    block = Allocation(1, A, 8)
    assert kinds(block, writes(A, 1), *first, *second, reads(C, 1)) == []
    assert kinds(block, writes(A, 1), *second, *first, reads(C, 1)) == [Kind.RACE]


def test_only_bytes_in_common_count() -> None:
    block = Allocation(1, A, 16)
    assert kinds(block, writes(A, 1, 0, 8), writes(B, 1, 8, 16)) == []
    assert kinds(block, writes(A, 1, 0, 9), writes(B, 1, 8, 16)) == [Kind.RACE]
    assert kinds(block, Allocation(2, A, 16), writes(A, 1), writes(B, 2)) == []


def test_every_earlier_stream_counts() -> None:
    trace = [Allocation(1, A, 8, written=True), reads(A, 1), reads(B, 1), EventRecord(A, 1), EventRecord(B, 2)]
    assert kinds(*trace, StreamWait(C, 1), StreamWait(C, 2), writes(C, 1)) == []
    assert kinds(*trace, StreamWait(C, 1), writes(C, 1)) == [Kind.RACE]
    assert kinds(*trace, writes(C, 1)) == [Kind.RACE, Kind.RACE]


def test_a_later_read_does_not_hide_an_earlier_write() -> None:
    trace = [Allocation(1, A, 8), writes(A, 1, 0, 4), writes(A, 1, 4, 8), reads(A, 1, 4, 8), reads(B, 1, 0, 4)]
    assert kinds(*trace) == [Kind.RACE]


def test_waits_can_be_left_out() -> None:
    trace = [Allocation(1, A, 8), writes(A, 1), EventRecord(A, 7), StreamWait(B, 7, "why"), reads(B, 1)]
    assert [v.kind for v in find_violations(trace, lambda index, wait: wait.why != "why")] == [Kind.RACE]
    assert not list(find_violations(trace, lambda index, wait: index != 4))


def test_a_violation_says_what_was_unordered() -> None:
    trace = [Allocation(1, A, 8), writes(A, 1), reads(B, 1)]
    (violation,) = find_violations(trace)
    assert violation.describe(trace) == "race: #2 read on stream 1 after #1 write on stream 0, unordered (block 1)"


# ---- memory ----------------------------------------------------------------------------------------------


def test_memory_is_handed_on_after_its_last_use_only() -> None:
    before = [Allocation(1, A, 8), writes(A, 1), EventRecord(A, 1), StreamWait(B, 1), reads(B, 1), EventRecord(B, 2)]
    freed, wait, again = Release(1), StreamWait(A, 2), Allocation(2, A, 8)
    assert kinds(*before, freed, again, writes(A, 2)) == [Kind.REUSE]
    assert kinds(*before, wait, freed, again, writes(A, 2)) == []
    assert kinds(*before, freed, wait, again, writes(A, 2)) == []
    assert kinds(*before, freed, again, wait, writes(A, 2)) == []
    assert kinds(*before, freed, again, writes(A, 2), wait) == [Kind.REUSE]


def test_memory_stays_with_the_stream_it_was_allocated_on() -> None:
    before = [Allocation(1, A, 8), writes(B, 1), Release(1)]
    assert kinds(*before, Allocation(2, B, 8), writes(C, 2)) == []
    assert kinds(*before, Allocation(2, A, 8), writes(B, 2)) == []
    assert kinds(*before, Allocation(2, A, 8), writes(A, 2)) == [Kind.REUSE]
    assert kinds(*before, Allocation(2, A, 8), writes(C, 2)) == [Kind.REUSE]


def test_what_is_freed_later_is_not_handed_on() -> None:
    assert kinds(Allocation(1, A, 8), writes(B, 1), Allocation(2, A, 8), Release(1), writes(A, 2)) == []


def test_memory_is_remembered_until_it_is_safe() -> None:
    """The allocator may keep it for any later allocation, not only the next."""
    before = [Allocation(1, A, 8), writes(B, 1), Release(1), Allocation(2, A, 8), Release(2)]
    assert kinds(*before, Allocation(3, A, 8), writes(A, 3)) == [Kind.REUSE]


def test_memory_is_written_before_it_is_read() -> None:
    assert kinds(Allocation(1, A, 16), reads(A, 1)) == [Kind.UNWRITTEN]
    assert kinds(Allocation(1, A, 16), writes(A, 1, 8, 16), reads(A, 1, 0, 8)) == [Kind.UNWRITTEN]
    assert kinds(Allocation(1, A, 16), writes(A, 1, 0, 8), reads(A, 1, 0, 16)) == []
    assert kinds(Allocation(1, A, 16, written=True), reads(A, 1)) == []
    update = Operation(A, "update", (Access(1, 0, 8, reads=True, writes=True),))
    assert kinds(Allocation(1, A, 16), update) == [Kind.UNWRITTEN]


def test_overlap_is_the_absence_of_order() -> None:
    trace = [writes(A, 1), writes(B, 1), EventRecord(A, 1), StreamWait(B, 1), writes(B, 1), Mark("end")]
    order = Order(trace)
    assert order.concurrent(0, 1) and not order.before(0, 1)
    assert order.before(0, 4) and order.before(1, 4) and not order.before(4, 0) and not order.concurrent(0, 4)


# ---- the host ----------------------------------------------------------------------------------------------


def test_what_the_host_has_done_is_over() -> None:
    block = Allocation(1, HOST, 8)
    assert kinds(block, writes(HOST, 1), reads(A, 1), reads(B, 1)) == []
    assert kinds(Allocation(1, HOST, 8, written=True), reads(HOST, 1), writes(A, 1)) == []


def test_the_host_reads_what_the_device_writes_after_waiting_only() -> None:
    block = Allocation(1, HOST, 8)
    assert kinds(block, writes(A, 1), reads(HOST, 1)) == [Kind.RACE]
    assert kinds(block, writes(A, 1), EventRecord(A, 7), StreamWait(HOST, 7), reads(HOST, 1)) == []
    assert kinds(block, EventRecord(A, 7), writes(A, 1), StreamWait(HOST, 7), reads(HOST, 1)) == [Kind.RACE]
    assert kinds(Allocation(1, HOST, 8, written=True), reads(A, 1), writes(HOST, 1)) == [Kind.RACE]


def test_a_wait_of_the_host_orders_no_stream() -> None:
    trace = [Allocation(1, A, 8), writes(A, 1), EventRecord(A, 7), StreamWait(HOST, 7)]
    assert kinds(*trace, reads(B, 1)) == [Kind.RACE]
    assert kinds(*trace, Allocation(2, HOST, 8), writes(HOST, 2), reads(B, 1)) == [Kind.RACE]


def test_memory_of_the_host_is_handed_on_when_it_is_safe() -> None:
    assert kinds(Allocation(1, HOST, 8), writes(A, 1), Release(1), Allocation(2, HOST, 8), writes(HOST, 2)) == []


# ---- the recorder ------------------------------------------------------------------------------------------


def operations(recorder: Recorder) -> list[tuple[str, list[tuple[int, bool, bool]]]]:
    """Every operation's name, with its accesses as (bytes, reads, writes)."""
    return [
        (event.name, [(access.stop - access.start, access.reads, access.writes) for access in event.accesses])
        for event in recorder.trace
        if isinstance(event, Operation)
    ]


def test_operations_read_their_inputs_and_write_their_results() -> None:
    ones = torch.ones(4)
    with recording() as recorder:
        double = ones + ones
        double.mul_(ones)
        torch.add(ones, ones, out=double)
        double.copy_(ones)
        double[1:3].zero_()
    read, written = (16, True, False), (16, False, True)
    assert operations(recorder) == [
        ("aten.add", [read, written]),
        ("aten.mul_", [(16, True, True), read]),
        ("aten.add", [read, written]),
        ("aten.copy_", [read, written]),
        ("aten.zero_", [(8, False, True)]),
    ]


def test_views_and_allocations_are_no_accesses() -> None:
    with recording() as recorder:
        flat = torch.empty(6)
        flat.view(2, 3).t().detach()[0].expand(4, 2)
        torch.empty(0).set_(flat.untyped_storage(), 2, (4,), (1,))
    assert operations(recorder) == []
    assert [event.nbytes for event in recorder.trace if isinstance(event, Allocation)] == [24]


def test_tensors_on_slices_of_a_storage_share_its_memory() -> None:
    with recording() as recorder:
        flat = torch.empty(8)
        part = torch.empty(0).set_(flat.untyped_storage()[8:24], 0, (4,), (1,))
        part.zero_()
        del flat
        part.add_(1.0)
        del part
        torch.ones(1)
    blocks = {access.block for event in recorder.trace if isinstance(event, Operation) for access in event.accesses}
    assert len(blocks) == 2  # one for flat and part, one for the last
    zero = next(event for event in recorder.trace if isinstance(event, Operation))
    assert [(access.start, access.stop) for access in zero.accesses] == [(8, 24)]
    assert [type(event).__name__ for event in recorder.trace[-3:]] == ["Release", "Allocation", "Operation"]


def test_resized_storages_get_fresh_memory() -> None:
    with recording() as recorder:
        buffer = torch.zeros(4)
        buffer.untyped_storage().resize_(0)
        buffer.untyped_storage().resize_(16)
        buffer.add_(1.0)
    first, second = (event for event in recorder.trace if isinstance(event, Allocation))
    assert first.storage == second.storage and first.block != second.block
    assert [violation.kind for violation in find_violations(recorder.trace)] == [Kind.UNWRITTEN]


def test_a_program_on_two_streams_needs_its_waits() -> None:
    def program(*, waits: bool) -> list[Kind]:
        with recording() as recorder:
            device = RecordingDevice(recorder)
            side = device.new_stream()
            source = torch.ones(4)
            ready = device.record(device.current_stream())
            with device.use(side):
                if waits:
                    device.wait(side, ready, "source is written")
                result = source * 2
                copied = device.record(side)
            if waits:
                device.wait(COMPUTE, copied, "source is read, result is written")
            result.add_(1.0)
            del source
            torch.ones(4)
        return [violation.kind for violation in find_violations(recorder.trace)]

    assert program(waits=True) == []
    assert program(waits=False) == [Kind.RACE, Kind.RACE, Kind.REUSE]


def test_what_is_computed_from_memory_of_the_host_alone_is_the_hosts() -> None:
    ones = torch.ones(4)
    with recording() as recorder:
        with recorder.on_host():
            home = torch.zeros(4)
        with RecordingDevice(recorder).use(5):
            (home[1:] * 2).add_(1.0)
            ones * 2
            home.copy_(ones, non_blocking=True)
    streams = [event.stream for event in recorder.trace if isinstance(event, Operation)]
    assert streams == [HOST, HOST, HOST, 5, 5]
    assert [event.stream for event in recorder.trace if isinstance(event, Allocation)] == [HOST, HOST, 5, 5]


def test_a_copy_to_the_host_is_waited_for_by_itself_or_by_the_host() -> None:
    def program(*, asynchronous: bool, blocks: bool) -> tuple[list[Kind], list[object]]:
        with recording() as recorder:
            device, source = RecordingDevice(recorder), torch.ones(4)
            with recorder.on_host():
                home = torch.empty(4)
            home.copy_(source, non_blocking=asynchronous)
            if blocks:
                device.block_host(device.record(COMPUTE))
            home.add_(1.0)
        waits = [event.why for event in recorder.trace if isinstance(event, StreamWait)]
        return [violation.kind for violation in find_violations(recorder.trace)], waits

    assert program(asynchronous=False, blocks=False) == ([], [COPIED])
    assert program(asynchronous=True, blocks=True) == ([], [BLOCKED])
    assert program(asynchronous=True, blocks=False) == ([Kind.RACE], [])


def test_memory_of_both_places_meets_in_copies_only() -> None:
    with recording() as recorder:
        with recorder.on_host():
            home = torch.ones(4)
        with pytest.raises(AssertionError, match="on tensors of the host and of the device"):
            home + torch.ones(4)


def test_a_work_runs_beside_what_launched_it_until_it_is_waited_for() -> None:
    def program(*, waits: bool) -> tuple[list[Kind], list[object]]:
        with recording() as recorder:
            source, result = torch.ones(4), torch.empty(4)
            issue = with_recorded_works(recorder, lambda out, given, is_asynchronous: out.copy_(given))
            work = issue(result, source, True)
            assert work is not None
            if waits:
                work.wait()
            result.add_(1.0)
            assert issue(result, source, False) is None
        found = [event.why for event in recorder.trace if isinstance(event, StreamWait)]
        return [violation.kind for violation in find_violations(recorder.trace)], found

    assert program(waits=True) == ([], [LAUNCHED, WORKED])
    assert program(waits=False) == ([Kind.RACE] * 2, [LAUNCHED])
