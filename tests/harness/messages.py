"""What the pytest process and its workers say to each other: plain, frozen, picklable records.

Owns the vocabulary of the pipe protocol; knows neither processes nor torch. One test is four messages per
rank, so that no rank leaves its process group while another is still in a collective:

    parent                      worker (one per rank)
    Job            ─────────▶   make the process group, run the body
                   ◀─────────   Outcome
    (all outcomes are in)
    Command.TEAR_DOWN ──────▶   destroy the process group, restore torch's global state
                   ◀─────────   Outcome (of the teardown)
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Command(enum.Enum):
    """Messages to a worker that carry nothing else."""

    TEAR_DOWN = "tear down"


class Status(enum.Enum):
    """How a rank left a body."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"
    DIED = "died"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class Job:
    """One body to run on every rank.

    Attributes:
        number: Unique within a pool; prefixes the keys of the store, so that tests never meet.
        module: Importable name of the module of the body.
        qualname: Name of the body in that module.
        arguments: Pickle of `(args, kwargs)`, the same on all ranks.
        warning_filters: `warnings.filters` of the parent while the test runs.
        seed: Seed of every random generator, the same on all ranks.
    """

    number: int
    module: str
    qualname: str
    arguments: bytes
    warning_filters: tuple[Any, ...]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank left one job.

    Attributes:
        status: See `Status`.
        value: Pickle of what the body returned, for `PASSED`.
        summary: One line: the exception, the reason of a skip, the signal of a death.
        details: Traceback or stack, many lines.
        finished_at: `time.monotonic()`, one clock for all processes of the machine: orders root causes.
    """

    status: Status
    value: bytes = b""
    summary: str = ""
    details: str = ""
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker needs to know once, at its start.

    Attributes:
        rank: Rank of this worker in every process group of this pool.
        world_size: Ranks of this pool.
        store_port: Port of the `TCPStore` that the parent serves on the loopback device.
        root: Repository root: working directory of the worker, and where pytest's configuration is.
        scratch: Folder of the files below; the parent reads them.
    """

    rank: int
    world_size: int
    store_port: int
    root: Path
    scratch: Path

    @property
    def output_path(self) -> Path:
        """Standard output and error of the worker."""
        return self.scratch / f"rank{self.rank}.output"

    @property
    def stack_path(self) -> Path:
        """Where faulthandler writes the stacks of the worker."""
        return self.scratch / f"rank{self.rank}.stack"


def read_from(path: Path, offset: int = 0) -> str:
    """Text of `path` from byte `offset` on; empty where there is no file (yet)."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(offset, os.SEEK_SET)
        return file.read().decode(errors="replace")
