"""What a step under the wrapper costs, in figures that no load changes, beside `fully_shard` and torch's FSDP1."""

from __future__ import annotations

import functools
import warnings

import pytest

from benchmarks.counts import StepCounts, count_step
from benchmarks.host_time import FORWARD_AND_BACKWARD
from benchmarks.implementations import ShardingOptions, fake_process_group
from benchmarks.models import LARGE_PARAMETERS, SMALL_PARAMETERS
from benchmarks.step import Phase, Trainer

SPECS = {spec.name: spec for spec in (SMALL_PARAMETERS, LARGE_PARAMETERS)}


@functools.cache
def counts_of(model: str) -> dict[str, StepCounts]:
    found = {}
    with warnings.catch_warnings(), fake_process_group(8) as mesh:
        warnings.simplefilter("ignore")  # torch's, about its own FSDP1
        for name in ("fsdp1-flat", "fsdp1", "fsdp2", "wrapper"):
            trainer = Trainer(name, SPECS[model], mesh=mesh, options=ShardingOptions(world_size=8))
            trainer.warm_up(3)
            found[name] = count_step(trainer)
    return found


@pytest.mark.parametrize("model", SPECS)
def test_a_step(model: str) -> None:
    counts = counts_of(model)
    calls = {name: sum(each.calls[phase] for phase in FORWARD_AND_BACKWARD) for name, each in counts.items()}
    assert calls["wrapper"] <= 1.03 * calls["fsdp2"], "the wrapper itself"
    assert calls["wrapper"] <= 0.4 * calls["fsdp1-flat"] and calls["wrapper"] <= 0.3 * calls["fsdp1"]
    assert counts["wrapper"].collectives() == counts["fsdp2"].collectives()
    assert counts["wrapper"].copied_bytes() == counts["fsdp2"].copied_bytes()
    if model == LARGE_PARAMETERS.name:
        assert counts["wrapper"].copied_bytes().total() <= 0.001 * counts["fsdp1-flat"].copied_bytes().total()
    assert counts["wrapper"].garbage_objects == 0


@pytest.mark.parametrize("model", SPECS)
def test_clipping_works_on_whole_buffers(model: str) -> None:
    counts = counts_of(model)
    operations = {name: each.operations[Phase.CLIP].operations for name, each in counts.items()}
    assert operations["wrapper"] <= 25 and operations["wrapper"] <= operations["fsdp1-flat"]
    if model == SMALL_PARAMETERS.name:
        assert counts["wrapper"].calls[Phase.CLIP] <= 0.8 * counts["fsdp1-flat"].calls[Phase.CLIP]
