"""`_set_unshard_async_op`: from which stream all-gathers are issued, which only a device with streams shows."""

from __future__ import annotations

import pytest

from tests.harness import fake_world
from tests.harness.happens_before import Operation, StreamWait
from tests.harness.recording.recorder import COMPUTE, LAUNCHED, recording
from tests.harness.recording.training import Training

GATHERS = ("c10d._allgather_base_", "c10d.allgather_into_tensor_coalesced_")


@pytest.mark.full
@pytest.mark.parametrize("enable", [True, False])
def test_gathers_are_issued_from_the_current_stream(enable: bool) -> None:
    """As asynchronous works of the process group, which the current stream waits for only where it needs them."""
    with fake_world(4, 1), recording() as recorder:
        training = Training.of_stack(recorder)
        training.model._set_unshard_async_op(enable)
        training.steps(2)
    gathers = [each.stream for each in recorder.trace if isinstance(each, Operation) and each.name in GATHERS]
    works = [each for each in recorder.trace if isinstance(each, StreamWait) and each.why == LAUNCHED]
    assert gathers and COMPUTE not in gathers
    assert {stream == recorder.works_stream for stream in gathers} == {enable}
    assert len(works) == (len(gathers) if enable else 0)
