"""What commands print on a terminal while something takes long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that ``what`` is under way, until the block ends. Its progress is not known."""
    shows = sys.stderr.isatty()
    if shows:
        print(f"{what} ...", end="", flush=True, file=sys.stderr)
    try:
        yield
    finally:
        if shows:
            print(f"\r{' ' * (len(what) + 4)}\r", end="", flush=True, file=sys.stderr)
