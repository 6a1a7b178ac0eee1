"""`MemoryPool`: memory that one buffer has given back and the next one takes, so that nothing is allocated in between.

[Note: memory that moves]
A buffer of the engine is a storage that has memory only while it is needed (`buffers.Resizable`); tensors on it are
made once and stay. The pool does not share storages: it moves memory from one into another, which is one exchange of
pointers. A storage whose memory has moved on has none, exactly as if it had been freed. So a tensor that somebody has
kept (a weight of a module that was resharded) never shows what the memory holds next, and a buffer that is dropped
while it has memory, by an exception or with its group, takes the memory with it: the pool has lost it, nothing else.

Memory that may still be read is never given back: who gives it back has waited, as before freeing. All memory of a pool
is used on one stream, or ordered after it, like memory that an allocator gets back: [Note: streams and lifetimes].

Sizes are exact, and of several pieces the one of the lowest address is taken, so a step that takes and gives back in
the same order as the one before has the same addresses. Of each size the pool keeps as many pieces as were in use at
the same time in the last two steps that reduced gradients, see `trim`; and never, all sizes and idle memory included,
more than `SLACK` times what was in use at once. (A model with many groups of different sizes comes to that limit, and
allocates; one of equal blocks stays well below.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch

from fsdp2 import _torch
from fsdp2.core.buffers import Arena, Resizable
from fsdp2.core.streams import POOL

SLACK = 3.0


@dataclass(slots=True)
class _Size:
    """Memory of one size.

    Attributes:
        used: pieces in use.
        most: at the same time, since the last `MemoryPool.trim`.
        before: ``most`` of the step before that.
        idle: pieces that are not in use, a heap by address.
    """

    used: int = 0
    most: int = 0
    before: int = 0
    idle: list[tuple[int, torch.UntypedStorage]] = field(default_factory=list)


class MemoryPool(Arena):
    """Idle memory on one device, of buffers that are used on one stream.

    Attributes:
        used_bytes: of buffers that were filled from here and not drained yet.
        allocations: how often there was nothing that fits.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.allocations = 0
        self._most_bytes = 0  # in use at the same time, since the last trim
        self._before_bytes = 0
        self._sizes: dict[int, _Size] = {}
        self._empty: list[torch.UntypedStorage] = []
        self._is_open = True
        self._is_held = False
        self._lost: list[torch.UntypedStorage] = []  # since then

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device, taken: list[Resizable]) -> torch.Tensor:
        """On memory of the pool, that goes back when what is ``taken`` is freed."""
        storage = torch.UntypedStorage(0, device=device)
        self.fill(storage, numel * dtype.itemsize)
        flat = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))  # type: ignore[call-overload]
        taken.append(Resizable(flat, self))
        return flat

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """From what is idle, if some is of this size."""
        if not nbytes:
            return
        size = self._sizes.get(nbytes)
        if size is None:
            size = self._sizes[nbytes] = _Size()
        size.used += 1
        size.most = max(size.most, size.used)
        self.used_bytes += nbytes
        self._most_bytes = max(self._most_bytes, self.used_bytes)
        if size.idle:
            _, holder = heapq.heappop(size.idle)
            _torch.swap_memory(storage, holder)
            if not holder.nbytes():  # else Ctrl-C came between an earlier exchange and the note of it
                self._empty.append(holder)
        else:
            self._shrink(self._limit_bytes())
            storage.resize_(nbytes)
            self.allocations += 1

    def drain(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Keep it, see `trim`."""
        if not nbytes:
            return
        self._count_out(nbytes)
        if not self._is_open:
            storage.resize_(0)
            return
        holder = self._empty.pop() if self._empty else torch.UntypedStorage(0, device=storage.device)
        _torch.swap_memory(holder, storage)
        heapq.heappush(self._sizes[nbytes].idle, (holder.data_ptr(), holder))

    @property
    def idle_bytes(self) -> int:
        """Kept for the next buffers."""
        return sum(nbytes * len(size.idle) for nbytes, size in self._sizes.items())

    def forget(self, nbytes: int, storage: torch.UntypedStorage) -> None:
        """It is not there to be taken again. A captured graph may write it, so it is not freed then."""
        if nbytes:
            self._count_out(nbytes)
            if self._is_held:
                self._lost.append(storage)

    def _count_out(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._sizes[nbytes].used -= 1

    def hold(self) -> None:
        """Neither trim nor shrink any more: what is idle may be where a captured graph writes."""
        self._is_held = True

    def is_held_elsewhere(self) -> bool:
        """Whether anybody but the pool holds what it has lost since then."""
        return any(_torch.storage_use_count(storage) > 1 for storage in self._lost)

    def trim(self) -> None:
        """Keep as much as this step, or the one before, needed."""
        if self._is_held:
            return
        for nbytes, size in list(self._sizes.items()):
            needed = max(size.most, size.before)
            while size.idle and size.used + len(size.idle) > needed:
                self._drop(nbytes)
            size.before, size.most = size.most, size.used
            if not needed:
                del self._sizes[nbytes]
        self._shrink(self._limit_bytes())
        self._before_bytes, self._most_bytes = self._most_bytes, self.used_bytes

    def close(self) -> None:
        """Keep nothing, now and of what comes back later."""
        self._is_open = False
        self._shrink(0)

    def idle_storages(self) -> list[torch.UntypedStorage]:
        """For those who count it."""
        return [holder for size in self._sizes.values() for _, holder in size.idle]

    def _limit_bytes(self) -> float:
        return SLACK * max(self._most_bytes, self._before_bytes)

    def _shrink(self, limit_bytes: float) -> None:
        """Free idle memory, the largest first, until the pool holds ``limit_bytes`` or has none idle."""
        if self._is_held:
            return
        while (idle_bytes := self.idle_bytes) and self.used_bytes + idle_bytes > limit_bytes:
            self._drop(max(nbytes for nbytes, size in self._sizes.items() if size.idle))

    def _drop(self, nbytes: int) -> None:
        """Free an idle piece: that of the highest address."""
        idle = self._sizes[nbytes].idle
        idle.remove(max(idle, key=lambda piece: piece[0]))
        heapq.heapify(idle)


POOL.fill(MemoryPool)
