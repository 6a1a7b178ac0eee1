"""The flat memory of one group in one dtype: shard buffer and unsharded buffer.

This file owns allocations and the views on them; when they are made and freed is decided elsewhere. A storage operation
is done once for a buffer, never for each parameter.

[Note: two ways of lying in a buffer]
A *sharded* parameter lies on its own slice of the shard buffer's storage, at offset 0. If it were a plain view, the
DTensor would carry a storage offset over a null storage, and `torch.save`, pickling and deep copies would fail or drag
the whole group along. An *unsharded* parameter is a tensor set on the unsharded buffer's one storage, at its slot's
offset, because that storage is resized (freed and refilled) under it. It is no ``view``: views share a version counter,
and backward would take the next all-gather for an in-place modification of a saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp2 import _torch
from fsdp2.core.param import FSDPParam
from fsdp2.core.plan import GatherPlan

# Views of pieces of a few bytes as elements of a wider dtype, so that strided copies move more bytes at once.
#
# In a large world a rank's piece of a vector is a few bytes: a copy that walks through pieces of 8 or 16 bytes takes
# three times as long as one through as many elements of that size. Only copies may use such views: as numbers, the
# elements mean nothing.


_DTYPES = {dtype.itemsize: dtype for dtype in (torch.complex128, torch.int64, torch.int32, torch.int16)}
_MAX_PIECE_BYTES = 64
"""Larger pieces are copied as fast in any dtype."""


def can_be_one(nbytes: int) -> bool:
    """Whether there is a dtype whose elements have ``nbytes``."""
    return nbytes in _DTYPES


def view_as_wider_dtype(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``tensors`` (..., n) of one shape and dtype as fewer, wider elements, if all of them lie so that they can be."""
    first = tensors[0]
    itemsize = first.element_size()
    if first.shape[-1] * itemsize <= _MAX_PIECE_BYTES:
        for nbytes, dtype in _DTYPES.items():
            if nbytes > itemsize and all(_can_be_seen(each, nbytes // itemsize) for each in tensors):
                return [each.view(dtype) for each in tensors]
    return tensors


def _can_be_seen(tensor: torch.Tensor, ratio: int) -> bool:
    """Whether ``tensor`` (..., n) can be viewed with ``ratio`` elements in one: adjacent ones, aligned to that."""
    *strides, last = tensor.stride()
    places = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return last == 1 and not any(place % ratio for place in places)


Allocate = Callable[..., torch.Tensor]
"""A custom collective's function that makes a contiguous buffer: ``(size, *, dtype, device)``."""


def storage_slice(flat: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A dense tensor over its own slice of ``flat``'s storage, from element ``offset`` on."""
    numel = 1
    for size in shape:
        numel *= size
    start, itemsize = offset * flat.element_size(), flat.element_size()
    if flat.untyped_storage().device.type == "meta":  # a fake tensor has no memory to slice
        return storage_alias(flat, offset, shape, stride)
    storage = flat.untyped_storage()[start : start + numel * itemsize]
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(storage, 0, tuple(shape), tuple(stride))  # type: ignore[call-overload,no-any-return]


def storage_alias(flat: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A dense tensor over ``flat``'s storage, from element ``offset`` on, with a version counter of its own."""
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    storage = flat.untyped_storage()
    return empty.set_(storage, offset, tuple(shape), tuple(stride))  # type: ignore[call-overload,no-any-return]


_CARRIED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
"""The dtypes that every backend gathers. (NCCL knows some integers and 8-bit floats too, but not all of them.)"""


def on_the_wire(flat: torch.Tensor) -> torch.Tensor:
    """``flat`` as gathers carry it: a common float in its dtype, anything else as bytes, so that it stays exact."""
    return flat if flat.dtype in _CARRIED else flat.view(torch.uint8)


def moved_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The input ``tensor`` on ``device``. Its memory may be written again at once, as a loader's pinned batch is."""
    if tensor.device == device:
        return tensor
    # An asynchronous copy may still read pinned memory after the call; other host memory is staged by the driver before
    # the call returns. So the host waits for pinned memory.
    return tensor.to(device, non_blocking=not tensor.is_pinned())


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in host memory. It is made asynchronously: record an event after it, and wait to read it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type != "cpu")
    return copy.copy_(tensor, non_blocking=True)


class Arena:
    """Gives memory to buffers. This one takes it from the device's allocator, each time that a buffer needs some."""

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device, taken: list[Resizable]) -> torch.Tensor:
        """A tensor (numel,) of undefined contents, to be used once. If it must be freed, it is added to ``taken``."""
        return torch.empty(numel, dtype=dtype, device=device)

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give the empty ``storage`` ``nbytes`` of memory, of undefined contents."""
        storage.resize_(nbytes)

    def drain(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Take back the ``nbytes`` that ``storage`` was filled with. Nobody reads or writes them any more."""
        storage.resize_(0)

    def forget(self, nbytes: int, storage: torch.UntypedStorage) -> None:
        """A buffer of ``nbytes`` was dropped while it had memory, in ``storage``. Others may hold that storage."""

    def trim(self) -> None:
        """A step that reduced gradients is over: idle memory that such a step does not need may go."""

    def close(self) -> None:
        """No buffer is filled from here any more."""

    def hold(self) -> None:
        """A graph was captured that uses the memory: return nothing to the allocator from now on."""

    def is_held_elsewhere(self) -> bool:
        """Whether somebody holds a storage that `forget` was told, and that a captured graph may write."""
        return False

    def idle_storages(self) -> list[torch.UntypedStorage]:
        """The storages whose memory no buffer uses at the moment."""
        return []


ALLOCATOR = Arena()


class Resizable:
    """A flat buffer that has memory only while it is needed. It is made with memory, so that views can be built."""

    __slots__ = ("_arena", "flat", "has_memory", "nbytes", "storage")

    def __init__(self, flat: torch.Tensor, arena: Arena = ALLOCATOR) -> None:
        self._arena = arena
        self.flat = flat
        self.storage = flat.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.has_memory = True

    def allocate(self, arena: Arena = ALLOCATOR) -> None:
        """Give it memory from ``arena``, of undefined contents. Memory that it has stays, with its contents."""
        if self.has_memory:  # resizing would move it, even to the size that it has
            return
        if arena is ALLOCATOR:  # the common case, with one call less
            self.storage.resize_(self.nbytes)
        else:
            arena.fill(self.storage, self.nbytes)
            self._arena = arena
        self.has_memory = True

    def free(self) -> None:
        """Return its memory to the arena that gave it."""
        if not self.has_memory:
            return
        arena, self._arena, self.has_memory = self._arena, ALLOCATOR, False
        if arena is ALLOCATOR:
            self.storage.resize_(0)
        else:
            arena.drain(self.storage, self.nbytes)

    def hand_over(self) -> torch.Tensor:
        """Move its memory, with its contents, to a new tensor (numel,), and return that. (From torch 2.13 on.)"""
        storage = torch.UntypedStorage(0, device=self.storage.device)
        _torch.swap_memory(storage, self.storage)
        self._arena.forget(self.nbytes, storage)
        self._arena, self.has_memory = ALLOCATOR, False
        empty = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
        return empty.set_(storage, 0, self.flat.shape, (1,))  # type: ignore[call-overload,no-any-return]

    def take_over(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of ``storage``, which is of the same size and becomes empty. (From torch 2.13 on.)"""
        self.free()
        _torch.swap_memory(storage, self.storage)
        self.has_memory = True

    def __del__(self) -> None:
        # The storage is not freed here: a tensor on it may outlive the buffer, and be read.
        self._arena.forget(self.nbytes, self.storage)


class _Lasting(Resizable):
    """A buffer on the memory of another one, which always has it."""

    __slots__ = ()

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__(flat)
        self.nbytes = 0  # what it adds to the memory in use

    def allocate(self, arena: Arena = ALLOCATOR) -> None:
        """Do nothing: the memory is there."""

    def free(self) -> None:
        """Do nothing: the memory belongs to the other buffer."""


class DtypeBuffers:
    """The shard buffer of a group's parameters of one dtype and, once prepared, their unsharded buffer.

    Attributes:
        params: the parameters that lie here.
        plan: their dtypes, and where they lie.
        layout: the layout of the plan.
        shard: (layout.shard_numel,), in the original dtype, on the host under CPU offload.
        unsharded: (layout.unsharded_numel,), in ``plan.param_dtype``, on the mesh's device; or the shard buffer.
        lies_in_place: the unsharded parameters are views of the shard buffer, since this rank has all of each.
        keeps_memory: whether `free` leaves the unsharded buffer its memory, so that addresses repeat.
    """

    def __init__(self, params: Sequence[FSDPParam], plan: GatherPlan, *, rank: int, offloading: Offloading) -> None:
        """Allocate the shard buffer and move the sharded parameters into it."""
        self.params = tuple(params)
        self.plan = plan
        self.layout = layout = plan.layout
        # Padding is zero from the beginning. It is gathered too, and lies behind every parameter's last row.
        self.shard = offloading.zeros(layout.shard_numel, params[0].local)
        for param, slot in zip(self.params, layout.slots, strict=True):
            shape = slot.local_shape(rank)
            param.lie_on(storage_slice(self.shard, slot.shard_offset, shape, slot.partition.stride(shape)))
        self.unsharded = Resizable(self.shard.new_empty(0))
        self.keeps_memory = self.lies_in_place = False
        self._unsharded_params: list[FSDPParam] = []
        self._locals: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []  # the tensors that autograd may save: also the wrappers of DTensors
        self._offsets: list[int] = []
        self._versions: list[int] = []
        self._shard_slices: dict[tuple[int, int], torch.Tensor] = {}

    def shard_slice(self, start: int, numel: int) -> torch.Tensor:
        """A slice (numel,) of the shard buffer, always the same tensor: graphs of `torch.compile` rely on that."""
        known = self._shard_slices.get((start, numel))
        if known is None:
            known = self._shard_slices[start, numel] = self.shard[start : start + numel]
        return known

    def prepare(self, device: torch.device, *, in_place: bool = False) -> None:
        """Lay out the unsharded buffer on ``device`` and the parameters on it. It has memory until it is freed.

        ``in_place``: they lie on the shard buffer, since no other rank has a part of them.
        """
        self.lies_in_place = in_place
        if in_place:
            self.unsharded = _Lasting(self.shard)
        else:
            whole = torch.empty(self.layout.unsharded_numel, dtype=self.plan.param_dtype, device=device)
            self.unsharded = Resizable(whole)
        unsharded = self.unsharded.flat
        start = unsharded.data_ptr()
        self._unsharded_params, self._locals, self._saved = [], [], []
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            offset = slot.shard_offset if in_place else slot.unsharded_offset
            alias = storage_alias(unsharded, offset, param.shape, slot.partition.stride(param.shape))
            param.take_unsharded(alias)
            if param.unsharded is not None and alias.numel():
                self._unsharded_params.append(param)
                self._locals.append(param.unsharded if param.sharding.unsharded_spec is None else alias)
                self._saved.append(param.unsharded)
                if param.sharding.unsharded_spec is not None:
                    self._saved.append(alias)
        self._offsets = [local.data_ptr() - start for local in self._locals]
        self._versions = list(map(_torch.version_of, self._locals))

    @property
    def unsharded_bytes(self) -> int:
        """Size of the unsharded buffer while it has memory."""
        return self.unsharded.nbytes

    @property
    def unsharded_storage(self) -> int:
        """The identity of the storage of the unsharded parameters."""
        return _torch.storage_of(self.unsharded.flat)

    def free(self) -> None:
        """Free the unsharded buffer, unless it keeps its memory; every unsharded parameter loses its values."""
        if not self.keeps_memory:
            self.unsharded.free()

    def outdate(self) -> None:
        """Other values come to the same memory: let autograd refuse backwards that have saved earlier ones."""
        torch.autograd.graph.increment_version(self._saved)
        self._versions = [version + 1 for version in self._versions]

    def changed(self) -> FSDPParam | None:
        """A parameter whose unsharded form was written, or moved off its slot by setting ``.data``, if there is one.

        Called only while the unsharded buffer has memory. The engine itself writes through the buffer, which counts in
        no parameter's version.
        """
        # Offsets, as a buffer that was freed and filled again has another address.
        start = self.unsharded.flat.data_ptr()
        offsets = [pointer - start for pointer in map(torch.Tensor.data_ptr, self._locals)]
        versions = list(map(_torch.version_of, self._locals))
        if offsets == self._offsets and versions == self._versions:
            return None
        for index, param in enumerate(self._unsharded_params):
            if (offsets[index], versions[index]) != (self._offsets[index], self._versions[index]):
                return param
        return None


class Offloading:
    """Where shards and their gradients live: on the device that computes, or (offloaded) in host memory.

    Attributes:
        device: where they live.
        is_host: shards and gradients are offloaded.
        sums_on_host: gradients of backwards that are not the last add up in host memory; False if all is offloaded.
        state_on_host: optimizer states stay in host memory between steps; False if all is offloaded.
        pins: whether host memory is pinned.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        offloaded: bool = False,
        pinned: bool = False,
        sums_on_host: bool = False,
        state_on_host: bool = False,
    ) -> None:
        self.device = torch.device("cpu") if offloaded else device
        self.is_host = offloaded
        self.sums_on_host = sums_on_host and not offloaded
        self.state_on_host = state_on_host and not offloaded
        self.pins = pinned and device.type != "cpu"
        self._pinned = self.pins and offloaded

    def zeros(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A flat buffer of zeros in the dtype of ``like``: in host memory if offloaded, else where ``like`` is."""
        if self.is_host:
            return torch.zeros(numel, dtype=like.dtype, device="cpu", pin_memory=self._pinned)
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer in this place."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self._pinned)

    def empty_on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer in host memory, whatever this place is."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.pins)

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for equal settings."""
        return tuple(vars(self).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offloading) and self.key == other.key

    __hash__ = None  # type: ignore[assignment]
