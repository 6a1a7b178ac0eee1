"""``python -m extras.gpu_check.program NAME``: run a program of `programs/` on some ranks, each a process.

A program has ``run(setting)``, which returns what it measured, and raises or lists under "complaints" what is wrong.
Every rank leaves that in a file of its own. A rank that fails ends the others, after the time for a clean end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from extras.gpu_check.faults import planted
from extras.gpu_check.runs import COMPLAINTS, Found
from extras.gpu_check.setting import Setting

SECONDS_TO_END = 20.0
FAILED = 3


def found_by(name: str, setting: Setting, fault: str = "") -> Found:
    """What program ``name`` measures on this rank, with complaints; an exception is one."""
    program: Any = importlib.import_module(f"extras.gpu_check.programs.{name}")
    try:
        with planted(fault):
            found = program.run(setting)
    except Exception as failure:
        traceback.print_exc()
        found = {COMPLAINTS: [f"{type(failure).__name__}: {failure}"[:2000]]}
    return {COMPLAINTS: [], **found}


def _run_rank(name: str, setting: Setting, fault: str, results: Path) -> None:
    torch.set_num_threads(1)
    found = found_by(name, setting, fault)
    (results / f"rank{setting.rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    if found[COMPLAINTS]:
        os._exit(FAILED)  # an exit may wait for what other ranks will not do


def _wait_for(ranks: list[BaseProcess]) -> int:
    """Until all have ended, or those that did not fail have had their time; the exit status."""
    end = float("inf")
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < end:
        if any(rank.exitcode for rank in ranks):
            end = min(end, time.monotonic() + SECONDS_TO_END)
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    return next((rank.exitcode for rank in ranks if rank.exitcode), 0)


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m extras.gpu_check.program", description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--results", type=Path, required=True, help="a folder, for a file of each rank")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--plants", default="", help="a fault")
    given = parser.parse_args()
    options = dict(each.split("=", 1) for each in given.option)
    context = multiprocessing.get_context("spawn")
    ranks: list[BaseProcess] = []
    for rank in range(given.ranks):
        setting = Setting(given.device, rank, given.ranks, str(given.results / "store"), options)
        arguments = (given.name, setting, given.plants, given.results)
        ranks.append(context.Process(target=_run_rank, args=arguments, daemon=True))
    for process in ranks:
        process.start()
    sys.exit(_wait_for(ranks))


if __name__ == "__main__":
    main()
