"""Streams, waits and lifetimes, without a GPU: recorded training steps go through a happens-before checker.

What is recorded and how, see `tests.harness.recording`; what is checked, see `tests.harness.happens_before`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from unittest import mock

import pytest

import fsdp2.root
from fsdp2.buffers import DtypeBuffers
from fsdp2.comm_context import Wait
from fsdp2.gradients import DtypeGradients, PackedGradients
from fsdp2.param_group import FSDPParamGroup
from tests.harness import fake_world
from tests.harness.happens_before import (
    Allocation,
    EventRecord,
    Kind,
    Operation,
    Order,
    StreamWait,
    Violation,
    find_violations,
)
from tests.harness.recording import COMPUTE, recording
from tests.harness.recording_passes import Passes, gathers_ahead, reduces_overlap
from tests.harness.recording_scenarios import SCENARIOS, Recording, record
from tests.harness.recording_sites import SEAM, Site, device_waits, functions, method_calls, sources, wait_sites
from tests.harness.recording_training import BACKWARD, FORWARD, ROOT, UPDATE, Training, gradients_of


def report(recorded: Recording, violations: Sequence[Violation]) -> str:
    """The first violations, for a message."""
    return "\n".join(violation.describe(recorded.trace) for violation in violations[:10])


# ---- no race, no early reuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_every_access_follows_what_it_must(scenario: str) -> None:
    recorded = record(scenario)
    violations = list(find_violations(recorded.trace))
    assert not violations, report(recorded, violations)


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (64, 63)])
@pytest.mark.parametrize("scenario", ["plain", "uneven_mlp", "accumulated_reduced"])
def test_whatever_the_rank_holds(scenario: str, world_size: int, rank: int) -> None:
    recorded = record(scenario, world_size=world_size, rank=rank)
    violations = list(find_violations(recorded.trace))
    assert not violations, report(recorded, violations)


def test_recording_disturbs_nothing() -> None:
    """The engine reuses its gradient buffers only if nobody else holds them: a recorder that does would show here."""
    recorded = record("plain")
    storages: dict[str, set[int]] = {}
    for event in recorded.trace:
        if isinstance(event, Allocation) and event.block in recorded.names:
            storages.setdefault(recorded.names[event.block], set()).add(event.storage)
    groups = [ROOT, "blocks.0", "blocks.1", "blocks.2"]
    assert {name: len(found) for name, found in storages.items()} == dict.fromkeys(
        [*groups, *map(gradients_of, groups)], 1
    )


@pytest.mark.parametrize("scenario", ["transformer", "plain", "direct", "checkpointed_blocks", "two_dtypes"])
def test_forward_and_backward_never_make_the_host_wait(scenario: str) -> None:
    found = [event.name for _, event in Passes(record(scenario)).operations(FORWARD, UPDATE)]
    assert found and not {"aten._local_scalar_dense", "aten.nonzero", "aten.item"}.intersection(found)


# ---- every wait is needed --------------------------------------------------------------------------------------


def breaks(recorded: Recording, keep: Callable[[int, StreamWait], bool]) -> bool:
    """Whether there are more violations with only the waits that ``keep`` accepts."""
    present = violations_of(recorded)
    return any(violation not in present for violation in find_violations(recorded.trace, keep))


@cache
def violations_of(recorded: Recording) -> frozenset[Violation]:
    """Those with all waits."""
    return frozenset(find_violations(recorded.trace))


def waits(recorded: Recording) -> Iterator[tuple[int, StreamWait]]:
    """The recorded waits and their indices in the trace."""
    return ((index, event) for index, event in enumerate(recorded.trace) if isinstance(event, StreamWait))


@pytest.mark.parametrize("why", list(Wait), ids=lambda why: why.name)
def test_no_reason_to_wait_can_be_dropped(why: Wait) -> None:
    assert any(breaks(record(name), lambda index, wait: wait.why is not why) for name in SCENARIOS)


@pytest.mark.parametrize("site", wait_sites(), ids=str)
def test_no_call_that_waits_can_be_removed(site: Site) -> None:
    def is_here(wait: StreamWait) -> bool:
        return any(map(site.is_at, wait.sites[:1]))

    occurs = [name for name in SCENARIOS if any(is_here(wait) for _, wait in waits(record(name)))]
    assert occurs, f"no scenario comes to {site} (line {site.lines.start}): add one"
    assert any(breaks(record(name), lambda index, wait: not is_here(wait)) for name in occurs), (
        f"{site} (line {site.lines.start}) can be removed without a race in {occurs}"
    )


@pytest.mark.parametrize(
    "scenario",
    ["transformer", "plain", "direct", "root_resharded", "never_resharded", "checkpointed_blocks", "used_twice"],
)
def test_no_single_wait_can_be_dropped(scenario: str) -> None:
    """One at a time; but for those that are followed, before anything depends on them, by one for the same stream."""
    recorded = record(scenario)
    needed = []
    for dropped, _ in waits(recorded):
        needed.append(breaks(recorded, lambda index, wait, dropped=dropped: index != dropped))  # type: ignore[misc]
        assert needed[-1] or is_superseded(recorded, dropped), recorded.trace[dropped]
    assert sum(needed) > len(needed) / 2


def is_superseded(recorded: Recording, index: int) -> bool:
    """Whether the waiting stream does nothing before it waits for the same stream again (or the trace ends)."""
    trace = recorded.trace
    recorded_on = {event.event: event.stream for event in trace if isinstance(event, EventRecord)}
    wait = trace[index]
    assert isinstance(wait, StreamWait)
    for event in trace[index + 1 :]:
        if isinstance(event, Operation) and event.stream == wait.stream:
            return False
        again = isinstance(event, StreamWait) and event.stream == wait.stream
        if again and recorded_on[event.event] == recorded_on[wait.event]:
            return True
    return True


def test_every_wait_gives_its_reason() -> None:
    used = set()
    for file, tree in sources().items():
        for function in functions(tree):
            annotations = {each.arg: ast.unparse(each.annotation) for each in function.args.args if each.annotation}
            for call in device_waits(function):
                why = call.args[2] if len(call.args) == 3 else call.keywords[-1].value
                passed_on = isinstance(why, ast.Name) and annotations.get(why.id) == "Wait"
                assert passed_on or ast.unparse(why).removeprefix("Wait.") in Wait.__members__, f"{file}:{call.lineno}"
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_wait(node.value)}
    assert used == set(Wait.__members__)


def _is_wait(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "Wait"


def test_streams_are_reached_through_the_device_only() -> None:
    bypasses = {"wait_event", "wait_stream", "record_stream", "record_event", "synchronize"}
    found = {(file, name) for file, tree in sources().items() for name, _ in method_calls(tree) if name in bypasses}
    assert found == {(SEAM, "wait_event"), (SEAM, "record_event")}


# ---- lifetimes: what the waits alone do not guarantee -----------------------------------------------------------


def test_gradients_must_be_held_until_compute_has_waited() -> None:
    pack = DtypeGradients.pack

    def forgetful(self: DtypeGradients, gradients: list) -> PackedGradients:  # type: ignore[type-arg]
        packed = pack(self, gradients)
        packed.inputs = []
        return packed

    with mock.patch.object(DtypeGradients, "pack", forgetful), fake_world(4, 1), recording() as recorder:
        Training.of_stack(recorder).steps(3)
    assert {violation.kind for violation in find_violations(recorder.trace)} == {Kind.REUSE}


def test_unsharded_buffers_must_be_allocated_on_the_stream_that_gathers() -> None:
    with fake_world(4, 1), recording() as recorder:
        allocate = DtypeBuffers.allocate

        def misplaced(self: DtypeBuffers) -> None:
            gathering, recorder.stream = recorder.stream, COMPUTE
            allocate(self)
            recorder.stream = gathering

        with mock.patch.object(DtypeBuffers, "allocate", misplaced):
            Training.of_stack(recorder).steps(3)
    assert {violation.kind for violation in find_violations(recorder.trace)} == {Kind.REUSE}


# ---- order and overlap -------------------------------------------------------------------------------------------


ORDERED = ["transformer", "plain", "direct", "two_dtypes", "root_resharded", "checkpointed_layers"]


@pytest.mark.parametrize("scenario", ORDERED)
@pytest.mark.parametrize(("begin", "end"), [(FORWARD, BACKWARD), (BACKWARD, UPDATE)])
def test_the_next_gather_overlaps_the_current_compute(scenario: str, begin: str, end: str) -> None:
    assert gathers_ahead(record(scenario), begin, end)


@pytest.mark.parametrize("scenario", ORDERED)
def test_reductions_overlap_the_next_backward(scenario: str) -> None:
    assert reduces_overlap(record(scenario))


def test_overlap_is_seen_to_be_lost() -> None:
    """The two checks above, on an engine without overlap."""
    reduce = FSDPParamGroup.reduce

    def impatient(self: FSDPParamGroup) -> None:
        reduce(self)
        self.comm.retire_reduces(0)  # type: ignore[union-attr]

    with (
        mock.patch.object(fsdp2.root, "PREFETCH_DEPTH", 0),
        mock.patch.object(FSDPParamGroup, "reduce", impatient),
        fake_world(4, 1),
        recording() as recorder,
    ):
        Training.of_stack(recorder).steps()
    recorded = Recording(tuple(recorder.trace), recorder.blocks_named())
    assert not gathers_ahead(recorded, FORWARD, BACKWARD)
    assert not gathers_ahead(recorded, BACKWARD, UPDATE)
    assert not reduces_overlap(recorded)


UNBOUNDED = {
    "accumulated_without_reshard",
    "block_called_alone",
    "never_resharded",
    "one_group_for_both_ends",
    "two_roots",
    "unsharded_by_hand",
}
"""In these, the user, the policy or the structure of the model keeps more groups unsharded."""


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in UNBOUNDED])
def test_two_groups_are_unsharded_at_a_time_on_the_device(scenario: str) -> None:
    recorded = record(scenario)
    order = Order(recorded.trace)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, event in enumerate(recorded.trace):
        if isinstance(event, Operation):
            for access in event.accesses:
                first.setdefault(access.block, index)
                last[access.block] = index
    groups = {block: name for block, name in recorded.names.items() if name != ROOT and "gradients" not in name}
    unsharded = [
        event.block
        for event in recorded.trace
        if isinstance(event, Allocation) and event.block in first and event.block in groups
    ]
    for position, block in enumerate(unsharded):
        beside = {groups[each] for each in unsharded[:position] if not order.before(last[each], first[block])}
        assert len(beside | {groups[block]}) <= 2
