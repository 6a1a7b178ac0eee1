"""`GradientBuffer`: what sharded gradients of one group and dtype lie on, from step to step.

Knows who holds them; when it may be used again, see [Note: reusing the sharded-gradient buffer] in `gradients`.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.params.buffers import Resizable
from fsdp2.params.memory import MemoryPool


class GradientBuffer:
    """A flat sharded-gradient buffer and the gradients on it."""

    def __init__(self, flat: torch.Tensor, gradients: list[DTensor]) -> None:
        self.flat = flat
        self.gradients = gradients
        self._buffer = Resizable(flat)
        self._storage = self._buffer.storage
        self._baseline = self._counts()

    def _counts(self) -> list[int]:
        """Holders of the storage, then of each gradient and of its local tensor."""
        count = sys.getrefcount
        locals_ = map(_torch.local_of, self.gradients)
        own = (count(self._storage), _torch.storage_use_count(self._storage))
        return [*own, *map(count, self.gradients), *map(count, locals_)]

    def is_free(self) -> bool:
        """Whether only this object holds the gradients, provided that none of them is any parameter's ``.grad``."""
        return not self._buffer.has_memory or self._counts() == self._baseline

    def allocate(self, memory: MemoryPool | None) -> None:
        """Give the buffer memory (from a pool). On the stream that writes it first."""
        self._buffer.allocate(memory)

    def release(self) -> None:
        """Free the memory, if the buffer is free. The caller has seen that no ``.grad`` is set."""
        if self._buffer.has_memory and self._counts() == self._baseline:
            self._buffer.free()
