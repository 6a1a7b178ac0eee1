"""`python -m tests`: the suite in two processes of pytest side by side, as ranks wait for each other a quarter of it.

Arguments go to both. With a path among them there is one process, as with pytest itself.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BESIDE = (
    "tests/unit",
    "tests/fake_pg",
    "tests/programs",
    "tests/parity",
    "tests/compiled",
    "tests/multi_rank/checkpoints",
    "tests/multi_rank/parameters",
    "tests/multi_rank/wrapping",
)
"""Folders that take as long together as all others."""

NOTHING_COLLECTED = 5


def lanes() -> tuple[list[str], list[str]]:
    """The folders that hold tests, dealt out to the two processes."""
    found = [path.relative_to("tests").parts for path in Path("tests").rglob("test_*.py")]
    folders = sorted({"/".join(("tests", *parts[: 2 if parts[0] == "multi_rank" else 1])) for parts in found})
    return [folder for folder in folders if folder not in BESIDE], list(BESIDE)


def side_by_side(first: Sequence[str], second: Sequence[str]) -> int:
    """Run both command lines, and print what the second has printed at the end; the exit status of both together."""
    with tempfile.TemporaryFile("w+") as printed:
        beside = subprocess.Popen(second, stdout=printed, stderr=subprocess.STDOUT)
        try:
            found = [subprocess.call(first), beside.wait()]
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
    first, beside = lanes()
    return side_by_side([*pytest, *first], [*pytest, *beside])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
