"""Ranks of tests on one GPU: ``FSDP2_TEST_DEVICE=cuda pytest tests/multi_rank``. They exchange over gloo, as NCCL takes
one rank of a GPU only.

Meshes that tests make on the CPU are on the device then, and so are the reference's model and data. Products of
matrices on a device may be rounded in another way for another address: where bits are compared elsewhere, `ON_DEVICE`
is allowed. A test that makes tensors of its own on the CPU, and compares them with what is on the device, fails.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

CPU = "cpu"
DEVICE = os.environ.get("FSDP2_TEST_DEVICE", CPU)
"""Where ranks of tests compute."""


def use_device_if_asked() -> None:
    """Have this process, a rank, compute on `DEVICE`."""
    if DEVICE == CPU:
        return
    if not torch.accelerator.is_available():
        raise RuntimeError(f"FSDP2_TEST_DEVICE={DEVICE} needs such a device, and there is none.")
    os.environ["LOCAL_RANK"] = "0"
    torch.accelerator.set_device_index(0)
    move_meshes(DEVICE)


def move_meshes(device: str) -> None:
    """Meshes on the CPU are made on ``device`` from here on."""
    initialize = DeviceMesh.__init__

    @functools.wraps(initialize)
    def initialize_moved(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialize(self, device if device_type == CPU else device_type, *args, **kwargs)

    DeviceMesh.__init__ = initialize_moved  # type: ignore[method-assign]
