"""Flat buffers that have memory only while they are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp2.core.buffers import Resizable, on_the_wire
from tests.unit.helpers import for_each


@pytest.mark.full
def test_a_resizable_has_memory_between_allocate_and_free() -> None:
    buffer = Resizable(torch.ones(3))
    for expected in (12, 12):
        buffer.allocate()
        assert buffer.storage.nbytes() == expected
    for _ in range(2):
        buffer.free()
        assert buffer.storage.nbytes() == 0


def test_out_of_memory_once_is_not_taken_for_memory() -> None:
    buffer = Resizable(torch.ones(3))
    buffer.free()
    storage = buffer.storage

    class Full:
        def resize_(self, size: int) -> Any:
            raise torch.OutOfMemoryError("no memory for 12 bytes")

    buffer.storage = Full()  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        buffer.allocate()
    buffer.storage = storage
    buffer.allocate()
    assert storage.nbytes() == 12


@for_each(
    ("dtype", "carried"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.complex64, True), (torch.int16, False), (torch.bool, False)]
    + [(dtype, False) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)],
)
def test_what_backends_may_not_know_travels_as_bytes(dtype: torch.dtype, carried: bool) -> None:
    flat = torch.zeros(16, dtype=dtype)
    wire = on_the_wire(flat)
    assert (wire is flat) == carried
    assert wire.data_ptr() == flat.data_ptr() and wire.nbytes == flat.nbytes
    assert carried or wire.dtype is torch.uint8
