"""``--part 3/10``: a fixed tenth of the selected tests, so that ten runs are all of them."""

from __future__ import annotations

import zlib

import pytest

PARTS = 10


def part_of(nodeid: str) -> int:
    """The part of a test, from 1 on: the same on every machine, for as long as the test keeps its name."""
    return zlib.crc32(nodeid.encode()) % PARTS + 1


def asked_part(text: str) -> int:
    """The number in ``--part``.

    Raises:
        pytest.UsageError: There is no such part.
    """
    every = [f"{number}/{PARTS}" for number in range(1, PARTS + 1)]
    if text not in every:
        raise pytest.UsageError(f"there is no part {text!r} of the suite; there are {', '.join(every)}")
    return every.index(text) + 1
