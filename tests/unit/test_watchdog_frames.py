"""What the watchdog's thread reads from the frames of a thread that goes on meanwhile, and of silent processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from fsdp2 import _torch
from fsdp2.core.places import PLACE
from fsdp2.plugs.watchdog import thread
from fsdp2.plugs.watchdog.thread import Watchdog
from fsdp2.plugs.watchdog.verdict import Silence


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


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="states of processes are read there")
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_process_that_a_profiler_stops_for_moments_is_not_gone(goes_on: bool) -> None:
    """Its state is sampled: only one that is stopped whenever somebody looks, for 3 s, or has ended, is gone."""
    with subprocess.Popen(["sleep", "60"]) as process:
        here = json.dumps([thread._host(), process.pid]).encode()
        store = SimpleNamespace(check=lambda keys: keys[0].startswith("here/"), get=lambda key: here)
        watchdog: Any = SimpleNamespace(_store=store, _round=1, _asked=0.0, _seen_running=set(), seconds=10.0)

        def send(number: int) -> None:
            process.send_signal(number)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WCONTINUED | os.WEXITED | os.WNOWAIT)

        try:
            send(signal.SIGSTOP)
            assert Watchdog._answer_of(watchdog, 1, 1.0) is Silence.NOT_YET
            if goes_on:
                send(signal.SIGCONT)
                assert Watchdog._answer_of(watchdog, 1, 2.0) is Silence.NOT_YET
                send(signal.SIGSTOP)
            assert Watchdog._answer_of(watchdog, 1, 4.0) is (Silence.BUSY if goes_on else Silence.GONE)
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Watchdog._answer_of(watchdog, 1, 0.0) is Silence.GONE
