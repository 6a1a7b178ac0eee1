"""The flat memory of one group in one dtype: shard buffer, unsharded buffer, staging.

Owns allocations and the views on them; decides nothing about when. Storage operations are per buffer, never per
parameter.

[Note: two ways of lying in a buffer]
A *sharded* parameter lies on its own slice of the shard buffer's storage, at offset 0. As a plain view, a DTensor
would carry a storage offset over a null storage, and `torch.save`, pickling and deep copies would fail or drag the
whole group along. An *unsharded* parameter is a tensor set on the unsharded buffer's one storage, at its slot's offset,
because that storage is resized (freed and refilled) under it. It is no ``view``: views share a version counter, and
backward would take the next all-gather for an in-place modification of a saved tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.layout import BufferLayout
from fsdp2.param import FSDPParam

Member = tuple[torch.Tensor, torch.Tensor]
"""The (output, input) of one collective on the wire; both one-dimensional and contiguous."""


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def storage_slice(flat: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of ``shape`` over its own slice of ``flat``'s storage, from element ``offset`` on."""
    numel = 1
    for size in shape:
        numel *= size
    start, itemsize = offset * flat.element_size(), flat.element_size()
    storage = flat.untyped_storage()[start : start + numel * itemsize]
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(storage, 0, tuple(shape), contiguous_stride(shape))  # type: ignore[call-overload,no-any-return]


def storage_alias(flat: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of ``shape`` over ``flat``'s own storage, with a version counter of its own."""
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    storage = flat.untyped_storage()
    return empty.set_(storage, offset, tuple(shape), contiguous_stride(shape))  # type: ignore[call-overload,no-any-return]


def on_the_wire(flat: torch.Tensor) -> torch.Tensor:
    """``flat`` as collectives carry it: bytes, unless it is floating point (integers and packed data stay exact)."""
    return flat if flat.is_floating_point() or flat.is_complex() else flat.view(torch.uint8)


class DtypeBuffers:
    """The shard buffer of a group's parameters of one dtype and, once prepared, their unsharded buffer.

    Attributes:
        members: what an all-gather of these buffers sends, packed part first.
    """

    def __init__(self, params: Sequence[FSDPParam], layout: BufferLayout, *, rank: int) -> None:
        """Allocate the shard buffer, (layout.shard_numel,), and move the sharded parameters into it."""
        self.params = tuple(params)
        self.layout = layout
        first = params[0].local
        # Padding is zero once and for all: it is gathered, but lies behind every parameter's last row.
        self.shard = torch.zeros(layout.shard_numel, dtype=first.dtype, device=first.device)
        for param, slot in zip(self.params, layout.slots, strict=True):
            param.lie_on(storage_slice(self.shard, slot.shard_offset, slot.local_shape(rank)))
        self.members: tuple[Member, ...] = ()
        self._unsharded = self._staging = _Resizable(self.shard.new_empty(0))
        self._copy_sources: list[torch.Tensor] = []
        self._copy_destinations: list[torch.Tensor] = []
        self._is_packed = not any(slot.direct for slot in layout.slots)
        self._expected: list[tuple[nn.Parameter, int, int]] = []

    def prepare(self) -> None:
        """Lay out the unsharded buffer and the staging buffer, both left without memory, and all views on them."""
        layout, world_size = self.layout, self.layout.world_size
        unsharded = self.shard.new_empty(layout.unsharded_numel)
        staging = self.shard.new_empty(world_size * layout.packed_numel)
        start = unsharded.data_ptr()
        members: list[Member] = []
        if layout.packed_numel:
            members.append((on_the_wire(staging), on_the_wire(self.shard[: layout.packed_numel])))
        staged = staging.view(world_size, layout.packed_numel)
        self._copy_sources, self._copy_destinations = [], []
        for param, slot in zip(self.params, layout.slots, strict=True):
            alias = storage_alias(unsharded, slot.unsharded_offset, param.shape)
            param.take_unsharded(nn.Parameter(alias, requires_grad=param.requires_grad))
            if slot.shard_numel == 0:
                continue
            whole = unsharded.narrow(0, slot.unsharded_offset, world_size * slot.shard_numel)
            if slot.direct:
                shard = self.shard.narrow(0, slot.shard_offset, slot.shard_numel)
                members.append((on_the_wire(whole), on_the_wire(shard)))
            else:
                self._copy_sources.append(staged[:, slot.shard_offset : slot.shard_offset + slot.shard_numel])
                self._copy_destinations.append(whole.view(world_size, slot.shard_numel))
        self.members = tuple(members)
        self._expected = [
            (param.unsharded, param.unsharded.data_ptr() - start, param.unsharded._version)
            for param in self.params
            if param.unsharded is not None and param.unsharded.numel()
        ]
        self._unsharded, self._staging = _Resizable(unsharded), _Resizable(staging)

    @property
    def unsharded_bytes(self) -> int:
        """Size of the unsharded buffer while it has memory."""
        return self.layout.unsharded_numel * self.shard.element_size()

    @property
    def unsharded_storage(self) -> int:
        """The identity of the storage that the unsharded parameters lie on."""
        return _torch.storage_of(self._unsharded.flat)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the unsharded and the staging buffer have at the moment."""
        return self._unsharded.storage.nbytes() + self._staging.storage.nbytes()

    def allocate(self) -> None:
        """Give memory to what is gathered into. On the stream that writes it first."""
        self._staging.allocate()
        if not self._is_packed:
            self._unsharded.allocate()

    def copy_out(self) -> None:
        """Move packed parameters from the staging buffer to their slots, and free the staging buffer.

        On the stream that gathered into it, so that freeing it needs no wait.
        """
        if self._is_packed:  # not before: while it is in flight, a gather holds its staging buffer only
            self._unsharded.allocate()
        if self._copy_sources:
            _torch.foreach_copy(self._copy_destinations, self._copy_sources)
            self._staging.free()

    def free(self) -> None:
        """Free all memory but the shard buffer's; every unsharded parameter loses its values with it."""
        self._unsharded.free()
        self._staging.free()

    def changed(self) -> FSDPParam | None:
        """A parameter whose unsharded form was written, or moved off its slot by setting ``.data``, if there is one.

        Only while the unsharded buffer has memory. The engine itself writes through the buffer, which does not count in
        any parameter's version.
        """
        start = self._unsharded.flat.data_ptr()
        for parameter, offset, version in self._expected:
            if parameter.data_ptr() - start != offset or parameter._version != version:
                return next(param for param in self.params if param.unsharded is parameter)
        return None


class _Resizable:
    """A flat buffer that has memory only while it is needed; made without."""

    __slots__ = ("flat", "nbytes", "storage")

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.storage = flat.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.free()

    def allocate(self) -> None:
        self.storage.resize_(self.nbytes)

    def free(self) -> None:
        self.storage.resize_(0)
