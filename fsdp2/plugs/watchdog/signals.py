"""A signal on which a rank prints where it is, even while its main thread waits in C for other ranks.

Python runs signal handlers in the main thread, between two of its instructions. But it writes a byte to the wake-up
descriptor as soon as a signal comes, and the watchdog's thread reads that byte.
"""

from __future__ import annotations

import os
import signal
import threading

from fsdp2.errors import FSDPRuntimeError, FSDPValueError


class _Chosen:
    number: int | None = None
    reads: int | None = None
    before: object = None


_CHOSEN = _Chosen()


def listen(number: int | None) -> None:
    """Let `was_asked` know when the signal ``number`` comes; None: leave all signals as they were.

    Raises:
        FSDPValueError: this system has no such signal, or it cannot be handled.
        FSDPRuntimeError: this is not the main thread, or something else uses the wake-up descriptor.
    """
    if number == _CHOSEN.number:
        return
    if threading.current_thread() is not threading.main_thread():
        raise FSDPRuntimeError("set_watchdog(dump_signal=...) must be called by the main thread.")
    if _CHOSEN.number is not None and _CHOSEN.reads is not None:
        signal.signal(_CHOSEN.number, _CHOSEN.before)  # type: ignore[arg-type]
        os.close(signal.set_wakeup_fd(-1))
        os.close(_CHOSEN.reads)
        _CHOSEN.number = _CHOSEN.reads = None
    if number is None:
        return
    try:
        before = signal.signal(number, _nothing)
    except (ValueError, OSError, TypeError) as failure:
        raise FSDPValueError(f"set_watchdog: dump_signal={number!r} is no signal that can be handled.") from failure
    reads, writes = os.pipe()
    for each in (reads, writes):
        os.set_blocking(each, False)
    other = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    # Another library uses the descriptor: give it back.
    if other != -1:
        signal.set_wakeup_fd(other)
        signal.signal(number, before)
        os.close(reads)
        os.close(writes)
        raise FSDPRuntimeError(
            "set_watchdog(dump_signal=...): something else (asyncio?) is told of signals by signal.set_wakeup_fd()."
        )
    _CHOSEN.number, _CHOSEN.reads, _CHOSEN.before = number, reads, before


def was_asked() -> bool:
    """Whether the signal came since this was asked last."""
    if _CHOSEN.reads is None or _CHOSEN.number is None:
        return False
    try:
        came = os.read(_CHOSEN.reads, 4096)
    except BlockingIOError:
        return False
    return _CHOSEN.number in came


def _nothing(_number: int, _frame: object) -> None:
    """Do nothing: the byte in the wake-up descriptor tells the watchdog's thread."""
