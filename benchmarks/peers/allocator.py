"""What the C library's allocator has given out at most, whoever asked: torch, compiled code, threads of gloo's.

torch's profiler would not do: it does not see what a thread of gloo's frees, and so takes it for kept. Blocks of
`SMALLEST` bytes and more are counted, which leaves out Python's objects. Needs glibc 2.33, as Linux has it since 2021.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

SMALLEST = 1 << 16
M_MMAP_THRESHOLD = -3
INTERVAL_SECONDS = 0.0005


class _Information(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


_library = ctypes.CDLL(None)
_library.mallinfo2.restype = _Information


def count_large_blocks() -> None:
    """From now on, in this process: blocks of `SMALLEST` bytes and more are mapped one by one, which is counted."""
    if _library.mallopt(M_MMAP_THRESHOLD, SMALLEST) != 1:
        raise RuntimeError(f"mallopt refused a threshold of {SMALLEST} bytes: memory cannot be counted")


def bytes_in_use() -> int:
    """Of large blocks, now."""
    return int(_library.mallinfo2().hblkhd)


class PeakOfAllocator:
    """The most that was in use while a `with` block ran, seen every half millisecond by a thread of its own."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def take(self) -> int:
        """The peak so far, which begins anew."""
        seen, self._seen = self._seen, []
        return max(*seen, bytes_in_use(), 0)

    def __enter__(self) -> PeakOfAllocator:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(INTERVAL_SECONDS)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._seen.append(bytes_in_use())
            time.sleep(INTERVAL_SECONDS)
