"""The timeline by CUDA's events: streams' times are on the host's scale, and a slow kernel is shown where it ran."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from tests.gpu.helpers import NEEDS_CUDA

pytestmark = NEEDS_CUDA

SLEEP_CYCLES = 50_000_000
"""25 ms or more on any GPU of today (below 2 GHz)."""


class Sleeps(nn.Linear):
    """Its forward keeps the stream busy."""

    sleeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sleeps:
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().forward(x)


def test_a_slow_kernel_is_shown_where_it_ran(world_of_one: None, tmp_path: Path) -> None:
    model = nn.Sequential(*(Sleeps(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def step() -> None:
        model(torch.ones(4, 64, device="cuda")).sum().backward()
        model.zero_grad()

    for _ in range(2):
        step()
    model[1].sleeps = True
    with fsdp2.timeline(model) as timeline, fsdp2.metrics(model, write=None) as metrics:
        step()
        found = metrics.step(tokens=4)
    (record,) = timeline.report.records
    assert record.has_streams
    busy = timeline.ranks[0].busy
    assert max(busy, key=lambda key: busy[key]) == ("forward", "1")
    assert 0.02 < busy["forward", "1"] <= timeline.ranks[0].step_seconds
    # The device's times lie between the host's, which has waited for the device at the end.
    assert all(record.begin - 1e-3 <= each.begin <= each.end <= record.end + 1e-3 for each in record.spans)
    assert found is not None and found.exposed_share is not None and 0 <= found.exposed_share <= 1
    timeline.save(tmp_path / "timeline.json")
