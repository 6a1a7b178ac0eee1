"""``python -m extras.gpu_check.tests PATHS...``: pytest, whose failures are said at once: a killed run loses none."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

import pytest

from extras.gpu_check.says import COMPLAINTS, SKIPPED, say

LONGEST = 800
ALL_SKIPPED = "all tests were skipped"


class Says:
    """A plugin of pytest's.

    Attributes:
        counts: of tests, by what became of them.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reason = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that ended; name it, if it failed."""
        if report.failed:
            crash: Any = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash is not None else report.longreprtext)
            print()  # after its name
            say(report.nodeid, {COMPLAINTS: [why[:LONGEST]]})
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reason = report.longrepr[2].removeprefix("Skipped: ")
        if report.failed or report.skipped or report.when == "call":
            self.counts[report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Say the counts."""
        found: dict[str, Any] = dict(self.counts)
        if not self.counts:
            found[COMPLAINTS] = ["no test was collected"]
        elif set(self.counts) == {"skipped"}:
            found[SKIPPED] = f"{ALL_SKIPPED}: {self.reason}"
        print()
        say("tests", found)


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m extras.gpu_check.tests", description=__doc__)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("-k", dest="those", default="", help="as pytest's")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: they skip themselves")
    given = parser.parse_args()
    arguments = [
        *given.paths,
        "-k",
        given.those,
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--maxfail=12",
        "-vv",
        "-m",
        "not full",
    ]
    sys.exit(pytest.main(arguments, plugins=[Says()]))


if __name__ == "__main__":
    main()
