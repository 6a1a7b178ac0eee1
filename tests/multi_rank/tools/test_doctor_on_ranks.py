"""The doctor's all-gather, between real ranks."""

from __future__ import annotations

from fsdp2.tools.doctor import judge, measure
from tests.harness import multi_rank


@multi_rank(2, 4)
def test_ranks_meet_and_gather_what_they_should(world_size: int) -> None:
    found = measure(4096 * world_size, repeats=2)
    assert (found["ranks"], found["backend"], found["gathered_bytes"]) == (world_size, "gloo", 4096 * world_size)
    assert found["is_right"] and judge(found).level == "ok"
    received = 4096 * (world_size - 1)
    assert abs(found["bytes_per_second"] * found["seconds"] - received) < 1e-3
