"""``python -m extras.gpu_check``: what only GPUs can show, with this Python, in so many minutes; a report to send."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from extras.gpu_check.clock import run_all
from extras.gpu_check.jobs import REHEARSED_RANKS, Job, Place, chosen
from extras.gpu_check.machine import Machine
from extras.gpu_check.report import FAILED, MARKDOWN, PASSED, Report, Verdict

FOLDER = Path("runs/gpu-check")
GREEN, RED, INCOMPLETE = range(3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the command line says. Exits with 1 if a job failed; else with 2 if one had no time, or none passed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m extras.gpu_check", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: 9)")
    parser.add_argument("--only", default="", metavar="NAMES", help="of jobs, with commas between")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"the report's folder (default: {FOLDER})")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--list", action="store_true", help="say what the jobs are, and run none")
    given = parser.parse_args(arguments)
    jobs = chosen(given.only)
    if given.list:
        for job in jobs:
            print(f"{job.name} ({job.kind}, at most {job.limit_s} s): {job.asks}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(RED))  # what runs is killed on the way out
    try:
        machine = Machine.current()
    except RuntimeError as error:
        sys.exit(str(error))
    place = Place(given.device, REHEARSED_RANKS if given.device == "cpu" else machine.gpus)
    report = Report(given.out, machine, place, jobs)

    def ended(job: Job, verdict: Verdict) -> None:
        report.add(job, verdict)
        said = f"{verdict.status}, {verdict.seconds:.0f} s" if verdict.seconds else verdict.status
        print(
            f"{time.monotonic() - began:4.0f} s  {job.name}: {said}", *verdict.reasons[:3], sep="\n        ", flush=True
        )

    run_all(jobs, place, machine, began + 60 * given.minutes, ended)
    print((given.out / MARKDOWN).read_text(), end="")
    if report.count(FAILED):
        sys.exit(RED)
    left = any(verdict.is_for_time for verdict in report.verdicts.values())
    sys.exit(INCOMPLETE if left or not report.count(PASSED) else GREEN)


if __name__ == "__main__":
    main()
