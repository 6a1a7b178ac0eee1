"""Predicts which groups are needed next from the orders of earlier passes. Pure: no tensor, no communication."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class ExecutionOrder(Generic[Item]):
    """The order in which groups are needed in one kind of pass (forward, or backward), learned from the last pass.

    While a pass follows the learned order, `advance` predicts what comes next; at the first deviation it falls silent
    until the pass is over. The order of a pass is learned when the pass is committed. Predictions depend only on the
    order of this pass and of the last committed one: if these are the same on all ranks, so are the predictions, even
    if the order changes in every pass. A pass may be committed only if all ranks are known to have come to its end; for
    passes of which that is never known there is `settle`.

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
        """The pass is over, on some ranks perhaps by an exception: learn its order if all ranks learn the same one.

        Ranks that go on together have issued the same gathers. If the pass left the learned order, nothing was gathered
        ahead since, so it is known alike on all of them: learn it. If it followed the learned order, an exception may
        have stopped some ranks earlier, where the others' gathers were prefetches: keep what was learned.
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
        """An exception cut the pass short: forget it, and also a pass that has ended and was not committed."""
        self._current.clear()
        self._ended = ()
