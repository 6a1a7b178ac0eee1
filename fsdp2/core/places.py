"""Where this process is, by name: which pass runs, what an exchange is of, and which one is waited for.

Nothing is decided by it, but whether an exchange goes on: ranks compare the `Label`s of what they exchange, and a
watchdog that finds that ranks can never meet says so in ``PLACE.stopped``, which every exchange looks at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from fsdp2.core.plan import fingerprint
from fsdp2.errors import FSDPRuntimeError

_BITS = 30
"""Of a label in a message's tag."""


class Label:
    """What an exchange is of. The same object for the same text, in one process.

    Attributes:
        text: for messages.
        bits: 30 bits of a fingerprint, which nothing but the text and the detail decide: ranks may have others besides.
    """

    __slots__ = ("__weakref__", "bits", "text")

    def __init__(self, text: str, bits: int) -> None:
        self.text = text
        self.bits = bits


_LABELS: dict[str, Label] = {}
"""Without a detail: as many as a program has modules."""
_DETAILED: WeakValueDictionary[tuple[str, str], Label] = WeakValueDictionary()
"""With one, which may be another in each step (scales): for as long as somebody has them."""


def label(text: str, detail: str = "") -> Label:
    """The label of ``text``; of another ``detail`` (sizes, dtypes) it is another one, under the same text."""
    known = _DETAILED.get((text, detail)) if detail else _LABELS.get(text)
    if known is None:
        known = Label(text, fingerprint(f"{text}\0{detail}") % (1 << _BITS))
        if detail:
            _DETAILED[text, detail] = known
        else:
            _LABELS[text] = known
    return known


UNNAMED = label("an exchange")


def _with_details() -> list[Label]:
    """Also where another thread adds one meanwhile."""
    return [each for reference in _DETAILED.valuerefs() if (each := reference()) is not None]


def label_of_bits(bits: int) -> str:
    """The text of the label that has them, in this process; "" if none has."""
    return next((each.text for each in (*list(_LABELS.values()), *_with_details()) if each.bits == bits), "")


class Place:
    """Where the thread that trains is.

    Attributes:
        step: forwards of roots that have begun.
        phase: which pass runs, or ran last.
        waiting: what it waits for: an object with a ``label``; None if it does not.
        failure: which pass an exception had left before, until one has ended well; "" if none.
        stopped: why nothing may be exchanged any more until it has been raised; "" if something may.
        restarts: how often that was raised: on all ranks, so that they start anew together.
        tells: other ranks are to be told if an exception leaves this one's step.
        left: which pass one has left so; "" if none.
        thread: the number of the thread that trains; None before it does.
    """

    __slots__ = ("failure", "left", "phase", "restarts", "step", "stopped", "tells", "thread", "waiting")

    def __init__(self) -> None:
        self.step = 0
        self.phase = "before the first forward"
        self.waiting: Any = None
        self.failure = ""
        self.restarts = 0
        self.stopped = ""
        self.tells = False
        self.left = ""
        self.thread: int | None = None

    def restart(self) -> None:
        """All ranks leave the step that they are in."""
        for action in RESTARTED:
            action()
        self.stopped = self.left = ""
        self.tells = False
        self.restarts += 1


RESTARTED: list[Callable[[], None]] = []
"""A port: called by `Place.restart`."""

FAILED: list[Callable[[], None]] = []
"""A port: called when a wait for other ranks has failed; what knows why says so in `Place.stopped`."""

PLACE = Place()
"""The only one."""


def raise_stopped() -> NoReturn:
    """Raise what `Place.stopped` says, and start anew.

    Raises:
        FSDPRuntimeError: always.
    """
    message = PLACE.stopped
    PLACE.restart()
    raise FSDPRuntimeError(message)


def raise_if_stopped() -> None:
    """A wait for other ranks has failed: raise what they are going to raise, if they are.

    Raises:
        FSDPRuntimeError: they are.
    """
    if not PLACE.stopped:
        for action in FAILED:
            action()
    if PLACE.stopped:
        raise_stopped()


class Record(NamedTuple):
    """One exchange that was begun.

    Attributes:
        number: over its process group.
        label: what it is of.
        step: `Place.step` then.
        phase: `Place.phase` then.
    """

    number: int
    label: Label
    step: int
    phase: str


RECORDED = 200
"""Exchanges of a group that are remembered."""

_COMPARED = 1024
"""Exchanges that ranks can compare one by one."""

_MARKED = 32
"""After so many each the digest is remembered, of so many times."""


class Order:
    """The collectives over one process group that carry no name; ranks can compare afterwards what they have begun.

    Attributes:
        begun: how many.
        digest: of the labels of all of them, in their order.
        recent: the last ones; to copy them is one step, which no other thread comes into.
        marks: how many there had been, and the digest then, now and then.
    """

    __slots__ = ("begun", "digest", "marks", "recent")

    def __init__(self) -> None:
        self.begun = self.digest = 0
        self.recent: deque[Record] = deque(maxlen=_COMPARED)
        self.marks: deque[tuple[int, int]] = deque(maxlen=_MARKED)

    def begin(self, what: Label) -> None:
        """One of ``what`` begins.

        Raises:
            FSDPRuntimeError: nothing may be exchanged, see `Place.stopped`.
        """
        if PLACE.stopped:
            raise_stopped()
        begun = self.begun
        self.recent.append(tuple.__new__(Record, (begun, what, PLACE.step, PLACE.phase)))  # no call of Python
        self.digest = (self.digest * 1_000_003 + what.bits) & 0x7FFFFFFFFFFFFFFF
        self.begun = begun = begun + 1
        if not begun % _MARKED:
            self.marks.append((begun, self.digest))

    def restart(self) -> None:
        """Ranks count anew."""
        self.begun = self.digest = 0
        self.recent.clear()
        self.marks.clear()


ORDERS: WeakKeyDictionary[dist.ProcessGroup, Order] = WeakKeyDictionary()
"""By process group."""


def order_over(group: dist.ProcessGroup) -> Order:
    """That of ``group``."""
    found = ORDERS.get(group)
    if found is None:
        found = ORDERS[group] = Order()
    return found
