"""`extras.mutants`: every fault that may be drawn is a program of as many lines; the tests of its line judge it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from extras.mutants import run
from extras.mutants.drawn import Mutant, draw, sites
from extras.mutants.lines import LINE_OF_FILE, ROOT
from extras.mutants.run import Trace, batches, judge
from extras.mutants.table import table

SOURCE = """def area(width, height, *, doubled=False):
    if width < 0 and height is not None:
        raise ValueError(width)
    self.width = width
    note(
        width, height
    )
    return width * height
"""


def test_the_faults_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "fsdp2" / "core").mkdir(parents=True)
    (tmp_path / "fsdp2" / "core" / "area.py").write_text(SOURCE)
    found = {(each.line, each.kind): each.plant(SOURCE.encode()).decode() for each in sites(tmp_path, ("core",))}
    assert set(found) == {
        (2, "condition flipped"),
        (2, "and to or"),
        (2, "now <="),
        (2, "now is"),
        (4, "assignment dropped"),
        (5, "call dropped"),
        (6, "arguments swapped"),
    }
    assert "if ((width < 0) or (height is not None)):" in found[2, "and to or"]
    assert "height, width" in found[6, "arguments swapped"]
    assert all(planted.count("\n") == SOURCE.count("\n") for planted in found.values())


def test_all_faults_of_the_engine_can_be_planted() -> None:
    sources: dict[str, bytes] = {}
    for mutant in draw(ROOT, 400):
        source = sources.setdefault(mutant.path, (ROOT / mutant.path).read_bytes())
        planted = mutant.plant(source)
        assert planted != source and planted.count(b"\n") == source.count(b"\n"), mutant.name
        ast.parse(planted)
    assert draw(ROOT, 20) == draw(ROOT, 20) != draw(ROOT, 20, seed=1)


MUTANT = Mutant("fsdp2/core/a.py", 0, 1, 7, "now is", "x", "y")
LINE = 3 * LINE_OF_FILE + 7


def test_tests_of_the_line_are_run_and_short_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = {"quick": 0.1, "slow": 9.0, "full": 0.1, "of another line": 0.1}
    trace = Trace({test: {LINE} for test in tests}, dict(tests))
    trace.lines["of another line"] = {LINE + 1}
    asked: list[str] = []

    def attempt(bench: Path, mutant: Mutant, batch: list[str], limit: float) -> tuple[str | None, str]:
        asked.extend(batch)
        return ("full", "") if "full" in batch else (None, "")

    monkeypatch.setattr(run, "attempt", attempt)
    found = judge(MUTANT, trace, 3 * LINE_OF_FILE, Path(), lambda test: test != "full")
    assert asked == ["quick", "slow", "full"]
    assert (found.killed_by, found.short, found.running, found.run) == ("full", False, 3, 3)


def test_batches_grow_and_end() -> None:
    tests = [str(number) for number in range(2000)]
    found = list(batches(tests, dict.fromkeys(tests, 0.01)))
    assert [len(each) for each in found] == [25, 100, 300, 600]
    assert [test for batch in found for test in batch] == tests[:1025]


def test_the_table_has_every_fate(tmp_path: Path) -> None:
    fates = [("t", True, 2), ("t", False, 2), (None, False, 0), (None, False, 4)]
    file = tmp_path / "found.jsonl"
    lines = [
        {"name": f"fault {number}", "mutant": {"path": "fsdp2/core/a.py"}, "killed_by": by, "ended": "", "short": short}
        | {"running": running}
        for number, (by, short, running) in enumerate(fates)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    shown = table(file)
    assert "| `core/` | 4 | 1 | 1 | 1 | 1 |" in shown
    assert "- `fault 1`: `t`" in shown and "- `fault 3`" in shown and "fault 0" not in shown
