"""Steps under a detector of races: torch's for CUDA; in a rehearsal, the recording device and its checker."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from extras.gpu_check.programs.stacks import sharded, stack, train
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting
from tests.harness.happens_before import find_violations
from tests.harness.recording.scenarios import record

WIDTHS = (64, 1024)
"""Packed, and each parameter alone."""


def run(setting: Setting) -> Found:
    """What the detector reports, first of all things."""
    if setting.is_rehearsal:
        record.cache_clear()  # a fault may have been planted since
        races = [str(race) for name in ("plain", "replicated") for race in find_violations(record(name).trace)]
        record.cache_clear()
        return {COMPLAINTS: [f"{len(races)} races; the first: {races[0]}"] if races else []}
    from torch.cuda import _sanitizer

    with setting.group():
        mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
        for width in WIDTHS:
            for options in ({}, {"mesh": mesh}):
                model = sharded(stack(setting, width), **options)
                _sanitizer.enable_cuda_sanitizer()
                try:
                    train(setting, model, width, steps=4)  # raises `CUDASanitizerErrors`
                finally:
                    _sanitizer.cuda_sanitizer.disable()
    return {"torch": torch.__version__}
