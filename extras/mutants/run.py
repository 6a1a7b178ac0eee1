"""Plant faults one by one, and run the tests that run their lines until one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue

from extras.mutants.drawn import Mutant
from extras.mutants.lines import LINE_OF_FILE, ROOT, files, read

BATCHES = ((5.0, 25), (15.0, 100), (40.0, 300), (120.0, 600))
"""Seconds, by the trace, and tests in the batches of a mutant; what is beyond is not run."""
START_S = 60.0
TESTS_FAILED, NO_SUCH_TEST = 1, 4


@dataclass
class Trace:
    """What tests run: by test its lines and seconds."""

    lines: dict[str, set[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, folder: Path) -> Trace:
        """From the files that `extras.mutants.lines` has written."""
        trace = cls()
        for head, lines in read(folder):
            test = head["test"]
            trace.lines.setdefault(test, set()).update(lines)
            trace.seconds[test] = trace.seconds.get(test, 0.0) + head["seconds"]
            if head["failed"]:
                trace.failed.add(test)
        return trace

    def keep(self, tests: Collection[str]) -> None:
        """Forget the tests that there are not any more."""
        self.lines = {test: lines for test, lines in self.lines.items() if test in tests}

    def tests_of(self, number: int) -> list[str]:
        """The tests that run this line, the most particular and shortest first."""
        found = [test for test, lines in self.lines.items() if number in lines and test not in self.failed]
        return sorted(found, key=lambda test: (len(self.lines[test]) + 300) * (self.seconds[test] + 0.05))


@dataclass
class Found:
    """What has become of a mutant."""

    mutant: Mutant
    running: int
    """How many tests run its line."""
    run: int = 0
    """How many of them were run."""
    killed_by: str | None = None
    short: bool = False
    """Whether the short suite has killed it."""
    ended: str = ""
    """Why no test is named where it is killed: a crash of pytest, no end."""

    @property
    def killed(self) -> bool:
        return bool(self.killed_by or self.ended)


def numbers(root: Path) -> dict[str, int]:
    """The first number of a file's lines, see `extras.mutants.lines`."""
    return {str(path.relative_to(root)): index * LINE_OF_FILE for index, path in enumerate(files(root))}


def batches(tests: Sequence[str], seconds: Mapping[str, float]) -> Iterator[list[str]]:
    """``tests`` in turns of `BATCHES`."""
    left = list(tests)
    for limit, number in BATCHES:
        batch: list[str] = []
        spent = 0.0
        while left and spent < limit and len(batch) < number:
            batch.append(left.pop(0))
            spent += seconds[batch[-1]]
        if batch:
            yield batch


def attempt(bench: Path, mutant: Mutant, tests: Sequence[str], limit: float) -> tuple[str | None, str]:
    """The test that fails first with this fault, or why there is none."""
    path = bench / mutant.path
    source = path.read_bytes()
    path.write_bytes(mutant.plant(source))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "extras.mutants.hurried", "-p", "no:cacheprovider"]
    command += ["--tb=no", "-o", "addopts=", *tests]
    environment = os.environ | {"PYTHONPATH": str(bench), "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, cwd=bench, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None, "no end"
    finally:
        path.write_bytes(source)
    if run.returncode == 0:
        return None, ""
    if run.returncode == TESTS_FAILED:
        lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return (lines[0].split(" ", 1)[1].split(" - ")[0] if lines else "?"), ""
    if run.returncode == NO_SUCH_TEST and "not found" in run.stderr + run.stdout:
        raise RuntimeError(f"the trace is of another commit: {run.stdout[-500:]}{run.stderr[-500:]}")
    return None, f"status {run.returncode}"


def judge(mutant: Mutant, trace: Trace, first: int, bench: Path, short: Callable[[str], bool]) -> Found:
    """Run the tests of the line, the short suite's before all others, until one fails."""
    tests = trace.tests_of(first + mutant.line)
    found = Found(mutant, len(tests))
    chosen = [test for test in tests if short(test)]
    others = [test for test in tests if not short(test)]
    for group, found.short in ((chosen, True), (others, False)):
        for batch in batches(group, trace.seconds):
            limit = START_S + 6 * sum(trace.seconds[test] for test in batch)
            found.killed_by, found.ended = attempt(bench, mutant, batch, limit)
            found.run += len(batch)
            if found.killed:
                return found
    return found


def run(
    mutants: Iterable[Mutant], trace: Trace, benches: Sequence[Path], short: Callable[[str], bool], out: Path
) -> None:
    """Judge all, each in a checkout of its own; a line of JSON in ``out`` for each. What is there is not run again."""
    done = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set()
    free: Queue[Path] = Queue()
    for bench in benches:
        free.put(bench)
    first = numbers(ROOT)

    def one(mutant: Mutant) -> None:
        bench = free.get()
        try:
            found = judge(mutant, trace, first[mutant.path], bench, short)
        finally:
            free.put(bench)
        with out.open("a") as file:
            file.write(json.dumps({"name": mutant.name} | asdict(found)) + "\n")

    with ThreadPoolExecutor(len(benches)) as pool:
        list(pool.map(one, [mutant for mutant in mutants if mutant.name not in done]))
