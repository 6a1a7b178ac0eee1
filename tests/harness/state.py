"""Process-wide state of torch that a test may change, saved once and put back after each test.

Owns the list of what is put back. Used by the workers and, for tests without ranks, by `tests/conftest.py`.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
"""Of torch's own, in every process of the tests: `python -m tests.arithmetic` runs with more than one."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A snapshot of what tests may change by accident or on purpose."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warn_only: bool
    environ: dict[str, str]
    folder: str

    @staticmethod
    def capture() -> ProcessState:
        """The state of this process now."""
        return ProcessState(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            environ=_environment(),
            folder=os.getcwd(),
        )

    def restore(self) -> None:
        """Puts the snapshot back, with gradients on and `THREADS` threads."""
        torch.set_default_dtype(self.default_dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        if torch.get_num_threads() != THREADS:
            torch.set_num_threads(THREADS)
        now = _environment()
        if now != self.environ:
            for name in now.keys() - self.environ.keys():
                del os.environ[name]
            os.environ.update(self.environ)
        os.chdir(self.folder)


def _environment() -> dict[str, str]:
    """Environment variables, but for the one by which pytest tells where it is."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def use_native_collectives() -> None:
    """From here on in this test, models that are not yet planned communicate by torch's own collectives.

    Those can be seen and counted; messages between peers cannot.
    """
    os.environ["FSDP2_COMM"] = "native"


def seed_everything(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def forget_meshes() -> None:
    """Clears DTensor's sharding caches.

    They are keyed by mesh, and meshes compare by shape, not by process group: a cached result would bring the
    mesh, and the destroyed process groups, of an earlier test into the next one.
    """
    _clear_sharding_prop_cache()
