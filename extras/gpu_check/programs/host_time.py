"""What the host takes for each part of an ordinary step of many small parameters: plain, by torch's, by this one."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import nn

import fsdp2
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting
from fsdp2.optim.torch_clipping import substitutes

LIBRARIES: dict[str, Any] = {"plain": None, "torch": theirs, "fsdp2": fsdp2}
WARM, STEPS = 5, 20
BLOCKS, WIDTH = 32, 16
"""Of 12 parameters each."""

OPTIMIZERS = {"AdamW foreach": {"foreach": True}, "AdamW fused": {"fused": True}}
_CLIP = torch.nn.utils.clip_grad_norm_

Phases = dict[str, Callable[[], object]]

BESIDE_PLAIN = ("clip", "AdamW foreach", "AdamW fused")
AS_PLAIN = 1.15
OF_TORCHS = 0.45


def complaints(found: Found) -> list[str]:
    """What is wrong: clipping and optimizers cost more than of plain tensors, or the step half of torch's."""
    plain, ours, torchs = found["plain"], found["fsdp2"], found["torch"]
    said = [
        f"{phase} takes {us:.1f} us a parameter, {plain[phase]:.1f} of plain ones"
        for phase, us in ours.items()
        if phase in BESIDE_PLAIN and us > AS_PLAIN * plain[phase]
    ]
    whole = sum(ours.values()) / sum(torchs.values())
    if whole > OF_TORCHS:
        said.append(f"a step takes the host {whole:.2f} of torch's time")
    return said


def _phases(setting: Setting, library: Any) -> Phases:
    blocks = setting.pick(BLOCKS, 2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))) for _ in range(blocks)))
    model.to(setting.device)
    if library is not None:
        for block in model:
            library.fully_shard(block)
        library.fully_shard(model)
    parameters = list(model.parameters())
    optimizers = {name: torch.optim.AdamW(parameters, lr=1e-6, **how) for name, how in OPTIMIZERS.items()}
    clip = substitutes()[_CLIP] if library is fsdp2 else _CLIP
    inputs = torch.randn(4, WIDTH, device=setting.device)
    return {
        "forward and backward": lambda: model(inputs).sum().backward(),
        "clip": lambda: clip(parameters, 1.0),
        **{name: optimizer.step for name, optimizer in optimizers.items()},
        "zero_grad": lambda: model.zero_grad(),
    }


def run(setting: Setting) -> Found:
    """Found: microseconds of the host for each parameter, by phase and library: medians of steps in turns.

    By the clock on the wall: on CUDA backward runs in a thread of autograd's.
    """
    with setting.group():
        phases = {name: _phases(setting, library) for name, library in LIBRARIES.items()}
        samples: dict[str, dict[str, list[float]]] = {name: {} for name in LIBRARIES}
        gc.disable()
        for step in range(setting.pick(WARM + STEPS, 3)):
            for name, its in phases.items():
                for phase, action in its.items():
                    setting.synchronize()  # the host never waits for room in a full queue
                    start = time.perf_counter()
                    action()
                    seconds = time.perf_counter() - start
                    if step >= setting.pick(WARM, 1):
                        samples[name].setdefault(phase, []).append(seconds)
                gc.collect()
        gc.enable()
    count = 12 * setting.pick(BLOCKS, 2)
    found = {
        name: {phase: 1e6 * statistics.median(each) / count for phase, each in its.items()}
        for name, its in samples.items()
    }
    return found if setting.is_rehearsal else {**found, COMPLAINTS: complaints(found)}
