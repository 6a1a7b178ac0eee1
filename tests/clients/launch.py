"""Runs a client program under torchrun, and reads its report back."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 300.0
# The programs are written for torch: `IMPLEMENTATION=torch make test-clients` runs them without the swap, so that a
# failure can be told from a program that is wrong.
IMPLEMENTATION = os.environ.get("IMPLEMENTATION", "fsdp2")


@dataclass(frozen=True)
class Report:
    """What the program wrote (`programs/trial.py`): series of numbers, from the sharded and the unsharded training."""

    implementation: str
    found: dict[str, list[float]]
    expected: dict[str, list[float]]


def run_client(program: str, *arguments: str, ranks: int, folder: Path) -> Report:
    """Run ``programs/<program>.py`` on ``ranks`` processes; the test fails with the end of its output if it does."""
    report = folder / "report.json"
    swap = ["-m", "fsdp2.compat"] if IMPLEMENTATION == "fsdp2" else []
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, *swap, str(PROGRAMS / f"{program}.py"), *arguments]
    environment = {
        **os.environ,
        "CLIENT_REPORT": str(report),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"") + (expired.stderr or b"")
        pytest.fail(f"no end after {TIMEOUT_S:.0f} s\n{output.decode(errors='replace')[-8000:]}", pytrace=False)
    if done.returncode != 0:
        pytest.fail(f"exit code {done.returncode}\n{_root_cause(done.stdout + done.stderr)}", pytrace=False)
    return Report(**json.loads(report.read_text()))


def _root_cause(output: str) -> str:
    """The lines of the first rank that failed, without those of the launcher."""
    lines = output.splitlines()
    own = [line for line in lines if line.startswith("[rank")]
    first = own[0].partition(":")[0] if own else ""
    chosen = [line for line in own if line.startswith(first)] or lines
    return "\n".join(chosen[-60:])


def require(*packages: str) -> None:
    """Skip the test unless all of them are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `make test-clients` has an environment with the clients")
