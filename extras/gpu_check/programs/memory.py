"""Memory over 50 steps, with the device nearly full: what is allocated and reserved at each step's peak."""

from __future__ import annotations

import torch

from extras.gpu_check.programs.stacks import batch, sharded, stack
from extras.gpu_check.says import COMPLAINTS, SKIPPED, Found
from extras.gpu_check.setting import Setting
from fsdp2 import _torch

STEPS = 50
SETTLED = 3
SPARE_BYTES = 1 << 30
SAME_MEMORY = 1.01
STEPS_TO_SETTLE = 2


def complaints(found: Found) -> list[str]:
    """What is wrong: peaks grow from step to step, or the device is asked for more memory."""
    settled, said = found["settled"], []
    start = settled + STEPS_TO_SETTLE
    for what in ("allocated", "reserved"):
        peaks = found[what]
        if max(peaks[start:]) > SAME_MEMORY * max(peaks[: start + 1]):
            said.append(f"{what} memory grows, {peaks[settled]} to {max(peaks)} bytes")
    if asked := found["asked"][-1] - found["asked"][start]:
        said.append(f"the device was asked for memory {asked} times after the first steps")
    return said


def _stats(setting: Setting) -> tuple[int, int, int]:
    """Peaks of allocated and reserved bytes, and how often the device was asked for memory."""
    if setting.is_rehearsal:
        return 0, 0, 0
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"], stats["num_device_alloc"]


def run(setting: Setting) -> Found:
    """Options: ``pool``: on or off. (The allocator's settings are in the environment.)"""
    width = setting.pick(4096, 32)
    pool = setting.options.get("pool") == "on"
    if pool and not _torch.can_swap_memory:
        return {SKIPPED: "the pool needs torch 2.13"}
    series = []
    with setting.group():
        model = sharded(stack(setting, width, depth=8))
        if pool:
            model.set_communication_memory_pool(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ballast = None
        for step in range(setting.pick(STEPS, 5)):
            if step == SETTLED and not setting.is_rehearsal:
                free, _ = torch.cuda.mem_get_info()
                ballast = torch.empty(max(free - SPARE_BYTES, 0), dtype=torch.uint8, device=setting.device)
                _stats(setting)
            model(batch(setting, width, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            setting.synchronize()
            series.append(_stats(setting))
        del ballast
    allocated, reserved, asked = (list(each) for each in zip(*series, strict=True))
    found = {"allocated": allocated, "reserved": reserved, "asked": asked, "settled": SETTLED}
    return found if setting.is_rehearsal else {**found, COMPLAINTS: complaints(found)}
