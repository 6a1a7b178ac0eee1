"""Processes that die, stop, end or wait elsewhere: the others raise in seconds, and name them. Plain processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ranks_that_fail.py")

_GONE = r"FSDPRuntimeError: the process of rank 1 is gone, or stopped: the (all-gather|reduction) of '\S+' failed"
SAID = {
    "killed": _GONE,
    "ended": _GONE,
    "stopped": r"FSDPRuntimeError: rank 0 has waited for the all-gather of '\S+' for \d+ s, and "
    "rank 1 does not answer: its process is stopped, or dead",
    "in a barrier": r"(?s)FSDPRuntimeError: rank [01] has waited for .*all that it waits for wait as well.*"
    r"rank 1: step 2.*waits for torch\.distributed\.barrier\(\), for \d+ s, at ranks_that_fail\.py:\d+ in happens",
    "in full_tensor": r"(?s)FSDPRuntimeError: .*all that it waits for wait as well.*"
    r"rank 1: step 2.*waits for torch's full_tensor\(\), for \d+ s, at ranks_that_fail\.py:\d+ in happens",
    "raised": r"FSDPRuntimeError: (the process of rank 1 is gone|the all-gather of '\S+' with rank 1 failed)",
}


QUICK = ("killed", "stopped")

KEEPS_STORE = r"FSDPRuntimeError: the (all-gather|reduction) of '\S+' with rank 0 failed"


def run(
    case: str, rank: int, folder: Path, *, world_size: int = 2, asks: int | None = None, **variables: str
) -> tuple[list[str], list[int | None]]:
    """What the ranks have printed, and how they ended: those but ``rank``, which may not; ``asks`` gets a signal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    said = [folder / f"{each}.txt" for each in range(world_size)]
    for each in range(world_size):
        place = {"RANK": str(each), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = {**os.environ, **place, "OMP_NUM_THREADS": "1", **variables}
        with said[each].open("w") as file:
            command = [sys.executable, str(PROGRAM), case, str(rank)]
            ranks.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
    try:
        if asks is not None:
            while "ready" not in said[asks].read_text():
                time.sleep(0.1)
            time.sleep(1.0)
            ranks[asks].send_signal(signal.SIGUSR2)
        for each, process in enumerate(ranks):
            if each != rank:
                process.wait(timeout=100)
        status = [process.poll() for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
    return [each.read_text() for each in said], status


@pytest.mark.full  # 14 s each
@pytest.mark.parametrize(
    ("case", "rank", "says"),
    [
        *((case, 1, SAID[case]) for case in QUICK),
        *(pytest.param(case, 1, SAID[case], marks=pytest.mark.full) for case in SAID if case not in QUICK),  # 10 s
        pytest.param("killed", 0, KEEPS_STORE, marks=pytest.mark.full),  # 5 s
    ],
)
def test_the_others_name_it(case: str, rank: int, says: str, tmp_path: Path) -> None:
    other = 1 - rank
    said, status = run(case, rank, tmp_path)
    out = said[other]
    assert re.search(says, out), out + said[rank]
    seconds = int(re.search(rf"rank {other} after (\d+) s", out).group(1))  # type: ignore[union-attr]
    assert seconds < 20
    assert status[other] == 3, "neither aborted nor crashed"


@pytest.mark.full  # 19 s
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_that_are_in_nothing_but_torchs_collectives_are_named_by_all(world_size: int, tmp_path: Path) -> None:
    """Rank 1 does not clip, and waits for the others in a barrier, and they for it: nobody in an exchange of ours."""
    said, status = run("clips", 1, tmp_path, world_size=world_size)
    for rank, out in enumerate(said):
        assert "has waited for torch" in out and "and all that it waits for wait as well" in out, out
        assert re.search(r"rank 0: step 3.*waits for torch's clip_grad_norm_\(\).*in clip_or_not", out), out
        assert re.search(r"rank 1: step 3.*waits for torch\.distributed\.barrier\(\).*in clip_or_not", out), out
        seconds = re.search(rf"rank {rank} after (\d+) s", out)
        assert (rank == 1 and status[rank] is None) or (seconds is not None and int(seconds[1]) < 20), out


DIFFER = (
    r"FSDPRuntimeError: ranks 0 and 1 differ in exchange \d+ of their process group: rank 0 has begun "
    r"the (all-gather|reduction) of '(?P<one>\d)', and rank 1 the (all-gather|reduction) of '(?P<other>\d)'\.\n"
    r".*go on from the last checkpoint"
)


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        pytest.param("swaps", 2, marks=pytest.mark.full),  # 7 s
        pytest.param("skips", 2, marks=pytest.mark.full),  # 5 s
        pytest.param("evaluates", 2, marks=pytest.mark.full),  # 8 s
        pytest.param("swaps", 9, marks=pytest.mark.full),  # 20 s
    ],
)
def test_collectives_without_a_name_are_compared_afterwards(case: str, world_size: int, tmp_path: Path) -> None:
    said, status = run(case, 1, tmp_path, world_size=world_size, FSDP2_COMM="native")
    for rank, out in enumerate(said):
        if rank != 1:
            found = re.search(DIFFER, out)
            assert found is not None, out
            assert {found["one"], found["other"]} <= {"0", "1", "2"}
            assert status[rank] == 3


@pytest.mark.full  # 10 s
def test_a_rank_that_waits_says_where_it_is_upon_a_signal(tmp_path: Path) -> None:
    said, _ = run("asked", 1, tmp_path, asks=0)
    place = r"fsdp2: asked by a signal\. rank 0: step 3, forward of Layers; waits for the all-gather of '0'"
    assert re.search(place + r".*at ranks_that_fail\.py:\d+ in forward", said[0]), said[0]
    assert re.search(r"over ranks 0,1:\n +\d+ +step 0 +before the first forward +the comparison of", said[0])
    assert "rank 0 is done" in said[0]
