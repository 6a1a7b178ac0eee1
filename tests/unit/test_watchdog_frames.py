"""What the watchdog's thread reads from the frames of a thread that goes on meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace

import pytest

from fsdp2 import _torch
from fsdp2.core.places import PLACE
from fsdp2.features.watchdog import thread
from fsdp2.features.watchdog.thread import Watchdog


def reductions() -> Iterator[FrameType]:
    """A generator, as reductions are: its frame, which has lost its caller by the time that somebody looks."""
    while True:
        yield sys._getframe()


def within_backward(action: Callable[[], bool]) -> bool:
    """The result of ``action``, called by a function of the name that torch's backward has."""
    made: dict[str, Callable[[Callable[[], bool]], bool]] = {}
    exec(f"def {_torch.BACKWARD_FUNCTION}(action): return action()", made)
    return made[_torch.BACKWARD_FUNCTION](action)


@pytest.mark.parametrize("torn", [0, 1, 3])
def test_generators_that_yield_meanwhile_are_no_exception(torn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACE, "phase", "backward of Net")
    monkeypatch.setattr(PLACE, "left", "")
    reduction = reductions()
    reads: Iterator[FrameType | None] = iter([next(reduction)] * torn)
    monkeypatch.setattr(thread.sys, "_current_frames", lambda: {1: next(reads, None) or sys._getframe()})
    trains = SimpleNamespace(_trains=lambda: 1)
    assert next(reduction).f_back is None
    assert not within_backward(lambda: Watchdog._has_left(trains))  # type: ignore[arg-type]


def test_a_backward_that_nothing_runs_any_more_has_been_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACE, "phase", "backward of Net")
    monkeypatch.setattr(PLACE, "left", "")
    monkeypatch.setattr(thread.sys, "_current_frames", lambda: {1: sys._getframe()})
    assert Watchdog._has_left(SimpleNamespace(_trains=lambda: 1))  # type: ignore[arg-type]
