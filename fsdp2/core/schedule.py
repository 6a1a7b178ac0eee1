"""Which groups are needed next: orders are learned and predictions come out. Pure: no tensor, no communication."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class ExecutionOrder(Generic[Item]):
    """The order in which groups are needed in one kind of pass (forward, or backward), learned from the last pass.

    While a pass follows the learned order, `advance` predicts what comes next; at the first deviation it falls silent
    until the pass is over. What it was is learned when the pass is committed. Predictions depend only on the order of
    this pass and of the last committed one: if these are the same on all ranks, so are the predictions, even if the
    order changes in every pass. A pass may be committed only if all ranks are known to have come to its end; what is
    never known is left to `settle`.

        >>> order = ExecutionOrder()
        >>> [order.advance(item, depth=1) for item in "abc"], order.end(), order.commit()
        ([(), (), ()], None, None)
        >>> [order.advance(item, depth=1) for item in "abc"]
        [('b',), ('c',), ()]
    """

    def __init__(self) -> None:
        self._learned: tuple[Item, ...] = ()
        self._ended: tuple[Item, ...] = ()
        self._current: list[Item] = []
        self._follows = False

    @property
    def learned(self) -> tuple[Item, ...]:
        """The order of the last committed pass."""
        return self._learned

    def expect(self, order: Sequence[Item]) -> None:
        """Predict from ``order`` until a pass has been committed."""
        if not self._learned:
            self._learned = tuple(order)

    def advance(self, item: Item, *, depth: int) -> tuple[Item, ...]:
        """Note that ``item`` is needed now; returns the next ``depth`` items that are expected after it."""
        position = len(self._current)
        self._current.append(item)
        if position == 0:
            self._follows = True
        if not (self._follows and position < len(self._learned) and self._learned[position] == item):
            self._follows = False
            return ()
        return self._learned[position + 1 : position + 1 + depth]

    def end(self) -> None:
        """The pass is over."""
        if self._current:
            self._ended = tuple(self._current)
            self._current.clear()

    def commit(self) -> None:
        """Learn the order of the pass that ended last."""
        if self._ended:
            self._learned = self._ended

    def settle(self) -> None:
        """The pass is over, on some ranks perhaps by an exception: learn its order, alike on all that go on together.

        They have gathered the same, so one that left the learned order was the same on all of them. One that followed
        it may have stopped anywhere, where more was gathered ahead: what was learned stays.
        """
        current = tuple(self._current)
        if current != self._learned[: len(current)]:
            self._learned = current
        self.abandon()

    def forget(self) -> None:
        """Ranks may have learned different orders: forget them."""
        self._learned = ()
        self.abandon()

    def abandon(self) -> None:
        """The pass was cut short by an exception: forget it, and one that ended but was not committed."""
        self._current.clear()
        self._ended = ()
