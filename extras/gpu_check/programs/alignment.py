"""Bandwidth of a reduce-scatter against how its rows are aligned; and how the engine's own rows are."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting
from fsdp2 import MixedPrecisionPolicy, _torch, fully_shard
from tests.harness.internals import groups_of
from tests.harness.models import Block

ODD, ALIGNED = "rows of 4 mod 16 bytes", "rows of 0 mod 128 bytes"
TIMES = 30
WORTH_PADDING = 1.1


def complaints(found: Found) -> list[str]:
    """What is wrong: rows are not aligned as NCCL wants them; or padding them is not worth its bytes."""
    rows = [row for row in found["row_bytes"] if row % (128 if row >= 1024 else 16)]
    said = [f"a row has {row} bytes" for row in rows]
    speeds = found["gigabytes_per_second"]
    if speeds[ODD] > WORTH_PADDING * speeds[ALIGNED]:
        said.append(f"{speeds[ODD]:.1f} GB/s with rows of any size, {speeds[ALIGNED]:.1f} with aligned ones")
    return said


def _seconds(setting: Setting, row_numel: int) -> float:
    """Median of one reduce-scatter in fp32."""
    whole = torch.ones(setting.ranks * row_numel, device=setting.device)
    own = torch.empty(row_numel, device=setting.device)
    found = []
    for _ in range(setting.pick(TIMES, 3)):
        setting.synchronize()
        start = time.perf_counter()
        _torch.reduce_scatter_single(own, whole, dist.ReduceOp.SUM, dist.group.WORLD, False)
        setting.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _row_bytes(setting: Setting) -> list[int]:
    """Of what the engine packs of blocks whose matrices do not travel alone, bytes per rank."""
    blocks = nn.Sequential(*(Block(64, heads=4, hidden=172) for _ in range(2))).to(setting.device)
    for block in blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(blocks)
    blocks(torch.ones(1, 8, 64, device=setting.device)).float().sum().backward()
    buckets = [bucket for group in groups_of(blocks) for bucket in group.reducer.buckets]
    return [bucket.layout.packed_numel * bucket.dtype.itemsize for bucket in buckets]


def run(setting: Setting) -> Found:
    """Gigabytes that a rank sends per second."""
    numel = setting.pick(8 << 20, 1 << 10)
    speeds: dict[str, float] = {}
    with setting.group():
        for name, row_numel in ((ODD, numel + 1), (ALIGNED, numel)):
            sent = (setting.ranks - 1) * row_numel * 4
            speeds[name] = sent / _seconds(setting, row_numel) / 1e9
        rows = _row_bytes(setting)
    found = {"gigabytes_per_second": speeds, "row_bytes": rows}
    return found if setting.is_rehearsal else {**found, COMPLAINTS: complaints(found)}
