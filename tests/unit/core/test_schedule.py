"""Learning an order and predicting from it."""

from __future__ import annotations

import random

from fsdp2.core.schedule import ExecutionOrder


def run(order: ExecutionOrder[str], items: str, depth: int = 1) -> list[str]:
    predicted = ["".join(order.advance(item, depth=depth)) for item in items]
    order.end()
    order.commit()
    return predicted


def test_predicts_the_learned_order() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    assert run(order, "abc") == ["", "", ""]
    assert run(order, "abc") == ["b", "c", ""]
    assert run(order, "abc", depth=2) == ["bc", "c", ""]


def test_repeated_items_have_their_own_places() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    run(order, "abab")
    assert run(order, "abab") == ["b", "a", "b", ""]


def test_falls_silent_at_a_deviation_and_learns_anew() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    run(order, "abcd")
    assert run(order, "acbd") == ["b", "", "", ""]
    assert run(order, "acbd") == ["c", "b", "d", ""]
    assert run(order, "ac") == ["c", "b"]  # shorter: the last prediction is in vain
    assert run(order, "ac") == ["c", ""]
    assert run(order, "acb") == ["c", "", ""]
    assert order.learned == tuple("acb")


def test_an_expected_order_only_stands_in_for_a_learned_one() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    order.expect("abc")
    assert run(order, "abc") == ["b", "c", ""]
    order.expect("cba")
    assert run(order, "abc") == ["b", "c", ""]


def test_an_abandoned_pass_teaches_nothing() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    run(order, "abc")
    order.advance("a", depth=1)
    order.advance("x", depth=1)
    order.abandon()
    assert run(order, "abc") == ["b", "c", ""]


def test_predictions_depend_on_the_sequence_alone() -> None:
    """Two ranks that see the same calls predict the same, whatever the calls are."""
    generator = random.Random(0)
    ranks: list[ExecutionOrder[str]] = [ExecutionOrder(), ExecutionOrder()]
    for _ in range(50):
        items = "".join(generator.choices("abcd", k=generator.randint(0, 8)))
        assert run(ranks[0], items) == run(ranks[1], items)


def test_a_pass_that_is_not_committed_teaches_nothing() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    run(order, "abc")
    assert [order.advance(item, depth=1) for item in "acb"] == [("b",), (), ()]
    order.end()
    assert order.learned == tuple("abc")
    order.abandon()
    order.commit()
    assert run(order, "abc") == ["b", "c", ""]
