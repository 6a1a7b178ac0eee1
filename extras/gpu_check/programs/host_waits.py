"""Steps in which nothing may make the host wait for the device: torch raises where something does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from extras.gpu_check.programs.stacks import batch, sharded, stack
from extras.gpu_check.says import SKIPPED, Found
from extras.gpu_check.setting import Setting
from fsdp2 import CPUOffloadPolicy, _torch

WIDTH = 64
STEPS = 8
WARM = 3

_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}


class _Raises(TorchDispatchMode):
    """On CPU: in the place of CUDA's debug mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _WAITS:
            raise RuntimeError(f"the host waits for the device: {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_waits(setting: Setting) -> Iterator[None]:
    if setting.is_rehearsal:
        with _Raises():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(setting: Setting) -> Found:
    """Options: ``way``: plain, unused (a layer has no gradient in some steps), offload, pool."""
    way = setting.options.get("way", "plain")
    if way == "pool" and not _torch.can_swap_memory:
        return {SKIPPED: "the pool needs torch 2.13"}
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if way == "offload" else {}
    with setting.group():
        model = sharded(stack(setting, WIDTH), **options)
        if way == "pool":
            model.set_communication_memory_pool(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        batches = [batch(setting, WIDTH, step) for step in range(STEPS)]
        setting.synchronize()

        def step(index: int) -> None:
            unused = way == "unused" and index % 2 == 1
            found = nn.Sequential(*model[:-1])(batches[index]) if unused else model(batches[index])
            found.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for index in range(WARM):
            step(index)
        with _no_waits(setting):
            for index in range(WARM, STEPS):
                step(index)
        setting.synchronize()
    return {"way": way, "steps": STEPS - WARM}
