"""What is alive at the peak of a forward and of a backward, beside torch's: storages, measured on the fake group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.torch_version import TorchVersion

from benchmarks.implementations import ShardingOptions, fake_process_group
from benchmarks.memory import StepMemory, measure_step_memory
from benchmarks.models import LARGE_PARAMETERS, ModelSpec
from benchmarks.step import Trainer
from tests.harness import others_full


def memory_of(name: str, world_size: int, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> StepMemory:
    with fake_process_group(world_size) as mesh:
        options = ShardingOptions(world_size=world_size, param_dtype=dtype)
        trainer = Trainer(name, spec, mesh=mesh, options=options)
        trainer.warm_up(2)
        return measure_step_memory(trainer)


@pytest.mark.parametrize(
    ("name", "world_size", "blocks"), [("fsdp2", 8, -0.01), ("fsdp2", 64, -0.01), ("fsdp2-no-prefetch", 64, 0.95)]
)
@pytest.mark.parametrize("matrices", others_full([2, 6], [2]))  # 12 s
def test_backward_holds_what_torchs_does(matrices: int, name: str, world_size: int, blocks: float) -> None:
    """And a block less if nothing is gathered ahead. In forward a block less; torch 2.15 has come down to ours."""
    spec = replace(LARGE_PARAMETERS, dim=1024, hidden_dim=1024, params_per_block=matrices)
    block = 4 * matrices * spec.dim * spec.hidden_dim
    ours, theirs = (memory_of(each, world_size, spec) for each in (name, "torch"))
    assert ours.backward_over <= theirs.backward_over - blocks * block
    is_lower = TorchVersion(torch.__version__) < "2.15"
    assert ours.forward_over <= theirs.forward_over - (0.95 * block if is_lower else 0)


@pytest.mark.parametrize(
    ("name", "world_size", "blocks"), [("fsdp2", 8, 0.85), ("fsdp2", 64, 0.95), ("fsdp2-no-prefetch", 64, 1.95)]
)
def test_gradients_go_one_by_one_when_they_are_cast(name: str, world_size: int, blocks: float) -> None:
    """Parameters in bf16, reduced in fp32: of a block's gradients both forms would be three blocks."""
    spec = replace(LARGE_PARAMETERS, dim=1024, hidden_dim=1024, params_per_block=2)
    block = 2 * 2 * spec.dim * spec.hidden_dim
    ours, theirs = (memory_of(each, world_size, spec, torch.bfloat16) for each in (name, "torch"))
    assert ours.backward_over <= theirs.backward_over - blocks * block
    # Slots lie at multiples of 16 bytes, and so do the rows of up to 64 ranks in two gathers (torch 2.15's do not).
    assert ours.forward_over <= theirs.forward_over + 2 * 64 * 32
