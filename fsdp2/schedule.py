"""Which groups are needed next: orders are learned and predictions come out. Pure: no tensor, no communication."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class ExecutionOrder(Generic[Item]):
    """The order in which groups are needed in one kind of pass (forward, or backward), learned from the last pass.

    While a pass follows the learned order, `advance` predicts what comes next; at the first deviation it falls silent
    until the pass is over and then learns the new order. An order that is the same on all ranks therefore gives the
    same predictions on all ranks, even if it changes in every pass.

        >>> order = ExecutionOrder()
        >>> [order.advance(item, depth=1) for item in "abc"], order.end()
        ([(), (), ()], None)
        >>> [order.advance(item, depth=1) for item in "abc"]
        [('b',), ('c',), ()]
    """

    def __init__(self) -> None:
        self._learned: tuple[Item, ...] = ()
        self._current: list[Item] = []
        self._follows = False

    @property
    def learned(self) -> tuple[Item, ...]:
        """The order of the last whole pass."""
        return self._learned

    @property
    def has_begun(self) -> bool:
        """Whether a pass is under way."""
        return bool(self._current)

    def expect(self, order: Sequence[Item]) -> None:
        """Predict from ``order`` until a pass has been seen."""
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
        """The pass is over: learn its order."""
        if self._current and not (self._follows and len(self._current) == len(self._learned)):
            self._learned = tuple(self._current)
        self._current.clear()

    def abandon(self) -> None:
        """The pass was cut short by an exception: forget it."""
        self._current.clear()
