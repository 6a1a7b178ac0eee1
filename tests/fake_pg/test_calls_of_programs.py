"""Programs as people write them make fewer calls in a step than with torch's `fully_shard`: no way of ours is slow."""

from __future__ import annotations

import pytest

from benchmarks.implementations import fake_process_group
from benchmarks.programs import PROGRAMS, Library, calls_of

AT_MOST = 0.13
MORE = {
    "activation checkpointing": 0.17,
    "the norm of each gradient is read": 0.14,  # by DTensor, as the rows below
    "an average of the weights, by hand": 0.16,
    "gradients are written in place": 0.2,
    "gradients are replaced": 0.25,
    "SGD, GradScaler": 0.29,
    "two models, one frozen in turns": 0.31,  # gradients are laid out anew, twice a step
    "SGD per parameter, in backward": 0.83,  # in as many steps as there are parameters
}
"""Calls, of torch's."""


@pytest.mark.full  # 25 s
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_makes_few_calls(name: str) -> None:
    with fake_process_group(8):
        calls = {each: calls_of(PROGRAMS[name](Library(each))) for each in ("torch", "fsdp2")}
    assert calls["fsdp2"] <= MORE.get(name, AT_MOST) * calls["torch"]
