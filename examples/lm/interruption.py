"""Ctrl-C: the first SIGINT or SIGTERM asks the run to save and stop, the second ends the process.

torchrun starts its workers in sessions of their own, so a Ctrl-C reaches them only through its agent: one
signal for each worker, none at quite the same moment. A rank must therefore never act on its own request;
`Trainer` adds the requests up over the ranks, and all stop after the same step.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens for the signals while it is entered; `requested` says whether one has come to this rank."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._former = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        # The default action needs no Python: a second signal ends even a process that waits in a collective.
        for either in SIGNALS:
            signal.signal(either, signal.SIG_DFL)
