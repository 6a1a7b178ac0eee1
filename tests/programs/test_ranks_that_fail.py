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


@pytest.mark.parametrize("case", SAID)
def test_the_others_name_it(case: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    said = [tmp_path / f"{rank}.txt" for rank in range(2)]
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with said[rank].open("w") as file:
            command = [sys.executable, str(PROGRAM), case]
            ranks.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
    try:
        ranks[0].wait(timeout=60)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
    out = said[0].read_text()
    assert re.search(SAID[case], out), out + said[1].read_text()
    seconds = int(re.search(r"rank 0 after (\d+) s", out).group(1))  # type: ignore[union-attr]
    assert seconds < 20
    assert ranks[0].returncode == 3, "neither aborted nor crashed"
