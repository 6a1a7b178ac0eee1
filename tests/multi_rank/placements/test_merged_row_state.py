"""State dicts and checkpoints of rows of merged dims: a rank's rows are several boxes of the whole, or none."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

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
from torch.distributed.tensor import DTensor

from fsdp2 import broadcast_parameters, full_parameters, fully_shard
from fsdp2.checkpoint import (
    iter_full_parameters,
    load,
    load_full,
    load_safetensors,
    save,
    save_safetensors,
)
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import SUM_ORDER, assert_same
from tests.harness.compare import full_parameters as gathered
from tests.harness.pool import WorkerPools
from tests.multi_rank.placements.helpers.merged_rows import MIXTURE, sharded, train, trained

STEPS = 2


def plainly_sharded(seed: int = 0) -> Any:
    model = MIXTURE.build(seed)
    for unit in MIXTURE.units(model):
        fully_shard(unit)
    return model


def expected_parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in MIXTURE.build(seed).named_parameters()}


@multi_rank(2, 4)
def test_state_dicts_go_out_and_come_back(world_size: int) -> None:
    model, file = sharded(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    states = (model.state_dict(), torch.load(file, weights_only=True), plainly_sharded().state_dict())
    for state in (*states, MIXTURE.build().state_dict()):
        other = sharded(MIXTURE.build(seed=1))
        other.load_state_dict(state)
        assert_same("parameters", gathered(other), expected_parameters())
    assigned = sharded(MIXTURE.build(seed=1))
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    train(assigned)
    plain = plainly_sharded(1)
    plain.load_state_dict(model.state_dict())
    assert_same("parameters", gathered(plain), expected_parameters())


@multi_rank(2, 4)
def test_full_state_dicts(world_size: int) -> None:
    model = sharded()
    optimizer = adamw(trained(model))
    reference = Reference(MIXTURE, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=STEPS, tolerance=tolerance_for(world_size))
    full, full_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert not any(isinstance(value, DTensor) for value in full.values())
    assert_same("full state", full, reference.model.state_dict(), tolerance=SUM_ORDER)
    names = dict(reference.model.named_parameters())
    for name, state in full_optimizer["state"].items():
        expected = reference.optimizer.state[names[name]]["exp_avg"]
        torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-5, atol=1e-6)
    on_first = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert_same("on rank 0", on_first, full)


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
    optimizer = adamw(trained(model))
    MIXTURE.loss(model, MIXTURE.batch(0, 0, dist.get_rank())).backward()
    optimizer.step()
    save(tmp_path / "own", model, optimizer)
    save_safetensors(model, tmp_path / "tensors")
    for make in (lambda: sharded(MIXTURE.build(seed=1)), lambda: plainly_sharded(1)):
        other = make()
        other_optimizer = adamw(trained(other))
        load(tmp_path / "own", other, other_optimizer)
        assert_same("loaded", gathered(other), gathered(model))
        for one, two in zip(trained(model), trained(other), strict=True):
            ours, theirs = (each.state[p]["exp_avg"] for each, p in ((optimizer, one), (other_optimizer, two)))
            assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        other = make()
        load_safetensors(other, tmp_path / "tensors")
        assert_same("loaded", gathered(other), gathered(model))


# ---- torch's distributed checkpoints, saved on four ranks ----------------------------------------


def save_by_torch(folder: Path) -> None:
    model = sharded()
    optimizer = adamw(trained(model))
    reference = Reference(MIXTURE, world_size=4)
    assert_trains_like(reference, model, optimizer, steps=STEPS, tolerance=SUM_ORDER)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "sharded")
    if dist.get_rank() == 0:
        torch.save((reference.model.state_dict(), reference.optimizer.state_dict()), folder / "reference.pt")


def load_by_torch(folder: Path, merges: bool) -> None:
    model: Any = sharded(MIXTURE.build(seed=1)) if merges else plainly_sharded(1)
    optimizer = adamw(trained(model))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "sharded")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    reference = Reference(MIXTURE, world_size=dist.get_world_size())
    plain, plain_optimizer = torch.load(folder / "reference.pt", weights_only=False)
    assert_same("loaded", gathered(model), plain, tolerance=SUM_ORDER)
    reference.model.load_state_dict(plain)
    reference.optimizer.load_state_dict(plain_optimizer)
    reference.steps_done = STEPS
    record = reference.step()
    MIXTURE.loss(model, MIXTURE.batch(0, record.step, dist.get_rank())).backward()
    optimizer.step()
    assert_same("parameters", gathered(model), record.parameters, tolerance=SUM_ORDER)
    state = {"model": {name: torch.zeros_like(value) for name, value in MIXTURE.build(seed=2).state_dict().items()}}
    dcp.load(state, checkpoint_id=folder / "sharded")
    assert_same("as plain tensors", state["model"], plain, tolerance=SUM_ORDER)


@pytest.mark.parametrize("world_size", [2, 4])
def test_distributed_checkpoints_fit_any_ranks(world_size: int, pools: WorkerPools, tmp_path: Path) -> None:
    pools[4].run(save_by_torch, tmp_path)
    for merges in (True, False):
        pools[world_size].run(load_by_torch, tmp_path, merges)
