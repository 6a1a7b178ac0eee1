"""Runs a client program under torchrun, and reads its report back."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 300.0
# The programs are written for torch: `IMPLEMENTATION=torch make test-clients` runs them without the swap, so that a
# failure can be told from a program that is wrong.
IMPLEMENTATION = os.environ.get("IMPLEMENTATION", "fsdp2")


@dataclass(frozen=True)
class Report:
    """What the program wrote (see `trial.py`): series of numbers, from the sharded and the unsharded training.

    Attributes:
        checkpoint: whole tensors of what it saved or handed over, by name; empty if it did not.
    """

    implementation: str
    found: dict[str, list[float]]
    expected: dict[str, list[float]]
    checkpoint: dict[str, torch.Tensor]


def run_client(
    program: str,
    *arguments: str,
    ranks: int,
    folder: Path,
    implementation: str = IMPLEMENTATION,
    options: Sequence[str] = (),
) -> Report:
    """Run ``<program>.py`` of `PROGRAMS` on ``ranks`` processes; the test fails with the end of its output if it does.

    ``options``: of `fsdp2.compat`.

    0 ranks: the program starts them itself.
    """
    report = folder / "report.json"
    swap = ["-m", "fsdp2.compat", *options] if implementation == "fsdp2" else []
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, *swap, str(PROGRAMS / f"{program}.py"), *arguments]
    environment = {
        **os.environ,
        "CLIENT_REPORT": str(report),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    # In a session of its own, with its workers: a hang must not leave them behind.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end after {TIMEOUT_S:.0f} s\n{_stop(process)[-8000:]}", pytrace=False)
    if process.returncode != 0:
        pytest.fail(f"exit code {process.returncode}\n{_root_cause(output)}", pytrace=False)
    saved = report.with_suffix(".pt")
    checkpoint = torch.load(saved, weights_only=True) if saved.exists() else {}
    return Report(**json.loads(report.read_text()), checkpoint=checkpoint)


def _stop(process: subprocess.Popen[str]) -> str:
    """End the launcher, which then ends its workers; return what they had written."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=40)  # the launcher waits 30 s for workers that do not react
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output


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
