"""The suite's two processes: together they run every folder, and fail where one of them fails."""

from __future__ import annotations

import sys

import pytest

from tests.__main__ import NOTHING_COLLECTED, lanes, main, side_by_side, status_of
from tests.harness.parity_table import TESTS
from tests.unit.helpers import for_each


@pytest.mark.full
def test_together_they_have_every_folder_of_tests() -> None:
    first, beside = lanes()
    files = {path.relative_to(TESTS.parent) for path in TESTS.rglob("test_*.py")}
    assert not {*first} & {*beside}
    assert all(sum(path.is_relative_to(folder) for folder in (*first, *beside)) == 1 for path in files)


@for_each(
    ("found", "status"),
    [((0, 0), 0), ((1, 0), 1), ((0, 1), 1), ((0, -11), -11), ((NOTHING_COLLECTED, 0), 0), ((0, NOTHING_COLLECTED), 0)],
)
def test_one_failure_is_enough(found: tuple[int, int], status: int) -> None:
    assert status_of(found) == status


def test_no_tests_at_all_are_a_failure() -> None:
    assert status_of((NOTHING_COLLECTED, NOTHING_COLLECTED)) == NOTHING_COLLECTED


def test_processes_that_fail_are_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    says, fails = (
        [sys.executable, "-c", code] for code in ("print('here')", "import sys; print('there'); sys.exit(3)")
    )
    assert side_by_side(says, says) == 0
    assert side_by_side(says, fails) == side_by_side(fails, says) == 3
    assert capfd.readouterr().out.count("there") == 2


@pytest.mark.full  # 6 s
def test_a_path_is_run_as_pytest_runs_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tests/unit/test_quick.py", "-p", "no:cacheprovider"]) == 0
    assert "2 passed" in capfd.readouterr().out
