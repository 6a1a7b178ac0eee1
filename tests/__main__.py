"""`python -m tests`: the suite in two pytest processes side by side, for what runs in one process leaves cores idle.

The tests on ranks wait for each other a third of the time; meanwhile those of one process run. Arguments go to both.
With a path among them there is one process, as with pytest itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness.parity_table import NOT_SHOWN, RECORD, what_the_record_has_not_shown

ONE_PROCESS = ("tests/unit", "tests/fake_pg", "tests/programs")
"""Folders whose tests start no ranks, but for few, or programs of their own."""

NOTHING_COLLECTED = 5


def lanes() -> tuple[list[str], list[str]]:
    """The folders that hold tests, dealt out to processes: those on ranks, and the others."""
    folders = sorted({f"tests/{path.relative_to('tests').parts[0]}" for path in Path("tests").rglob("test_*.py")})
    return [folder for folder in folders if folder not in ONE_PROCESS], list(ONE_PROCESS)


def side_by_side(first: Sequence[str], second: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run both command lines, and print what the second has printed at the end; the exit status of both together."""
    with tempfile.TemporaryFile("w+") as printed:
        beside = subprocess.Popen(second, stdout=printed, stderr=subprocess.STDOUT, env=environment)
        try:
            found = [subprocess.call(first, env=environment), beside.wait()]
        except BaseException:
            beside.kill()
            raise
        printed.seek(0)
        print("----- beside the tests above", printed.read(), sep="\n", flush=True)
    return status_of(found)


def status_of(found: Sequence[int]) -> int:
    """Of two runs of pytest as of one: one that had no tests is no failure if the other had some."""
    if all(status == NOTHING_COLLECTED for status in found):
        return NOTHING_COLLECTED
    return next((status for status in found if status not in (0, NOTHING_COLLECTED)), 0)


def main(arguments: Sequence[str]) -> int:
    """Run all; the exit status of the first that failed, else 0."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    if any(Path(each.split("::")[0]).exists() for each in arguments):
        return subprocess.call(pytest)
    ranks, one_process = lanes()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        status = side_by_side([*pytest, *ranks], [*pytest, *one_process], os.environ | {RECORD: str(record)})
        missing = what_the_record_has_not_shown(record)
    if missing:
        print(f"----- {NOT_SHOWN}", *missing, sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
