"""How tools write sizes, counts and lists of names."""

from __future__ import annotations

from collections.abc import Sequence


def shown_bytes(nbytes: float) -> str:
    """A number of bytes in the largest unit that keeps it at 1 or above: ``1.5 MiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes:.0f} B"


def shown_count(count: float) -> str:
    """A number of things: ``7.2 billion``."""
    for unit, scale in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count:,.0f}"


def shown_names(names: Sequence[str], limit: int = 3) -> str:
    """Some of ``names``, and how many there are besides."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
