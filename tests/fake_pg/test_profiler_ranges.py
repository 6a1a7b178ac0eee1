"""The ranges that profilers show: torch's names, with the module's, so that tools that filter on them find them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp2 import fully_shard
from tests.harness import FakeWorlds


def test_ranges_have_torchs_names(simulate: FakeWorlds) -> None:
    simulate(2)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    for _ in range(2):  # orders are learned
        model(torch.randn(2, 4)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("FSDP::")}
    expected: dict[str, int] = {}
    for name in ("0", "2"):
        expected |= {f"FSDP::{each} ({name})": 1 for each in ("pre_forward", "post_forward", "pre_backward")}
        expected |= {f"FSDP::{each} ({name})": 1 for each in ("post_backward", "post_backward_reduce")}
        expected |= {f"FSDP::{each} ({name})": 2 for each in ("all_gather", "all_gather_copy_out")}
    expected |= {"FSDP::forward_prefetch for 2": 1, "FSDP::backward_prefetch for 0": 1}
    assert counts == expected
