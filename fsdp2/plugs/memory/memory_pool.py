"""`MemoryPool`: memory that one buffer gives back and the next one takes, so that nothing is allocated in between.

[Note: memory that moves]
A buffer of the engine is a storage that has memory only while it is needed (`buffers.Resizable`); tensors on it are
made once and stay. The pool does not share storages: it moves memory from one into another, by an exchange of pointers.
A storage whose memory has moved on has none, exactly as if it had been freed. So a tensor that somebody has kept (a
weight of a module that was resharded) never shows what the memory holds next. A buffer that is dropped while it has
memory, by an exception or with its group, takes the memory with it: the pool loses that memory, and nothing breaks.

Memory that may still be read is never given back: the caller has waited first, as before freeing. All memory of a pool
is used on one stream, or ordered after it, as with an allocator: [Note: streams and lifetimes].

Sizes are exact, and among several pieces of a size the one of the lowest address is taken. So a step that takes and
gives back in the same order as the one before has the same addresses. The pool keeps as many pieces of each size as
were in use at the same time in the last two steps that reduced gradients, see `trim`; and never, all sizes and idle
memory included, more than `SLACK` times what was in use at once. (A model with many groups of different sizes comes to
that limit, and allocates; one of equal blocks stays well below.)
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
    """Pieces of memory of one size.

    Attributes:
        used: how many pieces are in use.
        most: how many were in use at the same time since the last `MemoryPool.trim`.
        before: ``most`` of the step before that.
        idle: pieces that are not in use, a heap by address.
    """

    used: int = 0
    most: int = 0
    before: int = 0
    idle: list[tuple[int, torch.UntypedStorage]] = field(default_factory=list)


class MemoryPool(Arena):
    """Idle memory on one device, for buffers that are used on one stream.

    Attributes:
        used_bytes: the bytes of buffers that were filled from here and not drained yet.
        allocations: how often no idle piece had the size that was asked for.
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
        self._lost: list[torch.UntypedStorage] = []  # dropped with their memory since `hold`

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device, taken: list[Resizable]) -> torch.Tensor:
        """(numel,) on memory of the pool, which gets it back when the buffer added to ``taken`` is freed."""
        storage = torch.UntypedStorage(0, device=device)
        self.fill(storage, numel * dtype.itemsize)
        flat = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))  # type: ignore[call-overload]
        taken.append(Resizable(flat, self))
        return flat

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give ``storage`` an idle piece of this size; allocate if there is none."""
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
            # Else Ctrl-C came after an earlier exchange and before `Resizable` noted it: `holder` got that memory,
            # and takes it along when it is dropped.
            if not holder.nbytes():
                self._empty.append(holder)
        else:
            self._shrink(self._limit_bytes())
            storage.resize_(nbytes)
            self.allocations += 1

    def drain(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Take the memory of ``storage`` and keep it for the next buffers, see `trim`."""
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
        """The bytes that are kept for the next buffers."""
        return sum(nbytes * len(size.idle) for nbytes, size in self._sizes.items())

    def forget(self, nbytes: int, storage: torch.UntypedStorage) -> None:
        """Count out a buffer that was dropped with its memory. If a captured graph may write it, keep it alive."""
        if nbytes:
            self._count_out(nbytes)
            if self._is_held:
                self._lost.append(storage)

    def _count_out(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._sizes[nbytes].used -= 1

    def hold(self) -> None:
        """Stop trimming and shrinking: captured graphs may write to idle memory."""
        self._is_held = True

    def is_held_elsewhere(self) -> bool:
        """Whether anybody else holds memory of a buffer that was dropped since `hold`: a graph may write it."""
        return any(_torch.storage_use_count(storage) > 1 for storage in self._lost)

    def trim(self) -> None:
        """Free idle memory beyond what this step, or the one before, needed."""
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
        """Free all idle memory, and from now on what comes back too."""
        self._is_open = False
        self._shrink(0)

    def idle_storages(self) -> list[torch.UntypedStorage]:
        """The storages of idle memory, for memory statistics."""
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
        """Free the idle piece of the highest address, as `fill` takes the lowest first."""
        idle = self._sizes[nbytes].idle
        idle.remove(max(idle, key=lambda piece: piece[0]))
        heapq.heapify(idle)


POOL.fill(MemoryPool)
