"""``fsdp2 doctor --gpu``: training steps on one GPU, which needs no test suite: the part of gpu-check in the wheel.

Four questions: does a sharded model train as a plain one, also offloaded and in bfloat16; does the host wait for the
device in a step; does memory stay flat; what is the backend of NCCL taken for. The other seventeen checks plant faults
and read traces, with programs that lie in the repository: ``make gpu-check`` there.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import _torch
from fsdp2.api.policies import CPUOffloadPolicy
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.features.full_parameters import full_parameters
from fsdp2.grouping.sharding import auto_shard
from fsdp2.tools.doctor.finding import Finding

THE_REST = Finding(
    "gpu-check",
    "note",
    "Only what a wheel has was checked, on one GPU: a part of what GPUs are there for.",
    "make gpu-check, in the repository, runs all of it, on all GPUs, in nine minutes, and writes a report.",
)

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero2": {"strategy": "zero2"},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}
TOLERANCES = {"bfloat16": 5e-2}
"""Of parameters after training, absolute; 1e-4 elsewhere: matrix products may take other algorithms."""

STEPS, WARM = 12, 4


class Block(nn.Module):
    """A layer of a transformer, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to (batch, width)."""
        found: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


def model_of(width: int, device: torch.device) -> nn.Module:
    """Three blocks between two layers, the same in each call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, width), *[Block(width) for _ in range(3)], nn.Linear(width, width)).to(device)


def findings(device_type: str = "cuda", width: int = 512) -> Iterator[Finding]:
    """Ask all of them. Makes a process group of one rank, and destroys it.

    Args:
        device_type: "cuda"; "cpu" asks what can be asked there, for tests.
        width: of the model's layers.
    """
    if device_type == "cuda" and not torch.cuda.is_available():
        yield Finding("gpu", "problem", "torch sees no CUDA device, and --gpu asks for checks on one.", _NO_GPU)
        return
    with _world(device_type) as device:
        yield _backend(device)
        for way in WAYS:
            yield trains(way, device, width)
        if device_type == "cuda":
            yield waits(device, width)
            yield memory(device, width)
    yield THE_REST


_NO_GPU = "Leave --gpu out, or look at nvidia-smi and at CUDA_VISIBLE_DEVICES."


@contextmanager
def _world(device_type: str) -> Iterator[torch.device]:
    """A process group of this rank alone, whose collectives are run all the same."""
    before = os.environ.get("FSDP2_COMM")
    os.environ["FSDP2_COMM"] = "native"
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        try:
            yield torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
        finally:
            dist.destroy_process_group()
            os.environ.pop("FSDP2_COMM")
            if before is not None:
                os.environ["FSDP2_COMM"] = before


def _backend(device: torch.device) -> Finding:
    name = _torch.backend_name(dist.distributed_c10d._get_default_group(), device)
    expected = ("nccl", "nccl2") if device.type == "cuda" else ("gloo",)
    if name not in expected:
        what = f"The backend of {device.type} calls itself '{name}', which fsdp2 does not know: it may be slow."
        return Finding("backend", "warning", what, "Report it, with the versions above.")
    return Finding("backend", "ok", f"The backend of {device.type} is known: {name}.")


def _train(model: nn.Module, step: Callable[[int], None]) -> None:
    for index in range(STEPS):
        step(index)


def _stepper(model: nn.Module, device: torch.device, width: int, cast: bool = False) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(2)
    batches = [torch.randn(16, width).to(device) for _ in range(STEPS)]

    def step(index: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=cast):
            loss = model(batches[index]).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sharded(device: torch.device, width: int, **arguments: Any) -> nn.Module:
    mesh = init_device_mesh(device.type, (1,))
    return auto_shard(model_of(width, device), mesh, blocks=Block, min_bytes=0, **arguments)


def trains(way: str, device: torch.device, width: int) -> Finding:
    """Whether a sharded model ends where a plain one does."""
    plain = model_of(width, device)
    start = copy.deepcopy(plain.state_dict())
    _train(plain, _stepper(plain, device, width))
    sharded = _sharded(device, width, **WAYS[way])
    _train(sharded, _stepper(sharded, device, width))
    with full_parameters(sharded):
        ours = {name: each.detach().clone() for name, each in sharded.named_parameters()}
    theirs = {name: each.detach() for name, each in plain.named_parameters()}
    gap = max(float((ours[name].to(device) - theirs[name]).abs().max()) for name in theirs)
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in theirs)
    values = {"way": way, "steps": STEPS, "largest_difference": gap, "largest_change": moved}
    tolerance = TOLERANCES.get(way, 1e-4)
    if not gap <= tolerance:  # nan too
        what = f"A model that is trained {way} differs from the plain one by {gap:.2e} after {STEPS} steps."
        return Finding("training", "problem", what, "Report it: make gpu-check says more.", values)
    return Finding("training", "ok", f"Trained {way}: as the plain model, to {gap:.1e}.", values=values)


def waits(device: torch.device, width: int) -> Finding:
    """Whether something in a step makes the host wait for the device."""
    model = _sharded(device, width)
    step = _stepper(model, device, width)
    for index in range(WARM):
        step(index)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(WARM, STEPS):
            step(index)
    except RuntimeError as error:
        return Finding("host", "problem", f"The host waits for the device in a step: {error}", "Report it.")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Finding("host", "ok", "The host does not wait for the device in a step.")


def memory(device: torch.device, width: int) -> Finding:
    """Whether the peak of a step's memory stays the same."""
    model = _sharded(device, width)
    step = _stepper(model, device, width)
    peaks = []
    for index in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        step(index)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    values = {"peak_bytes": peaks}
    if max(peaks[WARM:]) > 1.01 * max(peaks[:WARM]):
        return Finding("memory", "problem", f"Memory grows from step to step: {peaks} bytes.", "Report it.", values)
    return Finding("memory", "ok", f"Memory stays flat over {STEPS} steps.", values=values)
