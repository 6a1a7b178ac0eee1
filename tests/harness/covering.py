"""Which combinations of a test's parameters are run: each value in the short suite, each pair of them in the full one.

A test with parameters of 5, 3 and 2 values has 30 combinations. The short suite runs 5, in which every value comes, and
the full suite 15, in which every two values of two parameters come together. The other combinations are never run: what
three settings do together is what drawn programs are for (`multi_rank/combinations`).

Of the numbers of ranks in ``@multi_rank(2, 4)`` the short suite runs the smallest, and of a test that runs on torch's
FSDP1 as well as on ours it has ours: torch's does not change with this package. Of a ``seed`` it has the first eight
values. A test that is marked ``every_combination``, or needs a GPU, is run as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest

from tests.harness.device import CPU, DEVICE

RANKS = "world_size"
SEED = "seed"
SHORT_SEEDS = 8
TORCHS = "torch"
"""The ``kind`` of tests on torch's FSDP1, see `tests.fsdp1.helpers.both`."""


def covering(combinations: Sequence[Mapping[str, Hashable]], together: int = 1) -> list[int]:
    """Positions of few ``combinations`` with every value of every parameter, or every ``together`` values of as many.

    The first ones if it can be.

    >>> covering([{"x": x, "y": y} for x in "abc" for y in "de"])
    [0, 3, 4]
    >>> len(covering([{"x": x, "y": y, "z": z} for x in "ab" for y in "cd" for z in "ef"], together=2))
    4
    """
    if not combinations:
        return []
    together = min(together, *map(len, combinations))
    values = [frozenset(itertools.combinations(sorted(each.items()), together)) for each in combinations]
    left = frozenset().union(*values)
    chosen: list[int] = []
    while left:
        best = max(range(len(values)), key=lambda index: len(values[index] & left))
        chosen.append(best)
        left -= values[best]
    return sorted(chosen)


def thin_out(items: Iterable[pytest.Function]) -> list[pytest.Function]:
    """Mark what the short suite leaves out as full; returns what no suite runs."""
    by_function: dict[str, list[pytest.Function]] = {}
    for item in items:
        if hasattr(item, "callspec") and not _is_run_whole(item):
            by_function.setdefault(item.nodeid.split("[")[0], []).append(item)
    dropped: list[pytest.Function] = []
    for every in by_function.values():
        candidates = _on_fewest_ranks([item for item in every if _may_be_short(item)])
        short = {id(candidates[index]) for index in covering([_values(item) for item in candidates])}
        pairs = {id(every[index]) for index in covering([_values(item) for item in every], together=2)}
        for item in every:
            if id(item) not in short:
                item.add_marker(pytest.mark.full)
                if id(item) not in pairs:
                    dropped.append(item)
    return dropped


def _is_run_whole(item: pytest.Function) -> bool:
    """Tests that say so; and on a device all, whose minutes are rare, and whose tests are few."""
    return any(item.get_closest_marker(mark) is not None for mark in ("every_combination", "gpu")) or DEVICE != CPU


def _values(item: pytest.Function) -> dict[str, int]:
    """By parameter its value, by identity: one value is one object in all combinations, and need not be hashable."""
    return {name: id(value) for name, value in item.callspec.params.items()}


def _may_be_short(item: pytest.Function) -> bool:
    """Whether the short suite may run this combination, on some number of ranks."""
    if item.get_closest_marker("full") is not None or item.callspec.params.get("kind") == TORCHS:
        return False
    return item.callspec.indices.get(SEED, 0) < SHORT_SEEDS


def _on_fewest_ranks(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Those on the smallest number of processes, and those on threads."""
    ranks = [item.callspec.params.get(RANKS) for item in items]
    fewest = min((each for each in ranks if type(each) is int), default=0)
    return [item for item, each in zip(items, ranks, strict=True) if type(each) is not int or each == fewest]
