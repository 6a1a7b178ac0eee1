"""Reads docs/parity.md, and pages like it: rows, the tests that they name, and which of them a run has shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "parity.md"
DOCUMENTED, VERSIONS, DIFFERENCES = "What torch documents", "Where the versions of torch differ", "Where ours differs"

_TEST = re.compile(r"`([\w/]+\.py::\w+)`")
_NAME = re.compile(r"`([\w.]+)(?:\(([\w, ]+)\))?`")


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        table: the heading that its table stands under.
        cells: all columns, stripped.
        tests: what the last one names, as ``folder/file.py::function`` below ``tests/``.
    """

    table: str
    cells: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """What the first column is about: of ```C.m(a, b)``` that is ``C.m``, ``C.m(a)`` and ``C.m(b)``."""
        found = _NAME.fullmatch(self.cells[0])
        if found is None:
            return []
        name, arguments = found.groups()
        return [name, *(f"{name}({each.strip()})" for each in (arguments or "").split(",") if each)]

    @property
    def verdict(self) -> str:
        """What stands under "fsdp2"."""
        return self.cells[2]


@cache
def rows(document: Path = DOCUMENT) -> tuple[Row, ...]:
    """All rows of all tables, in order."""
    found, table = [], ""
    for line in document.read_text().splitlines():
        if line.startswith("## "):
            table = line[3:]
        elif line.startswith("|") and not line.startswith(("|---", "| name |", "| what |")):
            cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
            found.append(Row(table, cells, tuple(_TEST.findall(cells[-1]))))
    return tuple(found)


def rows_of(table: str) -> list[Row]:
    """Those under the heading that begins so."""
    return [row for row in rows() if row.table.startswith(table)]


def shown_by(name: str) -> list[str]:
    """The tests that show ``name``: with an argument, ``FSDPModule.unshard(async_op)``, those of its rows only."""
    return list(dict.fromkeys(test for row in rows() if name in row.names for test in row.tests))


RECORD = "FSDP2_TEST_RECORD"
"""Names a file to which each part of a whole run adds the tests that it ran (see ``tests.__main__``)."""


def report_what_was_not_shown(reporter: Any) -> None:
    """At the end of a whole run, name the rows of which some test did not run (or was skipped).

    Whole is a run that was not narrowed by ``-k`` and had tests of every file that is named. A part of one records what
    it ran, for `what_was_not_shown`.

    Args:
        reporter: pytest's terminal reporter.
    """
    reports = {kind: reporter.stats.get(kind, []) for kind in ("passed", "failed", "skipped")}
    found = {each.nodeid: kind for kind, each_kind in reports.items() for each in each_kind if hasattr(each, "nodeid")}
    if reporter.config.option.keyword:
        return
    record = os.environ.get(RECORD)
    if record is not None:
        with Path(record).open("a") as file:
            file.writelines(f"{kind} {node}\n" for node, kind in found.items())
        return
    missing = what_was_not_shown(found)
    if missing:
        reporter.section(NOT_SHOWN)
        for test in missing:
            reporter.line(test)


NOT_SHOWN = "rows of docs/parity.md that this run has not shown"


def what_was_not_shown(found: Mapping[str, str]) -> list[str]:
    """Tests named in rows that did not run, if ``found`` (how each test ended) has some of every file that is named."""
    named = {f"tests/{test}" for row in rows() for test in row.tests}
    if not {test.split("::")[0] for test in named} <= {node.split("::")[0] for node in found}:
        return []
    ran = {node.split("[")[0] for node, kind in found.items() if kind in ("passed", "failed")}
    return sorted(named - ran)


def what_the_record_has_not_shown(record: Path) -> list[str]:
    """The same, of the parts that have written ``record``."""
    lines = record.read_text().splitlines() if record.exists() else []
    return what_was_not_shown({node: kind for kind, _, node in (line.partition(" ") for line in lines)})
