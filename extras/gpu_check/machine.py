"""The machine of a report: what decides which jobs can run, and what a reader of the report must know.

``python -m extras.gpu_check.machine`` prints it. `Machine.current` asks another process: one that has looked at a GPU
holds memory there. It also brings torch into the disk's cache, before clocks of jobs run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMIT = ROOT / "commit.txt"
"""Where a checkout travels without its ``.git``, its commit may be written here."""

SECONDS_TO_LOOK = 75.0


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, versions, and the commit that is checked.

    Attributes:
        gpu_gib: Memory of the first.
        is_exclusive: Whether a GPU takes one process only: then nothing runs beside each other, nor ranks on one.
        programs: Those of other people's that are there.
    """

    gpus: int
    gpu_names: tuple[str, ...]
    gpu_gib: float
    is_exclusive: bool
    torch: str
    cuda: str | None
    nccl: str | None
    driver: str | None
    commit: str
    python: str
    cores: int
    programs: tuple[str, ...]

    @classmethod
    def current(cls) -> Machine:
        """This one, as another process sees it.

        Raises:
            RuntimeError: it could not tell, with what it printed.
        """
        command = [sys.executable, "-m", "extras.gpu_check.machine"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_LOOK, cwd=ROOT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"torch was not imported in {SECONDS_TO_LOOK:.0f} s") from None
        if done.returncode:
            raise RuntimeError(f"torch and its devices cannot be asked: {done.stderr.strip()[-1500:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        return cls(**{**found, "gpu_names": tuple(found["gpu_names"]), "programs": tuple(found["programs"])})

    @property
    def gpus_text(self) -> str:
        """ "is 1", "are 8"."""
        return f"{'is' if self.gpus == 1 else 'are'} {self.gpus or 'none'}"

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def _look() -> Machine:
    import torch

    gpus = torch.cuda.device_count()
    programs = [name for name in ("compute-sanitizer",) if shutil.which(name)]
    programs += [name for name in ("pytest",) if importlib.util.find_spec(name)]
    return Machine(
        gpus=gpus,
        gpu_names=tuple(torch.cuda.get_device_name(index) for index in range(gpus)),
        gpu_gib=torch.cuda.get_device_properties(0).total_memory / 2**30 if gpus else 0.0,
        is_exclusive="Exclusive" in (_of_driver("compute_mode") or ""),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        driver=_of_driver("driver_version"),
        commit=_commit(),
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        programs=tuple(programs),
    )


def _of_driver(name: str) -> str | None:
    return _printed("nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader,nounits")


def _commit() -> str:
    found = _printed("git", "rev-parse", "--short", "HEAD")
    if found is None:
        return COMMIT.read_text().strip()[:12] if COMMIT.exists() else "unknown"
    return found + " with changes" * bool(_printed("git", "status", "--porcelain", "--untracked-files=no"))


def _printed(*command: str) -> str | None:
    """The first line that ``command`` prints; None without such a program, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


if __name__ == "__main__":
    print(json.dumps(_look().to_json()))
