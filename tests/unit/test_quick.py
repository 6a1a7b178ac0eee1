"""`make quick` names files that exist, and starts no more than two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.quick import BESIDE, FIRST, LEFT_IN

ROOT = Path(__file__).parents[2]


def test_what_the_quick_run_names_exists() -> None:
    for each in (*BESIDE, *FIRST):
        path, _, test = each.partition("::")
        assert (ROOT / path).exists(), path
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), each


def test_the_quick_run_leaves_out_what_needs_more_ranks() -> None:
    assert all(ranks in LEFT_IN for ranks in ("3ranks", "4ranks", "8ranks", "4threads"))
