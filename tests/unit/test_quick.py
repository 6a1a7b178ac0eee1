"""`make quick` names files that exist, and starts no more than two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.quick import FEWER_THAN, ON_ONE, ON_TWO

ROOT = Path(__file__).parents[2]


def test_files_of_the_quick_run_exist() -> None:
    assert [each for each in (*ON_ONE, *ON_TWO) if not (ROOT / each).exists()] == []
    assert all(each.split("/")[1] in ("unit", "fake_pg") for each in ON_ONE)


def test_the_quick_run_leaves_out_what_needs_more_ranks() -> None:
    assert all(ranks in FEWER_THAN for ranks in ("3ranks", "4ranks", "8ranks", "4threads"))
