"""Runs one case on its ranks, in processes of their own, and says how it went.

The processes are forked from this one, which has imported torch and done nothing with it: importing torch takes seconds
for each rank. A rank reports its outcome to a file and then stays until all have reported, so that no rank fails
because another one has left; then all are killed.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.torch_gaps.api import Api, NoSuchOption
from benchmarks.torch_gaps.checks import Wrong
from benchmarks.torch_gaps.registry import Case, Trial

LIMIT_S = 30.0
# How long the other ranks have after one has failed: those that wait for it do not come back.
GRACE_S = 4.0
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
class _Report:
    rank: int
    time: float
    outcome: Outcome


def run(case: Case, implementation: str) -> Outcome:
    """Runs ``case`` on all its ranks, for `LIMIT_S` at most."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank_main, args=(case, implementation, rank, Path(folder)))
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
        return _verdict(reports, crashed, case.world_size, Path(folder))


def _wait(ranks: list[multiprocessing.context.ForkProcess], folder: Path) -> list[_Report]:
    deadline = time.monotonic() + LIMIT_S
    reports: list[_Report] = []
    failed = False
    while time.monotonic() < deadline:
        reports = _reports(folder)
        ended = sum(each.exitcode is not None for each in ranks)
        if len(reports) + ended >= len(ranks):
            break
        if not failed and (ended or any(each.outcome.kind != "works" for each in reports)):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    return reports


def _verdict(reports: list[_Report], crashed: list[int], world_size: int, folder: Path) -> Outcome:
    if crashed:
        return Outcome("crashes", _crash(crashed[0], folder))
    failures = sorted((each for each in reports if each.outcome.kind != "works"), key=lambda each: each.time)
    if failures:
        return _on_ranks(failures, len(reports), world_size)
    if len(reports) < world_size:
        waiting = world_size - len(reports)
        return Outcome("hangs", "" if waiting == world_size else f"({waiting} of {world_size} ranks)")
    return Outcome("works")


def _on_ranks(failures: list[_Report], reported: int, world_size: int) -> Outcome:
    first = failures[0]
    if reported == world_size:
        return first.outcome
    return Outcome(first.outcome.kind, f"{first.outcome.detail} (rank {first.rank}; another rank waits for it)")


def _crash(exitcode: int, folder: Path) -> str:
    name = signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"
    errors = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.stderr")))
    found = re.search(r"what\(\):\s*(.+)", errors)
    return f"({name}): {_shortened(found.group(1))}" if found else f"({name})"


def _reports(folder: Path) -> list[_Report]:
    found = []
    for path in sorted(folder.glob("*.json")):
        rank, moment, kind, detail = json.loads(path.read_text())
        found.append(_Report(rank, moment, Outcome(kind, detail)))
    return found


# ---- on a rank -----------------------------------------------------------------------------------


def _rank_main(case: Case, implementation: str, rank: int, folder: Path) -> None:
    errors = os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.world_size))
    outcome = _run_here(case, implementation, rank, folder)
    report = json.dumps([rank, time.monotonic(), outcome.kind, outcome.detail])
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_text(report)
    unfinished.rename(folder / f"{rank}.json")
    signal.pause()


def _run_here(case: Case, implementation: str, rank: int, folder: Path) -> Outcome:
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.world_size)
        case.program(Trial(Api(implementation), rank, case.world_size))
    except NoSuchOption as error:
        return Outcome("no such option", _shortened(str(error)))
    except Wrong as error:
        return Outcome("wrong", _shortened(str(error)))
    except BaseException as error:
        with contextlib.suppress(Exception):
            traceback.print_exc()
        message = _shortened(str(error))
        return Outcome("raises", f"{type(error).__name__}: {message}" if message else type(error).__name__)
    return Outcome("works")


def _shortened(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # A heading ("Error(s) in loading state_dict:") says nothing without the line below it.
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    line = re.sub(r"^\[enforce fail at \S+\] ", "", re.sub(r"0x[0-9a-f]+", "0x...", line))
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3].rstrip()}..."
