"""Where this process is, by name: which pass runs, what an exchange is of, and which one is waited for.

Nothing is decided by it, but whether an exchange goes on: ranks compare the `Label`s of what they exchange, and a
watchdog that finds that ranks can never meet says so in ``PLACE.stopped``, which every exchange looks at.
"""

from __future__ import annotations

from typing import Any

from fsdp2.core.plan import fingerprint

_BITS = 30
"""Of a label in a message's tag."""


class Label:
    """What an exchange is of. The same object for the same text, in one process.

    Attributes:
        text: for messages.
        bits: 30 bits of a fingerprint, which nothing but the text and the detail decide: ranks may have others besides.
    """

    __slots__ = ("bits", "text")

    def __init__(self, text: str, bits: int) -> None:
        self.text = text
        self.bits = bits


_LABELS: dict[tuple[str, str], Label] = {}


def label(text: str, detail: str = "") -> Label:
    """The label of ``text``; of another ``detail`` (sizes, dtypes) it is another one, under the same text."""
    known = _LABELS.get((text, detail))
    if known is None:
        known = _LABELS[text, detail] = Label(text, fingerprint(f"{text}\0{detail}") % (1 << _BITS))
    return known


UNNAMED = label("an exchange")


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
    """

    __slots__ = ("failure", "left", "phase", "restarts", "step", "stopped", "tells", "waiting")

    def __init__(self) -> None:
        self.step = 0
        self.phase = "before the first forward"
        self.waiting: Any = None
        self.failure = ""
        self.restarts = 0
        self.stopped = ""
        self.tells = False
        self.left = ""

    def restart(self) -> None:
        """All ranks leave the step that they are in."""
        self.stopped = self.left = ""
        self.tells = False
        self.restarts += 1


PLACE = Place()
"""The only one."""
