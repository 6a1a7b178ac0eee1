"""Owned parameters and their Muon's state in checkpoints: saved and loaded on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from tests.harness import Reference, multi_rank
from tests.harness.compare import assert_same, assert_sharded_same, parameters_of
from tests.harness.pool import WorkerPools
from tests.harness.shared.owned import NET, ORTHOGONALIZED, USED_NET, Both, muon_of, sharded
from tests.harness.shared.state_dicts import run_on
from tests.harness.shared.training import loss_on

BEFORE, AFTER = 2, 2


def reference_of(world_size: int) -> Reference:
    plain = USED_NET.build()
    return Reference(USED_NET, world_size=world_size, make_optimizer=muon_of(plain), model=plain)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], batches_of: int) -> None:
    """As if on ``batches_of`` ranks, whatever this world has: with all their batches on every rank."""
    for step in steps:
        (sum(loss_on(USED_NET, model, step, rank) for rank in range(batches_of)) / batches_of).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path) -> None:
    model = sharded(USED_NET)
    optimizer = Both(model)
    train(model, optimizer, range(BEFORE), 2)
    states = get_state_dict(model, optimizer.parts)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)


def load_and_train(folder: Path) -> None:
    model = sharded(USED_NET, USED_NET.build(seed=1))
    optimizer = Both(model)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer.parts), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer.parts, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(model, optimizer, range(BEFORE, BEFORE + AFTER), 2)
    records = reference_of(2).run(BEFORE + AFTER)
    assert_sharded_same("parameters", parameters_of(model), records[-1].parameters, tolerance=ORTHOGONALIZED)


@pytest.mark.full  # 7 s
@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (2, 4), (4, 2), (2, 1), (1, 2)])
def test_a_checkpoint_moves_to_other_owners(saving: int, loading: int, pools: WorkerPools, tmp_path: Path) -> None:
    for world_size, body in ((saving, save), (loading, load_and_train)):
        run_on(pools, world_size, _call, body, tmp_path)
        if (tmp_path / "store").exists():
            os.remove(tmp_path / "store")


def _call(body: Callable[[Path], None], folder: Path) -> None:
    """With the folder in the second place, where `run_on` expects it."""
    body(folder)


@pytest.mark.full
@multi_rank(2, 4)
def test_the_full_state_dict_is_the_plain_models(world_size: int) -> None:
    state = get_model_state_dict(sharded(), options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert_same("full state", state, NET.build().state_dict() if dist.get_rank() == 0 else {})
