"""The signal at which the watchdog prints what ranks are doing: which one is listened to, and what is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from fsdp2.plugs.watchdog.signals import listen, was_asked

FIRST, SECOND = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals that the program's own handlers were called with."""
    numbers: list[int] = []
    before = [signal.signal(each, lambda number, _: numbers.append(number)) for each in (FIRST, SECOND)]
    yield numbers
    listen(None)
    for each, handler in zip((FIRST, SECOND), before, strict=True):
        signal.signal(each, handler)


def test_a_second_signal_takes_the_place_of_the_first(came: list[int]) -> None:
    listen(FIRST)
    os.kill(os.getpid(), FIRST)
    assert was_asked() and not was_asked() and came == []
    listen(SECOND)
    os.kill(os.getpid(), FIRST)
    assert not was_asked() and came == [FIRST], "the first is the program's again"
    os.kill(os.getpid(), SECOND)
    assert was_asked() and came == [FIRST]
    listen(None)
    os.kill(os.getpid(), SECOND)
    assert not was_asked() and came == [FIRST, SECOND]
