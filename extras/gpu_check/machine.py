"""The machine of a report: what decides which checks can run, and what a reader of the report must know."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, versions, and the commit that is checked."""

    gpus: int
    gpu_names: tuple[str, ...]
    torch: str
    cuda: str | None
    nccl: str | None
    driver: str | None
    commit: str
    python: str

    @classmethod
    def current(cls) -> Machine:
        """This one."""
        gpus = torch.cuda.device_count()
        return cls(
            gpus=gpus,
            gpu_names=tuple(torch.cuda.get_device_name(index) for index in range(gpus)),
            torch=str(torch.__version__),
            cuda=torch.version.cuda,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
            driver=_printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader,nounits"),
            commit=(_printed("git", "rev-parse", "--short", "HEAD") or "unknown") + _dirt(),
            python=platform.python_version(),
        )

    @property
    def torch_release(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor, *_ = self.torch.split(".")
        return int(major), int(minor)

    @property
    def gpus_text(self) -> str:
        """ "is 1", "are 8"."""
        return f"{'is' if self.gpus == 1 else 'are'} {self.gpus or 'none'}"

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def _printed(*command: str) -> str | None:
    """The first line that ``command`` prints; None without such a program, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def _dirt() -> str:
    return " with changes" if _printed("git", "status", "--porcelain", "--untracked-files=no") else ""
