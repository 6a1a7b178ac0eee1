"""Where this process is: labels of exchanges, the order in which they begin, and what stops them on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp2.core import places
from fsdp2.core.places import FAILED, PLACE, RECORDED, RESTARTED, Order, Place, label, label_of_bits, order_over
from fsdp2.errors import FSDPRuntimeError
from tests.harness import fake_world

A, B = label("the gather of 'a'"), label("the gather of 'b'")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The only place is every other test's too."""
    values = {name: getattr(PLACE, name) for name in Place.__slots__}
    yield
    for name, value in values.items():
        setattr(PLACE, name, value)


def begun(*labels: places.Label) -> Order:
    order = Order()
    for each in labels:
        order.begin(each)
    return order


def test_a_label_is_one_object_for_one_text_and_one_detail() -> None:
    assert label("the gather of 'a'") is A and A.bits != B.bits
    large, small = label("the gather of 'a'", "4096"), label("the gather of 'a'", "512")
    assert label("the gather of 'a'", "512") is small
    assert len({A.bits, large.bits, small.bits}) == 3 and {A.text, large.text, small.text} == {A.text}
    assert all(0 <= each.bits < 1 << 30 for each in (A, large, small)), "they fit in a message's tag"


def test_bits_that_came_from_a_rank_are_named_if_this_one_knows_them() -> None:
    detailed = label("the reduction of 'a'", "scale 3")
    assert [label_of_bits(each.bits) for each in (A, detailed)] == [A.text, "the reduction of 'a'"]
    assert label_of_bits(-1) == ""


def test_labels_of_details_are_forgotten_with_whoever_has_them() -> None:
    """A scale may be another one in each step, for ever. Who has a label finds it by its bits."""
    before = len(places._DETAILED)
    kept = [label("the reduction of 'a'", f"scale {step}") for step in range(100)][-1]
    gc.collect()
    assert len(places._DETAILED) <= before + 1
    assert label_of_bits(kept.bits) == "the reduction of 'a'" and label("the reduction of 'a'", "scale 99") is kept


def test_an_order_notes_what_has_begun_and_where_training_was() -> None:
    PLACE.step, PLACE.phase = 7, "forward"
    order = begun(A, B)
    PLACE.phase = "backward"
    order.begin(A)
    assert [(each.number, each.label, each.step, each.phase) for each in order.recent] == [
        (0, A, 7, "forward"),
        (1, B, 7, "forward"),
        (2, A, 7, "backward"),
    ]


def test_the_digest_is_of_all_labels_in_their_order() -> None:
    """Also of those that are remembered no more; ranks that count anew have the same again."""
    assert begun(A, B).digest == begun(A, B).digest != begun(B, A).digest
    one, other = begun(A, *[B] * 3000), begun(B, *[B] * 3000)
    assert RECORDED < len(one.recent) == len(other.recent) < one.begun == 3001
    assert one.digest != other.digest and [each.label for each in one.recent] == [each.label for each in other.recent]
    one.restart()
    one.begin(A)
    assert (one.begun, one.digest, len(one.recent), len(one.marks)) == (1, begun(A).digest, 1, 0)


def test_marks_keep_the_digest_of_some_points_far_behind() -> None:
    order, labels = Order(), [A, B] * 1500
    digests = {}
    for number, each in enumerate(labels, 1):
        order.begin(each)
        digests[number] = order.digest
    assert [*order.marks] == [(number, digests[number]) for number in range(1984, 3000, 32)], "the last 32"


def test_each_process_group_has_an_order_for_as_long_as_it_lives() -> None:
    with fake_world(2):
        whole, other = dist.group.WORLD, dist.new_group([0])
        assert order_over(whole) is order_over(whole) is not order_over(other)
        count = len(places.ORDERS)
        del other
        dist.destroy_process_group()
        del whole
        gc.collect()
        assert len(places.ORDERS) <= count - 2


def test_nothing_begins_before_it_was_raised_that_ranks_differ() -> None:
    PLACE.stopped = "they differ"
    order = Order()
    with pytest.raises(FSDPRuntimeError, match=r"^they differ$"):
        order.begin(A)
    order.begin(A)
    assert order.begun == 1


def test_what_is_raised_starts_all_anew() -> None:
    restarts, started = PLACE.restarts, mock.Mock()
    PLACE.stopped, PLACE.left, PLACE.tells = "they differ", "forward", True
    with mock.patch.object(places, "RESTARTED", [*RESTARTED, started]), pytest.raises(FSDPRuntimeError):
        places.raise_stopped()
    started.assert_called_once_with()
    assert (PLACE.stopped, PLACE.left, PLACE.tells, PLACE.restarts) == ("", "", False, restarts + 1)


def test_a_wait_that_failed_asks_why_and_is_left_alone_if_nobody_knows() -> None:
    def explain() -> None:
        PLACE.stopped = "rank 1 is in another forward"

    places.raise_if_stopped()
    with mock.patch.object(places, "FAILED", [*FAILED, explain]), pytest.raises(FSDPRuntimeError, match="rank 1 is in"):
        places.raise_if_stopped()
