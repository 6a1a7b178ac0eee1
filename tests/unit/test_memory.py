"""`MemoryPool`: memory moves between storages, values do not show, and no more is kept than was needed."""

from __future__ import annotations

import gc

import pytest
import torch

from fsdp2 import _torch
from fsdp2.core.buffers import Resizable
from fsdp2.plugs.memory.memory_pool import SLACK, MemoryPool

pytestmark = pytest.mark.skipif(not _torch.can_swap_memory, reason="torch moves memory between storages from 2.13 on")
HOST = torch.device("cpu")


def taken(memory: MemoryPool, numel: int) -> Resizable:
    buffers: list[Resizable] = []
    memory.empty(numel, dtype=torch.float32, device=HOST, taken=buffers)
    return buffers[0]


def empty(numel: int) -> Resizable:
    buffer = Resizable(torch.empty(numel))
    buffer.free()
    return buffer


def test_memory_moves_and_tensors_stay() -> None:
    memory = MemoryPool()
    first, second = empty(8), empty(8)
    view = first.flat.view(2, 4)
    first.allocate(memory)
    address = first.flat.data_ptr()
    first.flat.fill_(1)
    assert view.sum() == 8
    first.free()
    assert (first.storage.nbytes(), memory.idle_bytes, memory.used_bytes) == (0, 32, 0)
    second.allocate(memory)
    assert second.flat.data_ptr() == address and memory.allocations == 1
    assert view.untyped_storage().nbytes() == 0, "it is on no memory, not on another's"
    first.allocate(memory)
    assert view.data_ptr() == first.flat.data_ptr() != address


def test_the_lowest_address_is_taken_first() -> None:
    memory = MemoryPool()
    buffers = [taken(memory, 1024) for _ in range(5)]
    addresses = sorted(buffer.flat.data_ptr() for buffer in buffers)
    for buffer in (buffers[3], buffers[0], buffers[4], buffers[1], buffers[2]):
        buffer.free()
    again = [taken(memory, 1024) for _ in range(5)]
    assert [buffer.flat.data_ptr() for buffer in again] == addresses
    assert memory.allocations == 5


def test_a_dropped_buffer_takes_its_memory_with_it() -> None:
    memory = MemoryPool()
    buffer = taken(memory, 8)
    view = buffer.flat[:4]
    view.fill_(3)
    del buffer
    gc.collect()
    assert (memory.used_bytes, memory.idle_bytes) == (0, 0)
    taken(memory, 8).flat.fill_(4)
    assert view.tolist() == [3, 3, 3, 3]


def test_a_buffer_of_another_origin_is_freed_where_it_came_from() -> None:
    memory = MemoryPool()
    buffer = Resizable(torch.empty(8))
    buffer.allocate(memory)  # it has memory: nothing to do
    buffer.free()
    assert (memory.used_bytes, memory.idle_bytes, buffer.storage.nbytes()) == (0, 0, 0)
    nothing = empty(0)
    nothing.allocate(memory)
    nothing.free()
    assert memory.allocations == 0


def test_what_two_steps_did_not_need_is_freed() -> None:
    memory = MemoryPool()
    for count, kept in ((5, 5), (2, 5), (2, 2), (0, 2), (0, 0)):
        buffers = [taken(memory, 8) for _ in range(count)]
        for buffer in buffers:
            buffer.free()
        memory.trim()
        assert memory.idle_bytes == 32 * kept, count


def test_sizes_that_take_turns_are_bounded() -> None:
    """A hundred sizes, one in use at a time: not a hundred pieces."""
    memory = MemoryPool()
    for _ in range(3):
        for numel in range(1000, 1100):
            taken(memory, numel).free()
            assert memory.idle_bytes <= SLACK * 4 * 1100
        memory.trim()


def test_a_closed_pool_keeps_nothing() -> None:
    memory = MemoryPool()
    first, second = taken(memory, 8), taken(memory, 8)
    first.free()
    memory.close()
    assert memory.idle_bytes == 0
    second.free()
    assert (memory.used_bytes, memory.idle_bytes, second.storage.nbytes()) == (0, 0, 0)
