"""Checkpoints of torch's own programs load here, and ours load there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType

from fsdp2 import fully_shard
from fsdp2.checkpoint import CheckpointDamaged, CheckpointMismatch, load, save
from tests.harness.checkpoints import anew, assert_equal, begin, snapshot
from tests.harness.multi_rank import others_full


class App:
    """How torch's tutorial wraps a program."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = self.run.model, self.run.optimizer
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def torch_saves(folder: Path, way: str) -> dict[str, Any]:
    run = begin("torch")
    for index in range(2):
        run.step(index)
    run.model.unused.grad = torch.zeros_like(run.model.unused)  # torch saves no state that there is not
    run.optimizer.step()
    model, optimizer = run.model, run.optimizer
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    ways = {
        "app": lambda: {"app": App(run)},
        "bare": lambda: get_model_state_dict(model),
        "model": lambda: {"model": get_model_state_dict(model)},
        "two": lambda: {
            "module": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "step": 7,
        },
        "flat": lambda: {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=flat),
        },
    }
    dcp.save(ways[way](), checkpoint_id=folder / "saved")
    return snapshot(run)


def loads_it(folder: Path, way: str) -> dict[str, Any]:
    run = begin("1d", seed=1)
    run.model.scale = nn.Parameter(torch.zeros(1))
    plain = begin("plain", seed=1).model
    plain.scale = nn.Parameter(torch.zeros(1))
    for unit in [*plain.blocks, plain]:
        fully_shard(unit)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.5)
    report = load(folder / "saved", plain, None if way in ("bare", "model") else optimizer)
    assert not report.missing and not report.unexpected
    found = type(run)(plain, optimizer, "adamw")
    state = snapshot(found)
    if way not in ("bare", "model"):
        found.step(3)
    assert report.step == (7 if way == "two" else None)
    return state


@pytest.mark.parametrize("way", others_full(["app", "bare", "model", "two", "flat"], ["app", "two", "flat"]))
def test_what_torchs_fully_shard_saves(way: str, tmp_path: Path) -> None:
    saved = anew(2, torch_saves, tmp_path, way)[0]
    found = anew(4 if way == "two" else 2, loads_it, tmp_path, way)[0]
    if way in ("bare", "model"):
        saved = {n: v for n, v in saved.items() if " " not in n}
        found = {n: v for n, v in found.items() if " " not in n}
    assert_equal(saved, found)


def ours(folder: Path, layout: str) -> dict[str, Any]:
    run = begin(layout)
    for index in range(2):
        run.step(index)
    run.model.unused.grad = torch.zeros_like(run.model.unused)  # torch loads no state that there is not
    run.optimizer.step()
    save(folder / "saved", run.model, run.optimizer, step=2, shared={"epoch": 1}, per_rank={"place": dist.get_rank()})
    return snapshot(run)


def torch_loads(folder: Path) -> dict[str, Any]:
    """As torch's documents have it; on a model that nothing shards, for torch shards no scalars."""
    run = begin("plain", seed=1)
    model, optimizer = run.model, run.optimizer
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / "saved")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return snapshot(run)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1d", "owned", "blocks", "hybrid"])
def test_plain_dcp_loads_ours(layout: str, tmp_path: Path) -> None:
    saved = anew(4 if layout == "hybrid" else 2, ours, tmp_path, layout)[0]
    assert_equal(saved, anew(1, torch_loads, tmp_path)[0])
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(whole["model"]["head.weight"], saved["embed.weight"]), "a tied weight has both names"
    assert torch.equal(whole["optimizer"]["state"]["scale"]["exp_avg"], saved["scale exp_avg"])
    assert whole["step"] == 2 and whole["shared"]["epoch"] == (1,)


def fsdp1_saves(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
    wrapped = FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": wrapped.state_dict(),
            "optim": FullyShardedDataParallel.optim_state_dict(wrapped, optimizer),
        }
        dcp.save(state, checkpoint_id=folder / "saved")
    with FullyShardedDataParallel.summon_full_params(wrapped):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def loads_fsdp1(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    load(folder / "saved", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(float(optimizer.state[p]["step"]) == 1 for p in model.parameters())
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    load(folder / "saved", model)
    return {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_what_fsdp1_saves_sharded(tmp_path: Path) -> None:
    saved = anew(2, fsdp1_saves, tmp_path)[0]
    assert_equal(saved, anew(2, loads_fsdp1, tmp_path)[0])


# ---- what is read, and written -------------------------------------------------------------------


class Large(nn.Module):
    """Tied, and large enough that headers do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 1024, bias=False)
        self.second = nn.Linear(1024, 333, bias=False)
        self.tied = nn.Linear(256, 1024, bias=False)
        self.tied.weight = self.first.weight


def large(layout: str) -> nn.Module:
    model = Large()
    if layout != "plain":
        mesh = None
        if layout == "hybrid":
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    return model


def saves_large(folder: Path, layout: str) -> None:
    save(folder / layout, large(layout))


def loads_large(folder: Path, layout: str, into: str) -> tuple[int, int]:
    model = large(into)
    report = load(folder / layout, model)
    return report.bytes_read, sum(p.to_local().nbytes for p in set(model.parameters()))  # type: ignore[attr-defined]


WHOLE = (1024 * 256 + 333 * 1024) * 4


@pytest.mark.full  # 7 s
def test_ranks_read_the_parts_that_their_rows_lie_in(tmp_path: Path) -> None:
    anew(4, saves_large, tmp_path, "1d")
    found = anew(4, loads_large, tmp_path, "1d", "1d")
    assert sum(each for _, each in found) == WHOLE and {read for read, _ in found} == {found[0][0]}
    assert found[0][0] <= 1.01 * WHOLE
    replicas = anew(4, loads_large, tmp_path, "1d", "hybrid")
    assert replicas[0][0] <= 1.2 * sum(each for _, each in replicas)


@pytest.mark.full
def test_tied_weights_and_replicas_are_written_once(tmp_path: Path) -> None:
    anew(4, saves_large, tmp_path, "hybrid")
    sizes = [each.stat().st_size for each in (tmp_path / "hybrid").glob("__*")]
    assert len(sizes) == 4
    assert sum(sizes) <= 1.02 * WHOLE
    assert max(sizes) <= math.ceil(0.4 * WHOLE)


def damaged_of_torch(folder: Path) -> None:
    run = begin("1d", seed=1)
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.distcp"):
        load(folder / "saved", run.model, verify="first")
    with pytest.raises(CheckpointMismatch, match="the checkpoint has no optimizer"):
        load(folder / "saved", run.model, run.optimizer)


def torch_saves_plainly(folder: Path) -> None:
    dcp.save({"model": get_model_state_dict(begin("1d").model)}, checkpoint_id=folder / "saved")


def test_a_flipped_bit_in_torchs_files(tmp_path: Path) -> None:
    """They have checksums, too, which nobody compares."""
    anew(2, torch_saves_plainly, tmp_path)
    path = tmp_path / "saved" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.index(begin("plain").model.embed.weight[1].detach().numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    anew(2, damaged_of_torch, tmp_path)
