"""The test harness: ranks (real and simulated), models, and the unsharded reference.

A test on every rank, against the reference:

    @multi_rank(2, 4)
    @pytest.mark.parametrize("case", MODEL_CASES, ids=str)
    def test_trains_like_unsharded(case: ModelCase, world_size: int) -> None:
        model = case.build()
        for unit in case.units(model):
            fully_shard(unit)
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        reference = Reference(case, world_size=world_size)
        assert_trains_like(reference, model, optimizer, steps=5, tolerance=tolerance_for(world_size))

Where to look: `multi_rank` (the decorator), `pool` and `worker` (the processes behind it), `messages` (what they
say), `report` (failures), `device` (ranks on one GPU), `fake` (simulated ranks), `models`, `reference`, `compare`,
`training`.
Folders: `shared` (what the tests of several folders share), `parity` (programs that run on torch's implementation too),
`recording` (steps on streams). What one folder of tests uses alone is `helpers` beside them: programs drawn from seeds
are in `tests/multi_rank/combinations/helpers`.
"""

from tests.harness.compare import (
    EXACT,
    Tolerance,
    assert_same,
    assert_sharded_same,
    full_gradients,
    full_parameters,
    tolerance_for,
)
from tests.harness.fake import FakeWorlds, fake_world
from tests.harness.models import MODEL_CASES, Batch, ModelCase
from tests.harness.multi_rank import multi_rank, others_full
from tests.harness.pool import WorkerPools
from tests.harness.reference import Accumulation, Reference, StepRecord, adamw
from tests.harness.report import RanksFailed
from tests.harness.state import use_native_collectives
from tests.harness.training import assert_trains_like

__all__ = [
    "EXACT",
    "MODEL_CASES",
    "Accumulation",
    "Batch",
    "FakeWorlds",
    "ModelCase",
    "RanksFailed",
    "Reference",
    "StepRecord",
    "Tolerance",
    "WorkerPools",
    "adamw",
    "assert_same",
    "assert_sharded_same",
    "assert_trains_like",
    "fake_world",
    "full_gradients",
    "full_parameters",
    "multi_rank",
    "others_full",
    "tolerance_for",
    "use_native_collectives",
]
