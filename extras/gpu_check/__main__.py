"""``python -m extras.gpu_check [NAME ...]``: run the checks, all or those named, and write a report to send.

It goes on where an earlier run on the same machine, torch and commit has ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from extras.gpu_check import one_gpu, several_gpus
from extras.gpu_check.check import Check, Verdict
from extras.gpu_check.machine import Machine
from extras.gpu_check.report import MARKDOWN, Report
from extras.gpu_check.runs import Outcome, Place

CHECKS: tuple[Check, ...] = (*one_gpu.CHECKS, *several_gpus.CHECKS)
FOLDER = Path("runs/gpu-check")


def chosen(names: Sequence[str]) -> list[Check]:
    """Those of ``names``, or of numbers; all if there are none.

    Raises:
        SystemExit: there is no such check.
    """
    known = {key: check for check in CHECKS for key in (check.name, str(check.number))}
    unknown = [name for name in names if name not in known]
    if unknown:
        listed = ", ".join(f"{check.number} {check.name}" for check in CHECKS)
        raise SystemExit(f"unknown: {', '.join(unknown)}; the checks are {listed}")
    wanted = {known[name].name for name in names} or {check.name for check in CHECKS}
    return [check for check in CHECKS if check.name in wanted]


def check_all(checks: Sequence[Check], report: Report, machine: Machine, *, again: bool) -> None:
    """Run what can run and has not, the shortest first, as they might be stopped; those of one GPU on one."""
    for check in sorted(checks, key=lambda check: check.limit_s):
        if report.is_done(check) and not again:
            print(f"{check.number} {check.name}: {report.verdicts[check.name].status} before", flush=True)
            continue
        if reason := check.cannot_run(machine):
            report.add(check, Verdict("cannot run", [reason]))
            print(f"{check.number} {check.name}: cannot run: {reason}", flush=True)
            continue
        print(f"{check.number} {check.name}: {check.asks} (at most {check.limit_s / 60:.0f} minutes)", flush=True)
        verdict = check.verdict(Place("cuda", machine.gpus), after=_show)
        report.add(check, verdict)
        print(f"{check.number} {check.name}: {verdict.status}, {verdict.seconds:.0f} s", flush=True)
        for complaint in verdict.complaints:
            print(f"    {complaint}", flush=True)


def _show(outcome: Outcome) -> None:
    print(f"    {outcome.title}: {outcome.seconds:.0f} s", flush=True)


def main() -> None:
    """Runs what the command line says; the exit status is 1 if a check failed or hung, or none could run."""
    parser = argparse.ArgumentParser(prog="python -m extras.gpu_check", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of checks, or their numbers; all if none")
    parser.add_argument("--again", action="store_true", help="also what was run before")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"of the report; {FOLDER} if not said")
    parser.add_argument("--list", action="store_true", help="say what the checks are, and run none")
    given = parser.parse_args()
    checks = chosen(given.names)
    if given.list:
        for check in checks:
            print(f"{check.number} {check.name}: {check.asks}\n    {check.expected}")
        return
    machine = Machine.current()
    report = Report(given.folder, machine, CHECKS)
    if report.resume():
        print(f"goes on from {given.folder / MARKDOWN}; --again for all anew", flush=True)
    check_all(checks, report, machine, again=given.again)
    passed, bad, left = report.count("passed"), report.count("failed", "hung"), report.count("cannot run")
    if not passed + bad:
        raise SystemExit(f"none of the {left} checks can run here: {given.folder / MARKDOWN} says why")
    print(f"{passed} passed, {bad} failed, {left} cannot run here; please send {given.folder}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
