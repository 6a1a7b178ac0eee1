"""What ranks find when they compare exchanges that carry no name: the comparison alone."""

from __future__ import annotations

import doctest

import fsdp2.plugs.watchdog.orders as orders
from fsdp2.core.places import Order, label
from fsdp2.plugs.watchdog.orders import Published, difference

A, B, A_OF_OTHER_SIZES = label("the gather of 'a'", "1"), label("the gather of 'b'"), label("the gather of 'a'", "2")


def published(*begun: object) -> Published:
    order = Order()
    for each in begun:
        order.begin(each)  # type: ignore[arg-type]
    return Published.from_json(Published.of(order).to_json())


def test_the_docstrings_example() -> None:
    assert doctest.testmod(orders).failed == 0


def test_ranks_that_are_not_equally_far_do_not_differ() -> None:
    assert difference({0: published(A, B, A), 1: published(A), 2: published()}) == ""


def test_the_first_difference_is_named() -> None:
    found = difference({0: published(A, A, B, A), 1: published(A, A, B, B), 2: published(A, B)})
    assert found.startswith("ranks 0 and 2 differ in exchange 1 ")
    assert "rank 0 has begun the gather of 'a', and rank 2 the gather of 'b'." in found
    assert "another one of it" in difference({4: published(A), 6: published(A_OF_OTHER_SIZES)})


def test_far_behind_only_marks_tell() -> None:
    """One rank is two thousand exchanges ahead, so nothing can be compared one by one."""
    ahead, behind = [A] * 3000, [A] * 5 + [B] + [A] * 994
    assert difference({0: published(*ahead), 1: published(*[A] * 2000)}) == ""
    found = difference({0: published(*ahead), 1: published(*behind, *[A] * 1200)})
    assert found == "ranks 0 and 1 have begun different exchanges, before exchange 1984 of their group."
