"""Bars for what takes longer than a second, on a terminal, with tqdm if it is installed; elsewhere nothing is shown.

But for `Telling`: what takes minutes says so elsewhere, too, a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")

AFTER_SECONDS = 1.0
LINE_SECONDS = 15.0
"""Between two lines of `Telling`."""


def _bar(total: int | None, what: str) -> Any:
    """A bar of tqdm's; None where none is to be shown."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return None
    return tqdm(total=total, desc=what, delay=AFTER_SECONDS, leave=False, file=sys.stderr)


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """``items``, with a bar of how many of ``total`` were taken."""
    bar = _bar(total, what)
    try:
        for item in items:
            yield item
            if bar is not None:
                bar.update()
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def working(what: str) -> Iterator[None]:
    """While something runs of which nobody knows how far it is: its name on a terminal, gone at the end."""
    shows = sys.stderr.isatty()
    if shows:
        print(f"{what} ...", end="", flush=True, file=sys.stderr)
    try:
        yield
    finally:
        if shows:
            print(f"\r{' ' * (len(what) + 4)}\r", end="", flush=True, file=sys.stderr)


class Telling:
    """Says on stderr what is being worked on, when it is called: on a terminal in one line that the next one replaces.

    Elsewhere (a file, a job's log) it is a line of its own, at once and then every ``LINE_SECONDS``.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._last: float | None = None
        self._count = 0

    def __call__(self, what: str) -> None:
        """``what`` begins."""
        self._count += 1
        if sys.stderr.isatty():
            print(f"\r\033[K{self._verb} {what}"[:100], end="\r", flush=True, file=sys.stderr)
            return
        now = time.monotonic()
        if self._last is None or now - self._last >= LINE_SECONDS:
            self._last = now
            print(f"{self._verb} ({self._count}): {what}", flush=True, file=sys.stderr)
