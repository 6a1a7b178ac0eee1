"""Reads docs/parity.md, and pages like it: rows, and the tests that they name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
