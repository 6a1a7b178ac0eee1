"""Where this process is: which pass runs, what the collectives are labelled with, and which one is waited for.

This decides only whether a collective goes on. Ranks compare the `Label`s of their collectives; a watchdog that finds
that ranks wait for different ones says so in ``PLACE.stopped``, and every collective looks at that first.
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
"""How many bits of a label fit into the tag of a message."""


class Label:
    """The name of a collective. In one process, equal names are one object.

    Attributes:
        text: the name, for messages.
        bits: 30 bits of a fingerprint of text and detail, and of nothing else: ranks may know different sets of labels.
    """

    __slots__ = ("__weakref__", "bits", "text")

    def __init__(self, text: str, bits: int) -> None:
        self.text = text
        self.bits = bits


_LABELS: dict[str, Label] = {}
"""Labels without a detail. They are kept: a program has no more of them than modules."""
_DETAILED: WeakValueDictionary[tuple[str, str], Label] = WeakValueDictionary()
"""Labels with a detail. They are kept weakly, as details (scales) may change in every step."""


def label(text: str, detail: str = "") -> Label:
    """The label with this ``text``. Labels of different ``detail`` (sizes, dtypes) differ, and show the same text."""
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
    """The labels with a detail that are alive. It is safe to call while another thread adds one."""
    return [each for reference in _DETAILED.valuerefs() if (each := reference()) is not None]


def label_of_bits(bits: int) -> str:
    """The text of the label with these ``bits`` in this process; "" if there is none."""
    return next((each.text for each in (*list(_LABELS.values()), *_with_details()) if each.bits == bits), "")


class Place:
    """Where the training thread is.

    Attributes:
        step: how many forwards of roots have begun.
        phase: the pass that is running, or that ran last.
        waiting: the communication that the thread waits for, an object with a ``label``; None if it does not wait.
        failure: the pass that an exception left, until another one has ended well; "" if there is none.
        stopped: the message of an error that the next collective raises on every rank; "" if there is none.
        restarts: how often `stopped` was raised. Ranks raise it together, so that they start anew together.
        tells: other ranks must be told if an exception leaves the step on this rank.
        left: the pass that such an exception has left; "" if there is none.
        thread: the identifier of the training thread; None before the first forward.
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
        """Note that all ranks leave the step that they are in."""
        for action in RESTARTED:
            action()
        self.stopped = self.left = ""
        self.tells = False
        self.restarts += 1


RESTARTED: list[Callable[[], None]] = []
"""A port: called by `Place.restart`."""

FAILED: list[Callable[[], None]] = []
"""A port: called when a wait for other ranks has failed. A function that knows why says so in `Place.stopped`."""

PLACE = Place()
"""The place of this process."""


def raise_stopped() -> NoReturn:
    """Raise the error that `Place.stopped` holds, and start anew.

    Raises:
        FSDPRuntimeError: always.
    """
    message = PLACE.stopped
    PLACE.restart()
    raise FSDPRuntimeError(message)


def raise_if_stopped() -> None:
    """A wait for other ranks has failed. If `Place.stopped` holds an error for all ranks, raise it here too.

    Raises:
        FSDPRuntimeError: there is such an error.
    """
    if not PLACE.stopped:
        for action in FAILED:
            action()
    if PLACE.stopped:
        raise_stopped()


class Record(NamedTuple):
    """One collective that was begun.

    Attributes:
        number: its number among the collectives of its process group.
        label: its name.
        step: `Place.step` when it was begun.
        phase: `Place.phase` when it was begun.
    """

    number: int
    label: Label
    step: int
    phase: str


RECORDED = 200
"""How many collectives of a process group are remembered."""

_COMPARED = 1024
"""How many collectives ranks can compare one by one."""

_MARKED = 32
"""How many collectives lie between two notes of the digest; as many notes are kept."""


class Order:
    """The collectives over a process group whose messages carry no label. Ranks compare afterwards what they began.

    Attributes:
        begun: how many collectives were begun.
        digest: a hash of their labels, in their order.
        recent: the last ones. Another thread can copy them in one atomic operation.
        marks: pairs of ``begun`` and ``digest``, noted at intervals.
    """

    __slots__ = ("begun", "digest", "marks", "recent")

    def __init__(self) -> None:
        self.begun = self.digest = 0
        self.recent: deque[Record] = deque(maxlen=_COMPARED)
        self.marks: deque[tuple[int, int]] = deque(maxlen=_MARKED)

    def begin(self, what: Label) -> None:
        """A collective with the label ``what`` begins.

        Raises:
            FSDPRuntimeError: all ranks raise the error in `Place.stopped`.
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
        """Count from zero again, as all ranks do."""
        self.begun = self.digest = 0
        self.recent.clear()
        self.marks.clear()


ORDERS: WeakKeyDictionary[dist.ProcessGroup, Order] = WeakKeyDictionary()
"""The `Order` of each process group."""


def order_over(group: dist.ProcessGroup) -> Order:
    """The `Order` of ``group``."""
    found = ORDERS.get(group)
    if found is None:
        found = ORDERS[group] = Order()
    return found
