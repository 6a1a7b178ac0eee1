"""``python -m extras.mutants trace|run|table``: what the short suite would notice, by planted faults.

- ``trace FOLDER``: runs the whole suite, both parts, and notes which lines each test runs. Needs Python 3.12.
- ``run FOLDER --number 300 --out FILE``: draws so many faults of `core/`, `optim/`, `plugs/` and `model/`, plants them
  one by one in checkouts of this commit, and runs the tests of the line until one fails: the short suite's first.
- ``table FILE``: what came of it, as Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from extras.mutants.drawn import draw
from extras.mutants.lines import ROOT
from extras.mutants.run import Trace, run
from extras.mutants.table import table


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m extras.mutants", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tracing = commands.add_parser("trace", help="note which lines each test runs")
    tracing.add_argument("folder", type=Path)
    tracing.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    running = commands.add_parser("run", help="plant faults, and run the tests of their lines")
    running.add_argument("folder", type=Path)
    running.add_argument("--number", type=int, default=300)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--benches", type=int, default=2, help="how many faults at a time")
    running.add_argument("--out", type=Path, required=True)
    showing = commands.add_parser("table", help="what came of it")
    showing.add_argument("file", type=Path)
    asked = parser.parse_args(arguments)
    if asked.command == "table":
        print(table(asked.file))
        return 0
    if asked.command == "trace":
        asked.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests", "-p", "extras.mutants.lines", *asked.pytest]
        return subprocess.call(command, cwd=ROOT, env=os.environ | {"MUTANTS_LINES": str(asked.folder.resolve())})
    trace, short = Trace.read(asked.folder), tests("not full")
    trace.keep(short | tests("full"))
    with tempfile.TemporaryDirectory() as scratch:
        benches = [Path(scratch) / str(number) for number in range(asked.benches)]
        for bench in benches:
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(bench)], cwd=ROOT, check=True)
        try:
            run(draw(ROOT, asked.number, asked.seed), trace, benches, short.__contains__, asked.out)
        finally:
            for bench in benches:
                subprocess.run(["git", "worktree", "remove", "--force", str(bench)], cwd=ROOT, check=True)
    return 0


def tests(mark: str) -> set[str]:
    """The ids of the tests with this mark, as this checkout has them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-m", mark]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in printed.splitlines() if "::" in line}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
