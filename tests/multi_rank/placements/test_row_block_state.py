"""State dicts and distributed checkpoints of shards that cut through no block of rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp2 import RaggedDTensor, fully_shard
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, others_full, tolerance_for
from tests.harness.compare import SUM_ORDER, assert_same, full_parameters
from tests.harness.pool import WorkerPools
from tests.multi_rank.placements.helpers.row_blocks import BLOCKY, sharded, train, trained

STEPS = 2


def plainly_sharded(seed: int = 0) -> Any:
    model = BLOCKY.build(seed)
    for unit in BLOCKY.units(model):
        fully_shard(unit)
    return model


def expected_parameters() -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in BLOCKY.build().named_parameters()}


@multi_rank(2, 4)
def test_state_dicts_go_out_and_come_back(world_size: int) -> None:
    model = sharded(4)
    loaded, assigned = sharded(4, BLOCKY.build(seed=1)), sharded(4, BLOCKY.build(seed=1))
    loaded.load_state_dict(model.state_dict())
    assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for other in (loaded, assigned):
        assert_same("parameters", full_parameters(other), expected_parameters())
        train(other, steps=2)
    state = torch.load(_saved(model.state_dict()), weights_only=True)
    other = sharded(4, BLOCKY.build(seed=1))
    other.load_state_dict(state)
    assert_same("parameters", full_parameters(other), expected_parameters())


def _saved(state: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@multi_rank(2, 4)
def test_state_dicts_that_lie_otherwise_are_loaded(world_size: int) -> None:
    """torch refuses DTensors of other placements."""
    model, wanted = sharded(4), BLOCKY.build(seed=1)
    other = sharded(5, BLOCKY.build(seed=1))
    model.load_state_dict(other.state_dict())
    assert_same("parameters", full_parameters(model), dict(wanted.named_parameters()))
    model = sharded(4)
    plain = plainly_sharded(1)
    model.load_state_dict(plain.state_dict(), strict=False)
    assert_same("parameters", full_parameters(model), full_parameters(plain))


@multi_rank(2, 4)
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_full_state_dicts(cpu_offload: bool, world_size: int) -> None:
    model = sharded(4)
    optimizer = adamw(trained(model))
    reference = Reference(BLOCKY, world_size=world_size)
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


@multi_rank(2, 4)
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_sharded_state_dicts(cpu_offload: bool, world_size: int) -> None:
    model = sharded(4)
    optimizer = adamw(trained(model))
    tolerance = tolerance_for(world_size)
    reference = Reference(BLOCKY, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=STEPS, tolerance=tolerance)
    options = StateDictOptions(cpu_offload=cpu_offload)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    other = sharded(4, BLOCKY.build(seed=1))
    other_optimizer = adamw(trained(other))
    set_state_dict(
        other, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
    )
    assert_same("parameters", full_parameters(other), full_parameters(model))
    record = reference.step()
    BLOCKY.loss(other, BLOCKY.batch(0, record.step, dist.get_rank())).backward()
    other_optimizer.step()
    assert_same("parameters", full_parameters(other), record.parameters, tolerance=SUM_ORDER)


@multi_rank(2)
def test_full_state_dicts_are_not_dealt_out_by_torch() -> None:
    """`set_model_state_dict` asks torch's placements where shards lie; by hand it is one line."""
    full = BLOCKY.build(seed=1).state_dict()
    model = sharded(4)
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


def save(folder: Path) -> None:
    model = sharded(4)
    optimizer = adamw(trained(model))
    reference = Reference(BLOCKY, world_size=4)
    assert_trains_like(reference, model, optimizer, steps=STEPS, tolerance=SUM_ORDER)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "sharded")
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "async").result()
    if dist.get_rank() == 0:
        torch.save((reference.model.state_dict(), reference.optimizer.state_dict()), folder / "reference.pt")


def load(folder: Path, rows: int | None) -> None:
    model: Any = plainly_sharded(1) if rows is None else sharded(rows, BLOCKY.build(seed=1))
    optimizer = adamw(trained(model))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "sharded")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    world_size = dist.get_world_size()
    reference = Reference(BLOCKY, world_size=world_size)
    plain, plain_optimizer = torch.load(folder / "reference.pt", weights_only=False)
    assert_same("loaded", full_parameters(model), plain, tolerance=SUM_ORDER)
    reference.model.load_state_dict(plain)
    reference.optimizer.load_state_dict(plain_optimizer)
    reference.steps_done = STEPS
    record = reference.step()
    BLOCKY.loss(model, BLOCKY.batch(0, record.step, dist.get_rank())).backward()
    optimizer.step()
    assert_same("parameters", full_parameters(model), record.parameters, tolerance=SUM_ORDER)
    state = {"model": {name: torch.zeros_like(value) for name, value in BLOCKY.build(seed=2).state_dict().items()}}
    dcp.load(state, checkpoint_id=folder / "async")
    assert_same("saved in the background", state["model"], plain, tolerance=SUM_ORDER)


@pytest.mark.parametrize("rows", others_full([4, 5, 64, None], [4, 64, None]))  # full: 2 cases, 1 s
@pytest.mark.parametrize("world_size", [2, 4])
def test_distributed_checkpoints_fit_any_rows(
    world_size: int, rows: int | None, pools: WorkerPools, tmp_path: Path
) -> None:
    pools[4].run(save, tmp_path)
    pools[world_size].run(load, tmp_path, rows)


@multi_rank(2)
def test_optimizer_states_alone(tmp_path: Path) -> None:
    model = sharded(4)
    optimizer = adamw(trained(model))
    BLOCKY.loss(model, BLOCKY.batch(0, 0, dist.get_rank())).backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    other = sharded(4)
    other.load_state_dict(get_model_state_dict(model))
    other_optimizer = adamw(trained(other))
    set_optimizer_state_dict(other, other_optimizer, state)
    ours, theirs = (each.state_dict()["state"] for each in (optimizer, other_optimizer))
    for index, values in ours.items():
        for name, value in values.items():
            found = theirs[index][name]
            assert type(found) is type(value)
            if isinstance(value, DTensor):
                assert torch.equal(found.full_tensor(), value.full_tensor())
