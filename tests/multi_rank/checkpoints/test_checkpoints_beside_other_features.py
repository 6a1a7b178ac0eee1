"""Checkpoints beside what else a program has around its model, its optimizer and its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp2 import full_parameters, fully_shard
from fsdp2.checkpoint import SaveFailed, load, save
from fsdp2.checkpoint.writing import Planner
from fsdp2.compat.fsdp1 import FullyShardedDataParallel
from tests.harness.checkpoints import Net, Run, anew, assert_equal, begin, snapshot

CPU = torch.device("cpu")
INPUT = torch.ones(3, 6)


def wrapped_as(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """By FSDP1, as "original" parameters or "flat" ones, or by `fully_shard`."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5))
    if kind == "fully_shard":
        fully_shard(model)
    else:
        arguments: dict[str, Any] = {"use_orig_params": kind == "original", "device_id": CPU}
        model[0] = FullyShardedDataParallel(model[0], **arguments)  # type: ignore[index,operator]
        model = FullyShardedDataParallel(model, **arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fsdp1_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(INPUT).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saves_or_loads(folder: Path, kind: str, seed: int) -> list[torch.Tensor]:
    """Outputs then, and a step later. Its state dicts are copies: what is read there must come into the model."""
    model, optimizer = wrapped_as(kind, seed)
    if seed:
        load(folder / "saved", model, optimizer)
    else:
        fsdp1_step(model, optimizer)
        save(folder / "saved", model, optimizer)
    found = [model(INPUT).detach()]
    fsdp1_step(model, optimizer)
    return [*found, model(INPUT).detach()]


@pytest.mark.full  # 8 s
def test_fsdp1s_wrapper(tmp_path: Path) -> None:
    wanted = anew(2, saves_or_loads, tmp_path, "original", 0)[0]
    for kind in ("original", "flat", "fully_shard"):
        for found in anew(2, saves_or_loads, tmp_path, kind, 1):
            assert all(map(torch.equal, found, wanted))


class Turned(nn.Module):
    """Its state dict has a copy of its weight, turned, as some programs' do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_state_dict_post_hook(
            lambda module, state, prefix, meta: state.update({f"{prefix}weight": -state[f"{prefix}weight"]})
        )
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: state.update({f"{prefix}weight": -state[f"{prefix}weight"]})
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def turned(folder: Path) -> None:
    model, other = fully_shard(Turned(0)), fully_shard(Turned(1))
    save(folder / "saved", model)
    load(folder / "saved", other)
    assert torch.equal(other(torch.eye(4)), model(torch.eye(4)))


@pytest.mark.full
def test_a_state_dict_that_is_a_copy(tmp_path: Path) -> None:
    anew(2, turned, tmp_path)


def wrapped(seed: int) -> tuple[nn.Module, Run]:
    """Recomputed blocks, and compiled as a whole."""
    model = Net(seed)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
        fully_shard(model.blocks[index])
    fully_shard(model)
    return torch.compile(model, backend="eager"), Run(model, torch.optim.AdamW(model.parameters(), lr=0.01), "adamw")


def saves_wrapped(folder: Path) -> dict[str, Any]:
    compiled, run = wrapped(0)
    run.step(0)
    save(folder / "saved", compiled, run.optimizer)
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in snapshot(run).items()}


def loads_unwrapped(folder: Path) -> dict[str, Any]:
    run = begin("1d", seed=1)
    load(folder / "saved", run.model, run.optimizer)
    return snapshot(run)


def loads_wrapped(folder: Path) -> dict[str, Any]:
    compiled, run = wrapped(1)
    load(folder / "saved", compiled, run.optimizer)
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in snapshot(run).items()}


@pytest.mark.full  # 6 s
def test_wrappers_are_in_no_name(tmp_path: Path) -> None:
    wanted = anew(2, saves_wrapped, tmp_path)[0]
    assert_equal(wanted, anew(2, loads_unwrapped, tmp_path)[0])
    assert_equal(wanted, anew(2, loads_wrapped, tmp_path)[0])


def inside_of_full_parameters(folder: Path) -> None:
    run, other = begin("1d"), begin("1d", seed=1)
    with full_parameters(run.model, writeback=False):
        save(folder / "saved", run.model)
    with full_parameters(other.model):
        load(folder / "saved", other.model)
    assert_equal(snapshot(run), snapshot(other))


@pytest.mark.full
def test_inside_of_full_parameters(tmp_path: Path) -> None:
    anew(2, inside_of_full_parameters, tmp_path)


def casts(folder: Path) -> None:
    """States follow their parameters' dtype then, or no step could be made."""
    run = begin("1d")
    run.step(0)
    save(folder / "saved", run.model, run.optimizer)
    model = Net(1).to(torch.bfloat16)
    fully_shard(model)
    half = Run(model, torch.optim.AdamW(model.parameters(), lr=0.01), "adamw")
    load(folder / "saved", model, half.optimizer, cast=True)
    assert half.optimizer.state[model.embed.weight]["exp_avg"].dtype is torch.bfloat16
    half.step(1)


def test_a_cast_takes_the_optimizer_along(tmp_path: Path) -> None:
    anew(2, casts, tmp_path)


def fails_to_plan(folder: Path) -> str:
    """An exception on one rank between what ranks tell each other is told, too."""
    run = begin("1d")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Planner, "create_local_plan", lambda self: 1 / 0)
        with pytest.raises(SaveFailed, match="rank 1: ZeroDivisionError") as raised:
            save(folder / "saved", run.model)
    with pytest.raises(SaveFailed, match=r"the ranks differ in what the save of [\s\S]*\+step 1"):
        save(folder / "saved", run.model, step=dist.get_rank())
    save(folder / "saved", run.model, step=3)
    return str(raised.value)


def test_a_rank_that_fails_to_plan_or_is_at_another_step(tmp_path: Path) -> None:
    assert len(set(anew(2, fails_to_plan, tmp_path))) == 1


FORGETS = """
import torch
from fsdp2.checkpoint import Checkpoints
Checkpoints("file/run", torch.nn.Linear(2, 2)).save(1, asynchronous=True)
"""


@pytest.mark.full  # 7 s
def test_an_error_that_nobody_asks_for_is_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = subprocess.run(
        [sys.executable, "-c", FORGETS], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "an asynchronous save failed" in done.stderr and "NotADirectoryError" in done.stderr
