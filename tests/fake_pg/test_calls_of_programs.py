"""Programs as people write them make fewer calls in a step than with torch's `fully_shard`: no way of ours is slow."""

from __future__ import annotations

import pytest

from benchmarks.implementations import fake_process_group
from benchmarks.programs import PROGRAMS, Library, calls_of

OF_TORCHS = {
    "two models, one frozen in turns": 0.32,  # gradients are laid out anew, twice a step
    "SGD per parameter, in backward": 0.9,  # nearly all are torch's, in as many steps as there are parameters
}


@pytest.mark.full  # 25 s
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_makes_few_calls(name: str) -> None:
    with fake_process_group(8):
        calls = {each: calls_of(PROGRAMS[name](Library(each))) for each in ("torch", "fsdp2")}
    assert calls["fsdp2"] <= OF_TORCHS.get(name, 0.28) * calls["torch"]
