"""Rows of merged dims, by the functions and in the files of this package; torch's are in `test_row_block_state.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import broadcast_parameters, full_parameters, fully_shard
from fsdp2.checkpoint import (
    iter_full_parameters,
    load,
    load_full,
    load_safetensors,
    save,
    save_safetensors,
)
from tests.harness import adamw, multi_rank
from tests.harness.compare import assert_same
from tests.harness.compare import full_parameters as gathered
from tests.harness.shared.training import trainable
from tests.multi_rank.placements.helpers.merged_rows import MIXTURE, sharded


def plainly_sharded(seed: int = 0) -> Any:
    model = MIXTURE.build(seed)
    for unit in MIXTURE.units(model):
        fully_shard(unit)
    return model


@multi_rank(2, 4)
def test_whole_weights_come_and_go(world_size: int) -> None:
    """By this package: from one rank, from every rank, from sharded state dicts, and out again."""
    rank, whole = dist.get_rank(), MIXTURE.build(seed=1).state_dict()
    for state, source in ((whole if rank == 0 else None, 0), (whole, "every rank")):
        model = sharded()
        load_full(model, state, source=source, budget_bytes=64)
        assert_same("loaded", gathered(model), whole)
    for given in (plainly_sharded(1), model):
        other = sharded()
        load_full(other, given.state_dict(), budget_bytes=64)
        assert_same("loaded", gathered(other), whole)
    plain = plainly_sharded()
    load_full(plain, model.state_dict(), budget_bytes=64)
    assert_same("loaded", gathered(plain), whole)
    for budget in (64, 1 << 20):
        found = {name: value.clone() for name, value in iter_full_parameters(model, budget_bytes=budget)}
        assert_same("iterated", found, whole)
    with full_parameters(model, writeback=True):
        assert_same("inside", dict(model.named_parameters()), whole)
        with torch.no_grad():
            model.experts.up.mul_(2)
    assert torch.equal(model.experts.up.full_tensor(), 2 * whole["experts.up"])
    with torch.no_grad():
        model.experts.up.div_(2)
    broadcast_parameters(model)
    assert_same("broadcast", gathered(model), whole)


@multi_rank(2, 4)
def test_files_of_this_package(tmp_path: Path, world_size: int) -> None:
    model = sharded()
    optimizer = adamw(trainable(model))
    MIXTURE.loss(model, MIXTURE.batch(0, 0, dist.get_rank())).backward()
    optimizer.step()
    save(tmp_path / "own", model, optimizer)
    save_safetensors(model, tmp_path / "tensors")
    for make in (lambda: sharded(MIXTURE.build(seed=1)), lambda: plainly_sharded(1)):
        other = make()
        other_optimizer = adamw(trainable(other))
        load(tmp_path / "own", other, other_optimizer)
        assert_same("loaded", gathered(other), gathered(model))
        for one, two in zip(trainable(model), trainable(other), strict=True):
            ours, theirs = (each.state[p]["exp_avg"] for each, p in ((optimizer, one), (other_optimizer, two)))
            assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        other = make()
        load_safetensors(other, tmp_path / "tensors")
        assert_same("loaded", gathered(other), gathered(model))
