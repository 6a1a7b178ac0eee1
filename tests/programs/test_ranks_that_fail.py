"""Processes that die, stop, end or wait elsewhere: the others raise in seconds, and name them. Plain processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ranks_that_fail.py")

_GONE = r"FSDPRuntimeError: the process of rank 1 is gone, or stopped: the (all-gather|reduction) of '\S+' failed"
SAID = {
    "killed": _GONE,
    "ended": _GONE,
    "stopped": r"FSDPRuntimeError: rank 0 has waited for the all-gather of '\S+' for \d+ s, and "
    "rank 1 does not answer: its process is stopped, or dead",
    "in a barrier": r"(?s)FSDPRuntimeError: rank 0 has waited for .*all that it waits for wait as well.*"
    r"rank 1: step 2.*is in torch\.distributed\.barrier\(\), at ranks_that_fail\.py:\d+ in happens",
    "raised": r"FSDPRuntimeError: (the process of rank 1 is gone|the all-gather of '\S+' with rank 1 failed)",
}


KEEPS_STORE = r"FSDPRuntimeError: the (all-gather|reduction) of '\S+' with rank 0 failed"


@pytest.mark.parametrize(
    ("case", "rank", "says"),
    [*((case, 1, says) for case, says in SAID.items()), ("killed", 0, KEEPS_STORE)],
)
def test_the_others_name_it(case: str, rank: int, says: str, tmp_path: Path) -> None:
    other = 1 - rank
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    said = [tmp_path / f"{each}.txt" for each in range(2)]
    for each in range(2):
        env = {
            **os.environ,
            "RANK": str(each),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with said[each].open("w") as file:
            command = [sys.executable, str(PROGRAM), case, str(rank)]
            ranks.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
    try:
        ranks[other].wait(timeout=60)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
    out = said[other].read_text()
    assert re.search(says, out), out + said[rank].read_text()
    seconds = int(re.search(rf"rank {other} after (\d+) s", out).group(1))  # type: ignore[union-attr]
    assert seconds < 20
    assert ranks[other].returncode == 3, "neither aborted nor crashed"
