"""Tools where something goes wrong between two statements, and where models and batches are not the usual ones."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import optimizer as hooks_of_all

import fsdp2
from fsdp2 import FSDPValueError, MixedPrecisionPolicy, ShardingConfig
from fsdp2.tools import doctor
from fsdp2.tools import metrics as metrics_module
from fsdp2.tools.commands import explain as explain_command
from fsdp2.tools.commands.estimate import sharding_arguments
from fsdp2.tools.commands.sharding import blocks_that_are_cut
from fsdp2.tools.metrics import PEAK_FLOPS
from fsdp2.tools.observing.observation import Observation
from fsdp2.tools.quantities import by_device_name
from tests.harness import fake_world


def sharded() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fsdp2.fully_shard(layer)
    return fsdp2.fully_shard(model)


def taps(model: Any) -> list[str]:
    """What is tapped at the moment."""
    state = model._get_fsdp_state()
    return [name for each in (state, *state.unit) for name in vars(each) if callable(vars(each)[name])]


@fake_world(2)
@pytest.mark.parametrize("what", ["file", "begin"])
def test_metrics_that_cannot_begin_leave_nothing_behind(what: str, tmp_path: Path) -> None:
    model = sharded()
    before = taps(model), len(hooks_of_all._global_optimizer_pre_hooks)
    if what == "file":
        with pytest.raises(FileNotFoundError):
            fsdp2.metrics(model, file=tmp_path / "nowhere" / "m.jsonl")
    else:
        with (
            mock.patch.object(Observation, "_observe_group", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            fsdp2.metrics(model)
    assert (taps(model), len(hooks_of_all._global_optimizer_pre_hooks)) == before
    model(torch.ones(2, 8)).sum().backward()


def test_devices_are_known_by_whole_words() -> None:
    names = {
        "NVIDIA L4": 121e12,
        "NVIDIA L40": 181e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA A10": 125e12,
        "NVIDIA RTX A1000": None,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989.5e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA GH200 480GB": 989.5e12,
        "AMD Instinct MI250X / MI250": 191.5e12,
    }
    assert {name: by_device_name(PEAK_FLOPS, name) for name in names} == names


def test_a_launcher_that_hangs_is_asked_to_end_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are in sessions of their own: killed, it would leave them."""
    said = tmp_path / "said"
    program = tmp_path / "launcher.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    pathlib.Path({str(said)!r}).write_text('asked')\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    started = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "up\n"
    monkeypatch.setattr(doctor, "LIMIT_SECONDS", 0.2)
    began = time.monotonic()
    with mock.patch.object(subprocess, "Popen", lambda *_, **__: started):
        assert "nothing came back" in str(doctor._start(2))
    assert said.read_text() == "asked" and time.monotonic() - began < 30 and started.returncode == 1


# ---- commands ------------------------------------------------------------------------------------------


class Pair(nn.Sequential):
    """A block."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Linear(64, 64))


def test_blocks_of_other_depths_are_named() -> None:
    model = nn.Sequential(Pair(), nn.Sequential(Pair(), Pair()))
    said = blocks_that_are_cut(model, ShardingConfig(blocks=("Pair",), max_bytes=20_000, min_bytes=0))
    assert said.startswith("3 blocks (0, ..., 1.1, Pair)"), said


def test_a_mesh_of_three_dims_is_refused_in_a_sentence() -> None:
    with pytest.raises(FSDPValueError, match="--mesh 2x2x2 has 3 dims"):
        explain_command.main(["torch.nn:Identity", "--mesh", "2x2x2"])


def test_blocks_are_told_beside_other_settings() -> None:
    told = sharding_arguments(ShardingConfig(blocks=("Layer",), max_bytes=2**20))
    assert told["blocks"] == ("Layer",) and "shard" in told


# ---- estimates -----------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Has nothing that is trained."""

    def __init__(self, *, has_parameters: bool) -> None:
        super().__init__()
        if has_parameters:
            self.layer = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("has_parameters", [False, True])
def test_what_trains_nothing_is_refused_and_left_as_it_is(has_parameters: bool) -> None:
    model = Frozen(has_parameters=has_parameters)
    for _ in range(2):
        with pytest.raises(FSDPValueError, match="nothing of Frozen is trained"):
            fsdp2.estimate(model, 2, batch=torch.empty(2, 4), hardware="cpu")
    assert type(model) is Frozen and "forward" not in vars(model)


def test_estimates_count_what_tensor_parallelism_exchanges_on_a_cpu() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def shard(model: Any, mesh: Any) -> Any:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fsdp2.fully_shard(model, mesh=mesh["dp"])

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

    found = {}
    for size in (1, 2):
        estimated = fsdp2.estimate(
            make, (2, size), mesh_dim_names=("dp", "tp"), batch=torch.empty(4, 8), shard=shard, hardware="cpu"
        )
        found[size] = sum(each.count for each in estimated.collectives)
    assert found[2] > found[1]


# ---- configs -------------------------------------------------------------------------------------------


@fake_world(2)
def test_policies_of_all_parameters_leave_the_module_s_own_casts() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    config = ShardingConfig(
        blocks=("Linear",), min_bytes=0, mp_policy=policy, mp_policy_of={"1": MixedPrecisionPolicy()}
    )
    model = fsdp2.auto_shard(nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8)), config=config)
    assert model(torch.ones(2, 8)).dtype is torch.float32
    every = {"*weight": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    config = ShardingConfig(blocks=("Linear",), min_bytes=0, mp_policy=policy, mp_policy_of=every)
    model = fsdp2.auto_shard(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), config=config)
    assert model(torch.ones(2, 8)).dtype is torch.float32


@fake_world(2)
def test_metrics_pause_after_what_the_device_has_yet_to_do() -> None:
    """What waits for the device is no part of the pause before it, and all of it after."""
    model = sharded()
    now = [0.0]

    def settles(self: Any) -> float:
        now[0] += 1.0
        return 0.0

    with (
        mock.patch.object(metrics_module.time, "perf_counter", lambda: now[0]),
        fsdp2.metrics(model, write=None) as metrics,
        mock.patch.object(type(metrics._meter), "exposed_seconds", settles),
    ):
        since = metrics._since
        with metrics.paused():
            now[0] += 10.0
        assert metrics._since - since == 11.0, "the first wait is training's, the second one the pause's"
