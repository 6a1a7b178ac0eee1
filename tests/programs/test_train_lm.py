"""The main job as a user runs it, under torchrun: killed, interrupted, resumed, compared with the unsharded training.

All of it belongs to `make test-full`: each program imports torch and trains in new processes (the times stand beside).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.launching import EXAMPLES, command, losses, output_of

pytestmark = pytest.mark.full

ARGUMENTS = [
    "--steps",
    "30",
    "--checkpoint-every",
    "10",
    "--log-every",
    "1",
    "--evaluate-every",
    "0",
    "--sample-bytes",
    "0",
]


def train(run_dir: Path, *extra: str, ranks: int = 2) -> None:
    output_of("train_lm.py", *ARGUMENTS, "--run-dir", str(run_dir), *extra, ranks=ranks)


def stop_after(run_dir: Path, step: int, how: signal.Signals, *extra: str) -> None:
    """Start a run, and send ``how`` to all its processes once ``step`` is logged."""
    process = subprocess.Popen(
        command("train_lm.py", *ARGUMENTS, "--run-dir", str(run_dir), *extra, ranks=2),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and step in losses(run_dir):
            break
        time.sleep(0.05)
    os.killpg(process.pid, how)
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of 30 steps on 2 ranks. About 25 s."""
    run_dir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(run_dir)
    return losses(run_dir)


@pytest.mark.parametrize(
    ("how", "extra"),
    [(signal.SIGKILL, ()), (signal.SIGKILL, ("--asynchronous-checkpoints",)), (signal.SIGINT, ())],
    ids=["SIGKILL", "SIGKILL-asynchronous", "SIGINT"],
)
def test_resuming_on_as_many_ranks_is_bitwise_the_same(
    how: signal.Signals, extra: tuple[str, ...], uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    """About 35 s each."""
    stop_after(tmp_path / "run", 15, how, *extra)
    train(tmp_path / "run", "--resume")
    assert not [*(tmp_path / "run" / "checkpoints").glob(".*")]
    found = losses(tmp_path / "run")
    assert sorted(found) == sorted(uninterrupted) == list(range(1, 31))
    assert found == uninterrupted


@pytest.mark.parametrize("ranks", [1, 4])
def test_resuming_on_another_number_of_ranks(ranks: int, uninterrupted: dict[int, float], tmp_path: Path) -> None:
    """About 50 s each."""
    stop_after(tmp_path / "run", 15, signal.SIGKILL)
    train(tmp_path / "run", "--resume", ranks=ranks)
    found = losses(tmp_path / "run")
    # The same numbers are added up in another order, in fp32, over twenty steps.
    assert found == pytest.approx(uninterrupted, rel=1e-4)


def test_the_check_against_the_unsharded_training() -> None:
    """`make train-check`. About 35 s."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_check.py")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
