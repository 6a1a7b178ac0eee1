"""State dicts and distributed checkpoints of shards that cut no block of rows, and of rows of merged dims.

A rank's rows of merged dims are several boxes of the whole, or none.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp2 import RaggedDTensor, fully_shard
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import SUM_ORDER, assert_same, full_parameters
from tests.harness.models import ModelCase
from tests.harness.pool import WorkerPools
from tests.harness.shared.training import trainable
from tests.multi_rank.placements.helpers import merged_rows, row_blocks
from tests.multi_rank.placements.helpers.row_blocks import BLOCKY

STEPS = 2

blocks = partial(row_blocks.sharded, 4)
KINDS: dict[str, tuple[ModelCase, Callable[..., Any]]] = {
    "row blocks": (BLOCKY, blocks),
    "merged rows": (merged_rows.MIXTURE, merged_rows.sharded),
}
BOTH = pytest.mark.parametrize("kind", KINDS)


def plainly_sharded(case: ModelCase, model: Any) -> Any:
    for unit in case.units(model):
        fully_shard(unit)
    return model


@multi_rank(2, 4)
@BOTH
def test_state_dicts_go_out_and_come_back(kind: str, world_size: int) -> None:
    case, shard = KINDS[kind]
    expected = {name: parameter.detach() for name, parameter in case.build().named_parameters()}
    model, file = shard(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    states = [model.state_dict(), torch.load(file, weights_only=True), case.build().state_dict()]
    states += [plainly_sharded(case, case.build()).state_dict(), row_blocks.sharded(5).state_dict()]
    for state in states if kind == "row blocks" else states[:-1]:
        other = shard(case.build(seed=1))
        other.load_state_dict(state)  # torch's refuses DTensors of other placements
        assert_same("parameters", full_parameters(other), expected)
    plain = plainly_sharded(case, case.build(seed=1))
    plain.load_state_dict(model.state_dict())
    assert_same("parameters", full_parameters(plain), expected)
    assigned = shard(case.build(seed=1))
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    reference = Reference(case, world_size=world_size)
    tolerance = tolerance_for(world_size)
    assert_trains_like(reference, assigned, adamw(trainable(assigned)), steps=2, tolerance=tolerance)


@pytest.mark.full
@multi_rank(2, 4)
@BOTH
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_full_state_dicts(cpu_offload: bool, kind: str, world_size: int) -> None:
    case, shard = KINDS[kind]
    model = shard()
    optimizer = adamw(trainable(model))
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=STEPS, tolerance=tolerance_for(world_size))
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    full, full_optimizer = get_state_dict(model, optimizer, options=options)
    plain = reference.model.state_dict()
    if dist.get_rank() == 0 or not cpu_offload:
        assert not any(isinstance(value, DTensor) for value in full.values())
        assert_same("full state", full, plain, tolerance=SUM_ORDER)
        names = dict(reference.model.named_parameters())
        for name, state in full_optimizer["state"].items():
            expected = reference.optimizer.state[names[name]]["exp_avg"]
            torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-5, atol=1e-6)
    by_hand = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert_same("by hand", by_hand, plain, tolerance=SUM_ORDER)


@pytest.mark.full
@multi_rank(2)
def test_full_state_dicts_are_not_dealt_out_by_torch() -> None:
    """`set_model_state_dict` asks torch's placements where shards lie; by hand it is one line."""
    full = BLOCKY.build(seed=1).state_dict()
    model = blocks()
    with pytest.raises(RuntimeError, match=r"unsupported placements RaggedShard"):
        set_model_state_dict(model, copy.deepcopy(full), options=StateDictOptions(full_state_dict=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError):
        set_model_state_dict(model, copy.deepcopy(full) if dist.get_rank() == 0 else {}, options=options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, RaggedDTensor):
                parameter.copy_(RaggedDTensor.from_whole(full[name], parameter.device_mesh, parameter.placements))
    found = full_parameters(model)
    assert_same(
        "ragged",
        {name: found[name] for name in ("parts.0.weight", "parts.2.bias")},
        {name: full[name] for name in ("parts.0.weight", "parts.2.bias")},
    )


# ---- distributed checkpoints, saved on four ranks ------------------------------------------------


def save(folder: Path, kind: str) -> None:
    case, shard = KINDS[kind]
    model = shard()
    optimizer = adamw(trainable(model))
    reference = Reference(case, world_size=4)
    assert_trains_like(reference, model, optimizer, steps=STEPS, tolerance=SUM_ORDER)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "sharded")
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "async").result()
    if dist.get_rank() == 0:
        torch.save((reference.model.state_dict(), reference.optimizer.state_dict()), folder / "reference.pt")


def load(folder: Path, kind: str, into: str) -> None:
    case, shard = KINDS[kind]
    shards = {"alike": shard, "plain": partial(plainly_sharded, case), "blocks of 64": partial(row_blocks.sharded, 64)}
    model = shards[into](case.build(seed=1))
    optimizer = adamw(trainable(model))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "sharded")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    reference = Reference(case, world_size=dist.get_world_size())
    plain, plain_optimizer = torch.load(folder / "reference.pt", weights_only=False)
    assert_same("loaded", full_parameters(model), plain, tolerance=SUM_ORDER)
    reference.model.load_state_dict(plain)
    reference.optimizer.load_state_dict(plain_optimizer)
    reference.steps_done = STEPS
    record = reference.step()
    case.loss(model, case.batch(0, record.step, dist.get_rank())).backward()
    optimizer.step()
    assert_same("parameters", full_parameters(model), record.parameters, tolerance=SUM_ORDER)
    state = {"model": {name: torch.zeros_like(value) for name, value in case.build(seed=2).state_dict().items()}}
    dcp.load(state, checkpoint_id=folder / "async")
    assert_same("saved in the background", state["model"], plain, tolerance=SUM_ORDER)


LOADED = [(kind, into) for kind in KINDS for into in ("alike", "plain")] + [("row blocks", "blocks of 64")]


@pytest.mark.parametrize(("kind", "into"), LOADED)
@pytest.mark.parametrize("world_size", [2, 4])
def test_distributed_checkpoints_fit_any_rows(
    world_size: int, kind: str, into: str, pools: WorkerPools, tmp_path: Path
) -> None:
    pools[4].run(save, tmp_path, kind)
    pools[world_size].run(load, tmp_path, kind, into)
