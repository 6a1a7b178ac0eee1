"""Starting the example programs under torchrun, as a user does, and reading what a training run has logged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def command(program: str, *arguments: str, ranks: int) -> list[str]:
    """The command line that starts ``examples/<program>``, or a module (``-m name``), on ``ranks`` processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *([program] if program == "-m" else [str(EXAMPLES / program)]), *arguments]


def output_of(program: str, *arguments: str, ranks: int) -> str:
    """Run it to its end; return what it printed. Fails the test, with all messages, where the program fails."""
    done = subprocess.run(command(program, *arguments, ranks=ranks), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(run_dir: Path) -> dict[int, float]:
    """Training losses of a run of ``train_lm.py``, by step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
