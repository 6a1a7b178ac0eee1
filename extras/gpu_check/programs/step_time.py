"""Milliseconds of a step by torch's `fully_shard`, by this one, and by torch's again: in turns, on the same GPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import nn

import fsdp2
from extras.gpu_check.runs import Found
from extras.gpu_check.setting import Setting
from fsdp2 import _torch
from tests.harness.models import Block

LIBRARIES: dict[str, Any] = {"torch": theirs, "fsdp2": fsdp2, "torch-again": theirs}
WARM, STEPS = 5, 30
SHAPES = {"1B": (16, 2048), "8B": (32, 4096)}


BYTES_PER_PARAMETER = 16
"""In fp32: itself, its gradient, and two of the optimizer's."""

ROOM = 0.6
"""The part of the device's memory that these may take; activations need the rest."""


def _does_not_fit(setting: Setting) -> str | None:
    """Why the model is not for these GPUs."""
    if setting.is_rehearsal:
        return None
    blocks, width = SHAPES[setting.options.get("shape", "1B")]
    needed = blocks * 16 * width**2 * BYTES_PER_PARAMETER / setting.ranks
    there = ROOM * torch.cuda.get_device_properties(setting.device).total_memory
    if "offload" in setting.options or needed <= there:
        return None
    return f"needs {needed / 2**30:.0f} GiB on each GPU, of which {there / 2**30:.0f} may be taken"


def _stepper(setting: Setting, library: Any) -> Callable[[], None]:
    blocks, width = setting.pick(SHAPES[setting.options.get("shape", "1B")], (2, 32))
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width, heads=max(width // 128, 2), hidden=4 * width) for _ in range(blocks)))
    options: dict[str, Any] = {"mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if "offload" in setting.options:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=not setting.is_rehearsal)
    for block in model:
        library.fully_shard(block, **options)
    library.fully_shard(model, **options)
    model.to_empty(device="cpu" if "offload" in setting.options else setting.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(0.01)
    if setting.options.get("pool") and library is fsdp2:
        model.set_communication_memory_pool(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    inputs = torch.randn(1, setting.pick(4096, 8), width, device=setting.device)

    def step() -> None:
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(setting: Setting) -> Found:
    """Options: ``shape`` (1B, 8B), ``pool`` (of fsdp2), ``offload``. One library's model at a time is in memory."""
    if reason := _does_not_fit(setting):
        return {"skipped": reason}
    if "pool" in setting.options and not _torch.can_swap_memory:
        return {"skipped": "the pool needs torch 2.13"}
    milliseconds: dict[str, float] = {}
    peaks: dict[str, float] = {}
    with setting.group():
        for name, library in LIBRARIES.items():
            step = _stepper(setting, library)
            for _ in range(setting.pick(WARM, 1)):
                step()
            setting.synchronize()
            if not setting.is_rehearsal:
                torch.cuda.reset_peak_memory_stats()
            samples = []
            for _ in range(setting.pick(STEPS, 2)):
                start = time.perf_counter()
                step()
                setting.synchronize()
                samples.append(1e3 * (time.perf_counter() - start))
            milliseconds[name] = statistics.median(samples)
            if not setting.is_rehearsal:
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20
            del step
            torch.cuda.empty_cache()
    return {"milliseconds": milliseconds, "peak_mebibytes": peaks}
