"""Order and overlap, without a GPU: what may run beside what, and how much is unsharded at a time.

Read from recorded training steps, see `tests.fake_pg.helpers.passes`.
"""

from __future__ import annotations

from unittest import mock

import pytest

import fsdp2.core.prefetch
from fsdp2.core.group import FSDPParamGroup
from tests.fake_pg.helpers.passes import Passes, gathers_ahead, reduces_overlap
from tests.harness import fake_world, others_full
from tests.harness.recording.recorder import recording
from tests.harness.recording.scenarios import Recording, record
from tests.harness.recording.training import BACKWARD, FORWARD, UPDATE, Training

ORDERED = [
    "transformer", "plain", "direct", "two_dtypes", "root_resharded", "checkpointed_layers",
    "replicated", "replicated_direct", "replicated_in_half", "two_meshes", "tensor_parallel",
    "resharded_to_neighbours", "resharded_to_neighbours_on_replicas", "half", "half_direct", "half_in_part",
    "hooked", "hooked_on_its_own_stream", "hooked_replicas", "post_optim_event", "offloaded", "offloaded_replicas",
]  # fmt: skip


ONE_AFTER_THE_OTHER = {"two_meshes"}
"""One reduction may be in flight, and a unit of two groups has two."""


SHORT = {"plain", "half_in_part", "replicated_in_half", "tensor_parallel", "resharded_to_neighbours"} | {
    "hooked_on_its_own_stream",
    "post_optim_event",
    "offloaded",
}


@pytest.mark.parametrize("scenario", others_full(ORDERED, SHORT))
def test_communication_overlaps_compute(scenario: str) -> None:
    """The next gather the current compute, in both directions; reductions the next backward."""
    recorded = record(scenario)
    assert gathers_ahead(recorded, FORWARD, BACKWARD) and gathers_ahead(recorded, BACKWARD, UPDATE)
    assert scenario in ONE_AFTER_THE_OTHER or reduces_overlap(recorded)


def test_where_one_rank_has_all_nothing_is_gathered() -> None:
    recorded = record("only_replicated")
    passes = Passes(recorded)
    for begin, end in ((FORWARD, BACKWARD), (BACKWARD, UPDATE)):
        assert passes.compute(begin, end) and not passes.gathers(begin, end)
    assert reduces_overlap(recorded)


def test_overlap_is_seen_to_be_lost() -> None:
    """The two checks above, on an engine without overlap."""
    reduce = FSDPParamGroup.reduce_or_keep

    def impatient(self: FSDPParamGroup) -> bool:
        reduces = reduce(self)
        self.comm.finish_reduces()  # type: ignore[union-attr]
        return reduces

    with (
        mock.patch.object(fsdp2.core.prefetch, "PREFETCH_DEPTH", 0),
        mock.patch.object(FSDPParamGroup, "reduce_or_keep", impatient),
        fake_world(4, 1),
        recording() as recorder,
    ):
        Training.of_stack(recorder).steps()
    recorded = Recording(tuple(recorder.trace), recorder.blocks_named())
    assert not gathers_ahead(recorded, FORWARD, BACKWARD)
    assert not gathers_ahead(recorded, BACKWARD, UPDATE)
    assert not reduces_overlap(recorded)
