"""How tools write sizes, counts, lists of names and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def shown_bytes(nbytes: float) -> str:
    """A number of bytes in the largest unit in which it is at least 1: ``1.5 MiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes:.0f} B"


def shown_count(count: float) -> str:
    """A number of things in words: ``7.2 billion``."""
    for unit, scale in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count:,.0f}"


def shown_names(names: Sequence[str], limit: int = 3) -> str:
    """The first of ``names``, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """The lines of a table whose columns are as wide as needed; columns in ``right`` are aligned to the right."""
    every = [tuple(headers), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(headers))]
    rule = tuple("-" * width for width in widths)
    lines = []
    for row in (every[0], rule, *every[1:]):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def by_device_name(table: Mapping[str, Value], name: str) -> Value | None:
    """The value in ``table`` for the device of this name, matched by whole words of it; None if there is none.

    >>> by_device_name({"L40S": 1, "L4": 2}, "NVIDIA L4"), by_device_name({"L40S": 1, "L4": 2}, "NVIDIA L40")
    (2, None)
    """
    return next((value for part, value in table.items() if re.search(rf"\b{part}\b", name)), None)
