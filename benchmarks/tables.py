"""Plain-text tables: titles, right-aligned columns, notes. Knows nothing of what the cells mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Table:
    """A titled table; every row has as many cells as `columns`. The first column names the row."""

    title: str
    columns: Sequence[str]
    notes: Sequence[str] = ()
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Appends a row. Raises ValueError when the number of cells is not that of the columns."""
        if len(cells) != len(self.columns):
            raise ValueError(f"table '{self.title}' has {len(self.columns)} columns, got {len(cells)} cells")
        self.rows.append(list(cells))

    def render(self) -> str:
        """The table as text: the first column aligned left, the others right."""
        lines = [list(self.columns), *self.rows]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        body = [_join(line, widths) for line in lines]
        rule = "-" * max(len(text) for text in body)
        return "\n".join([self.title, rule, body[0], rule, *body[1:], *(f"  {note}" for note in self.notes)])


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])
