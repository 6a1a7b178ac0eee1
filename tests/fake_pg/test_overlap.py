"""Order and overlap, without a GPU: what may run beside what, and how much is unsharded at a time.

Read from recorded training steps, see `tests.fake_pg.helpers.passes`.
"""

from __future__ import annotations

from unittest import mock

import pytest

import fsdp2.core.root
from fsdp2.core.group import FSDPParamGroup
from tests.fake_pg.helpers.passes import Passes, gathers_ahead, reduces_overlap
from tests.harness import fake_world, others_full
from tests.harness.happens_before import Allocation, Operation, Order
from tests.harness.recording.recorder import recording
from tests.harness.recording.scenarios import SCENARIOS, Recording, record
from tests.harness.recording.training import BACKWARD, FORWARD, ROOT, UPDATE, Training

ORDERED = [
    "transformer", "plain", "direct", "two_dtypes", "root_resharded", "checkpointed_layers",
    "replicated", "replicated_direct", "replicated_in_half", "two_meshes", "tensor_parallel",
    "resharded_to_neighbours", "resharded_to_neighbours_on_replicas", "half", "half_direct", "half_in_part",
    "hooked", "hooked_on_its_own_stream", "hooked_replicas", "post_optim_event", "offloaded", "offloaded_replicas",
]  # fmt: skip


ONE_AFTER_THE_OTHER = {"two_meshes"}
"""One reduction may be in flight, and a unit of two groups has two."""


@pytest.mark.parametrize("scenario", ORDERED)
@pytest.mark.parametrize(("begin", "end"), [(FORWARD, BACKWARD), (BACKWARD, UPDATE)])
def test_the_next_gather_overlaps_the_current_compute(scenario: str, begin: str, end: str) -> None:
    assert gathers_ahead(record(scenario), begin, end)


@pytest.mark.parametrize(("begin", "end"), [(FORWARD, BACKWARD), (BACKWARD, UPDATE)])
def test_where_one_rank_has_all_nothing_is_gathered(begin: str, end: str) -> None:
    passes = Passes(record("only_replicated"))
    assert passes.compute(begin, end) and not passes.gathers(begin, end)


@pytest.mark.parametrize(
    "scenario", [*(name for name in ORDERED if name not in ONE_AFTER_THE_OTHER), "only_replicated"]
)
def test_reductions_overlap_the_next_backward(scenario: str) -> None:
    assert reduces_overlap(record(scenario))


def test_overlap_is_seen_to_be_lost() -> None:
    """The two checks above, on an engine without overlap."""
    reduce = FSDPParamGroup.reduce

    def impatient(self: FSDPParamGroup) -> None:
        reduce(self)
        self.comm.finish_reduces()  # type: ignore[union-attr]

    with (
        mock.patch.object(fsdp2.core.root, "PREFETCH_DEPTH", 0),
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
    "extensions_on_neighbours",
    "gathered_by_extensions",
    "gathered_far_ahead",
    "neighbours_fail",
    "neighbours_interrupted",
    "never_resharded",
    "one_group_for_both_ends",
    "storage_kept",
    "storage_kept_by_neighbours",
    "trained_inside",  # the next forward of the method is expected, and gathered for, before a backward inside of it
    "two_roots",
    "unsharded_by_hand",
    "custom_collectives",  # by hand too, as are the next
    "custom_collectives_on_neighbours",
    "memory_of_the_process_group",
    "only_replicated",  # parameters are read where the shards lie, which stays, as are the next
    "only_replicated_updated_elsewhere",
}
"""In these, the user, the policy or the structure of the model keeps more groups unsharded."""


BOUNDED = [name for name in SCENARIOS if name not in UNBOUNDED]


@pytest.mark.parametrize("scenario", others_full(BOUNDED, BOUNDED[::3]))  # 25 s
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
