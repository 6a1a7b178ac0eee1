"""Runs one case on its ranks, in processes of their own, and says how it went.

The processes are forked from this one, which has imported torch and done nothing with it: importing torch takes seconds
for each rank. A rank reports its outcome to a file and then stays until all have reported, so that no rank fails
because another one has left; then all are killed.

A hang is told by the processor: ranks that together compute nothing for `LIMIT_S` wait for each other. (On a busy
machine a rank that computes may well take longer.)
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from extras.torch_gaps.api import Api, NoSuchOption
from extras.torch_gaps.checks import Wrong
from extras.torch_gaps.registry import Case, Trial

LIMIT_S = 30.0
# What ranks that only wait may use of the processor in that time, all of them together.
IDLE_CPU_S = 0.1
# At the latest then, however busy the machine is.
CEILING_S = 300.0
# The same once a rank has failed: the others may wait for it, or be about to fail as well.
GRACE_S = 8.0
MAX_MESSAGE = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case went.

    Attributes:
        kind: works, raises, hangs, wrong, crashes, or "no such option".
        detail: the error and the first line of its message, the difference, what is missing.
    """

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "no such option":
            return f"{self.kind}: {self.detail}" if self.detail else self.kind
        return " ".join(filter(None, (self.kind, self.detail)))


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank said, and when."""

    rank: int
    time: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Ran:
    """How a case went on all its ranks.

    Attributes:
        ranks: how many there were.
        reports: of the ranks that came to an end, in their order.
        crashed: exit statuses of those whose processes ended.
        verdict: of all together.
    """

    ranks: int
    reports: tuple[Report, ...]
    crashed: tuple[int, ...]
    verdict: Outcome


def run(case: Case, implementation: str) -> Outcome:
    """Runs ``case`` on all its ranks until all have reported, one has failed, or they hang."""
    return run_ranks(case, implementation).verdict


def run_ranks(case: Case, implementation: str, *, max_message: int = MAX_MESSAGE) -> Ran:
    """The same; says how each rank ended, with up to ``max_message`` characters of its error's message."""
    context = multiprocessing.get_context("fork")
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(case, implementation, rank, port, Path(folder), max_message))
            for rank in range(case.world_size)
        ]
        for each in ranks:
            each.start()
        try:
            reports = _wait(ranks, Path(folder))
            crashed = [each.exitcode for each in ranks if each.exitcode is not None]
        finally:
            for each in ranks:
                each.kill()
                each.join()
        verdict = _verdict(reports, crashed, case.world_size, Path(folder))
        return Ran(case.world_size, tuple(reports), tuple(crashed), verdict)


def _wait(ranks: list[multiprocessing.context.ForkProcess], folder: Path) -> list[Report]:
    deadline = time.monotonic() + CEILING_S
    idle_since, idle_cpu_s = time.monotonic(), _cpu_s(ranks)
    reports: list[Report] = []
    limit_s = LIMIT_S
    while time.monotonic() < min(deadline, idle_since + limit_s):
        if abs(_cpu_s(ranks) - idle_cpu_s) > IDLE_CPU_S:
            idle_since, idle_cpu_s = time.monotonic(), _cpu_s(ranks)
        reports = _reports(folder)
        ended = sum(each.exitcode is not None for each in ranks)
        if len(reports) + ended >= len(ranks):
            break
        if limit_s == LIMIT_S and (ended or any(each.outcome.kind != "works" for each in reports)):
            limit_s, idle_since = GRACE_S, time.monotonic()
        time.sleep(0.02)
    return reports


def _cpu_s(ranks: list[multiprocessing.context.ForkProcess]) -> float:
    """Processor time that the ranks have used so far, without those that have ended."""
    ticks = 0
    for each in ranks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def _verdict(reports: list[Report], crashed: list[int], world_size: int, folder: Path) -> Outcome:
    if crashed:
        return Outcome("crashes", _crash(crashed[0], folder))
    failures = [each for each in reports if each.outcome.kind != "works"]
    if failures:
        # What the others report later is often that the first has left.
        return min(failures, key=lambda each: each.time).outcome
    if len(reports) < world_size:
        waiting = world_size - len(reports)
        return Outcome("hangs", "" if waiting == world_size else f"({waiting} of {world_size} ranks)")
    return Outcome("works")


def _crash(exitcode: int, folder: Path) -> str:
    name = signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"
    errors = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.stderr")))
    found = re.search(r"what\(\):\s*(.+)", errors)
    return f"({name}): {_shortened(found.group(1))}" if found else f"({name})"


def _reports(folder: Path) -> list[Report]:
    found = []
    for path in sorted(folder.glob("*.json")):
        rank, moment, kind, detail = json.loads(path.read_text())
        found.append(Report(rank, moment, Outcome(kind, detail)))
    return found


# ---- on a rank -----------------------------------------------------------------------------------


def _rank_main(case: Case, implementation: str, rank: int, port: int, folder: Path, max_message: int) -> None:
    errors = os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.world_size))
    outcome = _run_here(case, implementation, rank, port, max_message)
    report = json.dumps([rank, time.monotonic(), outcome.kind, outcome.detail])
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_text(report)
    unfinished.rename(folder / f"{rank}.json")
    signal.pause()


def _end_with_the_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _run_here(case: Case, implementation: str, rank: int, port: int, max_message: int) -> Outcome:
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.world_size)
        case.program(Trial(Api(implementation), rank, case.world_size))
    except NoSuchOption as error:
        return Outcome("no such option", _shortened(str(error)))
    except Wrong as error:
        return Outcome("wrong", _shortened(str(error)))
    except BaseException as error:
        with contextlib.suppress(Exception):
            traceback.print_exc()
        message = _shortened(str(error), max_message)
        return Outcome("raises", f"{type(error).__name__}: {message}" if message else type(error).__name__)
    return Outcome("works")


def _shortened(message: str, limit: int = MAX_MESSAGE) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # A heading ("Error(s) in loading state_dict:") says nothing without the line below it.
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    line = re.sub(r"^\[enforce fail at \S+\] ", "", re.sub(r"0x[0-9a-f]+", "0x...", line))
    return line if len(line) <= limit else f"{line[: limit - 3].rstrip()}..."
