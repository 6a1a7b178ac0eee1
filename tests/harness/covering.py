"""Which combinations of a test's parameters the short suite runs: so many that each value of each is among them.

A test with parameters of 5, 3 and 2 values has 30 combinations, and all of them run in the full suite. Of these the
short one runs 5, in which every value comes. What a pair of values does together is what drawn programs are for
(`multi_rank/combinations`). A test that is marked ``every_combination`` is run as a whole. Of a test that runs on
torch's FSDP1 as well as on ours, the short suite has ours: torch's does not change with this package.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest

TORCHS = "torch"
"""The ``kind`` of tests on torch's FSDP1, see `tests.fsdp1.helpers.both`."""
FOLDERS = ("tests/multi_rank/", "tests/fsdp1/", "tests/parity/")
"""Whose tests run on ranks, and take long: half an hour with all combinations."""


def covering(combinations: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Positions of few ``combinations`` in which every value of every parameter comes, the first ones if it can be.

    >>> covering([{"x": x, "y": y} for x in "abc" for y in "de"])
    [0, 3, 4]
    """
    values = [frozenset(each.items()) for each in combinations]
    left = set[tuple[str, Hashable]]().union(*values)
    chosen: list[int] = []
    while left:
        best = max(range(len(values)), key=lambda index: len(values[index] & left))
        chosen.append(best)
        left -= values[best]
    return sorted(chosen)


def leave_to_the_full_suite(items: Iterable[pytest.Function]) -> None:
    """Mark what the short suite leaves out."""
    by_function: dict[str, list[pytest.Function]] = {}
    for item in items:
        short = item.get_closest_marker("full") is None and item.get_closest_marker("every_combination") is None
        if short and item.nodeid.startswith(FOLDERS) and getattr(item, "callspec", None) is not None:
            by_function.setdefault(item.nodeid.split("[")[0], []).append(item)
    for every in by_function.values():
        found = [item for item in every if item.callspec.params.get("kind") != TORCHS]
        for item in every:
            if item.callspec.params.get("kind") == TORCHS:
                item.add_marker(pytest.mark.full)
        # (By identity: one value is one object in all combinations, and need not be hashable.)
        combinations = [{name: id(value) for name, value in each.callspec.params.items()} for each in found]
        kept = set(covering(combinations))
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker(pytest.mark.full)
