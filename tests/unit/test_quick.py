"""`make quick` names files that exist, and starts no more than two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.quick import BESIDE, FIRST, LEFT_IN

ROOT = Path(__file__).parents[2]


def test_files_of_the_quick_run_exist() -> None:
    assert [each for each in (*BESIDE, *FIRST) if not (ROOT / each).exists()] == []


def test_the_quick_run_leaves_out_what_needs_more_ranks() -> None:
    assert all(ranks in LEFT_IN for ranks in ("3ranks", "4ranks", "8ranks", "4threads"))
