"""What a step costs that does not depend on load: Python calls, garbage, copies. docs/performance.md quotes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.counts import PythonCallCounter, StepCounts, count_step
from benchmarks.implementations import UNSHARDED, ShardingOptions, fake_process_group
from benchmarks.models import LARGE_PARAMETERS, ModelSpec, small_parameters
from benchmarks.optimizers import LOCAL, PLAIN, optimizer_of, parameters_of
from benchmarks.step import Phase, Trainer

CALLS_PER_GROUP = 350
WORLD_SIZE = 8


def counts_of(name: str, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> StepCounts:
    options = ShardingOptions(world_size=WORLD_SIZE, param_dtype=dtype)
    with fake_process_group(WORLD_SIZE) as mesh:
        trainer = Trainer(name, spec, mesh=mesh, options=options)
        trainer.warm_up(2)
        return count_step(trainer)


def calls(counts: StepCounts) -> float:
    return float(counts.calls[Phase.FORWARD] + counts.calls[Phase.BACKWARD])


@pytest.mark.parametrize("params", [1, 12, 36])
def test_calls_per_group_do_not_grow_with_its_parameters(params: int) -> None:
    """Forward and backward, built-in functions included, beyond what the unsharded model calls."""
    spec = small_parameters(blocks=8, params_per_block=params)
    sharded = counts_of("fsdp2", spec)
    over = calls(sharded) - calls(counts_of(UNSHARDED, spec))
    assert 0 < over / spec.groups <= CALLS_PER_GROUP
    assert params == 1 or over / spec.groups <= 252 + 8 * params
    assert sharded.garbage_objects == 0


def test_a_mesh_for_each_parameter_costs_nothing_in_a_step() -> None:
    spec = small_parameters(blocks=8, params_per_block=12)
    assert counts_of("fsdp2-own-mesh", spec).calls == counts_of("fsdp2", spec).calls


def test_even_large_parameters_are_not_copied() -> None:
    counts = counts_of("fsdp2", replace(LARGE_PARAMETERS, blocks=2))
    large = 2 * LARGE_PARAMETERS.params_per_block * LARGE_PARAMETERS.dim * LARGE_PARAMETERS.hidden_dim * 4
    assert counts.copied_bytes().total() < large / 10, "those of the root alone, which are small"


def test_mixed_precision_casts_shards_and_gradients_once() -> None:
    counts = counts_of("fsdp2", replace(LARGE_PARAMETERS, blocks=2), torch.bfloat16)
    spec = LARGE_PARAMETERS
    numel = 2 * spec.params_per_block * spec.dim * spec.hidden_dim + 2 * spec.dim * spec.dim
    cast_shards = 2 * 2 * numel / WORLD_SIZE  # in forward and in backward, to two bytes
    packed_gradients = 4 * numel
    assert counts.copied_bytes().total() <= 1.1 * (cast_shards + packed_gradients)


@pytest.mark.parametrize("fused", [False, True])
def test_a_local_optimizer_step_calls_what_the_plain_one_does(fused: bool) -> None:
    """Of those beyond, none is for each parameter."""
    calls: dict[str, int] = {}
    with fake_process_group(WORLD_SIZE) as mesh:
        parameters = parameters_of(small_parameters(blocks=8, params_per_block=12), mesh)
        for name in (PLAIN, LOCAL):
            step = optimizer_of(name, parameters[name], fused=fused).step
            for _ in range(2):
                step()
            counter = PythonCallCounter()
            with counter:
                step()
            calls[name] = counter.calls
    assert calls[LOCAL] <= calls[PLAIN] + 70 < calls[PLAIN] + len(parameters[LOCAL])
