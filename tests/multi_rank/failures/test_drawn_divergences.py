"""Ranks that diverge several times, in ways drawn from seeds: all raise, and train on together, or all is right."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from extras.faults.drawn import EVENTS, run_here
from fsdp2 import set_watchdog
from tests.harness import multi_rank


@pytest.mark.full  # 2 s each
@multi_rank(2, 4)
@pytest.mark.parametrize("seed", range(3000, 3100))
def test_all_is_right_or_named(seed: int) -> None:
    set_watchdog(0.5)
    try:
        words = run_here(seed)
    finally:
        set_watchdog(10.0)
    assert len(words) == EVENTS
    said: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(said, words)
    for each in zip(*said, strict=True):
        assert set(each) <= {"right", "named"}
