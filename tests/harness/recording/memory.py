"""Which allocation a tensor's bytes lie in, and when allocations are freed.

Tensors are found by address: sharded parameters and gradients lie on storage slices, which are storages of their own
within the memory of another. Addresses are used again by the host's allocator, so every allocation gets a number.
Nothing here keeps memory alive: what lives how long is what is being recorded.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Block:
    """The memory of one storage, from when it was allocated to when it is freed.

    Attributes:
        reference: its ``cdata`` identifies the storage, also when that is resized to nothing and back.
    """

    number: int
    address: int
    nbytes: int
    reference: StorageWeakRef


class MemoryMap:
    """The live blocks by address.

    Args:
        on_free: called with the number of each block whose memory is gone.
    """

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self._on_free = on_free
        self._blocks: dict[int, Block] = {}
        self._addresses: list[int] = []
        self._count = 0
        self._references: list[StorageWeakRef] = []  # a storage's identity is not used again while one is held

    def collect(self) -> None:
        """Notice the storages that have died since the last call."""
        expired = torch.UntypedStorage._expired
        for block in [block for block in self._blocks.values() if expired(block.reference.cdata)]:
            self._remove(block)

    def add(self, storage: torch.UntypedStorage) -> Block:
        """A new block: the memory that ``storage`` (not empty) has now."""
        self._count += 1
        self._references.append(StorageWeakRef(storage))
        block = Block(self._count, storage.data_ptr(), storage.nbytes(), self._references[-1])
        self._blocks[block.address] = block
        insort(self._addresses, block.address)
        return block

    def remove(self, storage: torch.UntypedStorage) -> bool:
        """The memory of ``storage`` is freed, the storage lives on. Whether it had any."""
        found = [block for block in self._blocks.values() if block.reference.cdata == storage._cdata]
        for block in found:
            self._remove(block)
        return bool(found)

    def _remove(self, block: Block) -> None:
        del self._blocks[block.address]
        del self._addresses[bisect_right(self._addresses, block.address) - 1]
        self._on_free(block.number)

    def find(self, address: int) -> Block | None:
        """The block that ``address`` lies in."""
        position = bisect_right(self._addresses, address) - 1
        if position < 0:
            return None
        block = self._blocks[self._addresses[position]]
        return block if address < block.address + block.nbytes else None

    def range_of(self, tensor: Tensor) -> tuple[int, int, int]:
        """The block of ``tensor`` (not empty, in a known block), its first byte there, and the end of its last.

        Gaps between its strides are included.
        """
        block = self.find(tensor.data_ptr())
        assert block is not None, "the block of a tensor is added before it is accessed"
        start = tensor.data_ptr() - block.address
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return block.number, start, start + (last + 1) * tensor.element_size()
