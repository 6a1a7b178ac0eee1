"""`python -m tests`: the suite in two pytest processes side by side, for what runs in one process leaves cores idle.

The tests on ranks wait for each other a third of the time; meanwhile those of one process run. Arguments go to both.
With a path among them there is one process, as with pytest itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.unit.parity_table import NOT_SHOWN, RECORD, what_the_record_has_not_shown

ONE_PROCESS = ("tests/unit", "tests/fake_pg")
"""Folders whose tests start no ranks."""

NOTHING_COLLECTED = 5


def lanes() -> list[list[str]]:
    """The folders that hold tests, dealt out to processes."""
    folders = sorted({f"tests/{path.relative_to('tests').parts[0]}" for path in Path("tests").rglob("test_*.py")})
    return [[folder for folder in folders if folder not in ONE_PROCESS], list(ONE_PROCESS)]


def main(arguments: list[str]) -> int:
    """Run all lanes; the exit status of the first that failed, else 0."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    if any(Path(each.split("::")[0]).exists() for each in arguments):
        return subprocess.call(pytest)
    ranks, one_process = lanes()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/printed", "w+") as printed:
        record = Path(folder) / "record"
        environment = os.environ | {RECORD: str(record)}
        beside = subprocess.Popen([*pytest, *one_process], stdout=printed, stderr=subprocess.STDOUT, env=environment)
        try:
            found = [subprocess.call([*pytest, *ranks], env=environment), beside.wait()]
        except BaseException:
            beside.kill()
            raise
        printed.seek(0)
        print(f"----- {', '.join(one_process)}, beside the tests above", printed.read(), sep="\n", flush=True)
        missing = what_the_record_has_not_shown(record)
        if missing:
            print(f"----- {NOT_SHOWN}", *missing, sep="\n", flush=True)
    if found == [NOTHING_COLLECTED] * len(found):
        return NOTHING_COLLECTED
    return next((status for status in found if status not in (0, NOTHING_COLLECTED)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
