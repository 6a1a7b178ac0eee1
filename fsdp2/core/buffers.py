"""The flat memory of one group in one dtype: shard buffer and unsharded buffer.

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

from collections.abc import Callable, Sequence

import torch

from fsdp2 import _torch
from fsdp2.core.param import FSDPParam
from fsdp2.core.plan import GatherPlan

# Pieces of a few bytes seen as elements of a wider dtype, so that strided copies move more bytes at once.
#
# In a large world a rank's piece of a vector is a few bytes: a copy that walks through pieces of 8 or 16 bytes takes
# three times as long as one through as many elements of that size. Only copies may see tensors so: the numbers are not
# what the bytes mean.


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
    """Whether ``ratio`` elements, one after the other, can be one everywhere in ``tensor``."""
    *strides, last = tensor.stride()
    places = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return last == 1 and not any(place % ratio for place in places)


Allocate = Callable[..., torch.Tensor]
"""``(size, *, dtype, device)`` to a contiguous buffer, of a custom collective."""


def storage_slice(flat: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A dense tensor over its own slice of ``flat``'s storage, from element ``offset`` on."""
    numel = 1
    for size in shape:
        numel *= size
    start, itemsize = offset * flat.element_size(), flat.element_size()
    if flat.untyped_storage().device.type == "meta":  # of a fake tensor: there is nothing to slice
        return storage_alias(flat, offset, shape, stride)
    storage = flat.untyped_storage()[start : start + numel * itemsize]
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(storage, 0, tuple(shape), tuple(stride))  # type: ignore[call-overload,no-any-return]


def storage_alias(flat: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A dense tensor over ``flat``'s own storage, with a version counter of its own."""
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    storage = flat.untyped_storage()
    return empty.set_(storage, offset, tuple(shape), tuple(stride))  # type: ignore[call-overload,no-any-return]


_CARRIED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
"""What every backend gathers. (NCCL's know some integers and 8-bit floats; no narrower float, no unsigned integer.)"""


def on_the_wire(flat: torch.Tensor) -> torch.Tensor:
    """``flat`` as gathers carry it: bytes, unless it is of a usual float (integers and packed data stay exact)."""
    return flat if flat.dtype in _CARRIED else flat.view(torch.uint8)


def moved_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """An input on ``device``. What it came in may be written again at once, as a loader's pinned batch is.

    So the host waits for a copy out of pinned memory. (Other host memory is copied to the driver's before the call
    returns.)
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=not tensor.is_pinned())


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory, once its device has come that far: whoever reads it waits for an event after this."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type != "cpu")
    return copy.copy_(tensor, non_blocking=True)


class Arena:
    """Where buffers have their memory from: here the allocator of their device, each time they need some."""

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device, taken: list[Resizable]) -> torch.Tensor:
        """(numel,) of undefined contents, to be used once. What is to be freed after that is added to ``taken``."""
        return torch.empty(numel, dtype=dtype, device=device)

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give ``storage``, which has none, ``nbytes`` of memory, of undefined contents."""
        storage.resize_(nbytes)

    def drain(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Take back the ``nbytes`` that ``storage`` was filled with. Nobody reads or writes them any more."""
        storage.resize_(0)

    def forget(self, nbytes: int, storage: torch.UntypedStorage) -> None:
        """A buffer of ``nbytes`` was dropped with its memory, which ``storage`` has: others may hold that."""

    def trim(self) -> None:
        """A step that reduced gradients is over."""

    def close(self) -> None:
        """Nothing is filled from here any more."""

    def hold(self) -> None:
        """A graph was captured that uses the memory: give nothing back from now on."""

    def is_held_elsewhere(self) -> bool:
        """Whether somebody holds memory that a captured graph may write, of a buffer that was dropped with it."""
        return False

    def idle_storages(self) -> list[torch.UntypedStorage]:
        """What holds memory that nothing uses at the moment."""
        return []


ALLOCATOR = Arena()


class Resizable:
    """A flat buffer that has memory only while it is needed. Made with it, to be viewed; then `free`."""

    __slots__ = ("_arena", "flat", "has_memory", "nbytes", "storage")

    def __init__(self, flat: torch.Tensor, arena: Arena = ALLOCATOR) -> None:
        self._arena = arena
        self.flat = flat
        self.storage = flat.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.has_memory = True

    def allocate(self, arena: Arena = ALLOCATOR) -> None:
        """Give it memory from ``arena``, of undefined contents unless it had some."""
        if self.has_memory:  # resizing always moves
            return
        if arena is ALLOCATOR:  # as most are, at a call less
            self.storage.resize_(self.nbytes)
        else:
            arena.fill(self.storage, self.nbytes)
            self._arena = arena
        self.has_memory = True

    def free(self) -> None:
        """Take its memory, which goes back to where it came from."""
        if not self.has_memory:
            return
        arena, self._arena, self.has_memory = self._arena, ALLOCATOR, False
        if arena is ALLOCATOR:
            self.storage.resize_(0)
        else:
            arena.drain(self.storage, self.nbytes)

    def hand_over(self) -> torch.Tensor:
        """What it holds, (numel,), for somebody else; it has no memory then. (From torch 2.13 on.)"""
        storage = torch.UntypedStorage(0, device=self.storage.device)
        _torch.swap_memory(storage, self.storage)
        self._arena.forget(self.nbytes, storage)
        self._arena, self.has_memory = ALLOCATOR, False
        empty = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
        return empty.set_(storage, 0, self.flat.shape, (1,))  # type: ignore[call-overload,no-any-return]

    def take_over(self, storage: torch.UntypedStorage) -> None:
        """Have the memory of ``storage``, which is of the same size, and has none then. (From torch 2.13 on.)"""
        self.free()
        _torch.swap_memory(storage, self.storage)
        self.has_memory = True

    def __del__(self) -> None:
        # What lies on the storage may be read for as long as anybody holds it.
        self._arena.forget(self.nbytes, self.storage)


class _Lasting(Resizable):
    """One whose memory is somebody else's: always there, and none of its own."""

    __slots__ = ()

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__(flat)
        self.nbytes = 0

    def allocate(self, arena: Arena = ALLOCATOR) -> None:
        """Nothing to do."""

    def free(self) -> None:
        """Nothing to do."""


class DtypeBuffers:
    """The shard buffer of a group's parameters of one dtype and, once prepared, their unsharded buffer.

    Attributes:
        params: those that lie here.
        plan: what they have in common, and where they lie.
        layout: of the plan.
        shard: (layout.shard_numel,), in the original dtype, on the host under CPU offload.
        unsharded: (layout.unsharded_numel,), in ``plan.param_dtype``, on the mesh's device; or the shard buffer.
        lies_in_place: the unsharded parameters are views of the shard buffer, for one rank has all of each.
        keeps_memory: whether `free` leaves the unsharded buffer its memory, so that addresses repeat.
    """

    def __init__(self, params: Sequence[FSDPParam], plan: GatherPlan, *, rank: int, offloading: Offloading) -> None:
        """Allocate the shard buffer and move the sharded parameters into it."""
        self.params = tuple(params)
        self.plan = plan
        self.layout = layout = plan.layout
        # Padding is zero once and for all: it is gathered, but lies behind every parameter's last row.
        self.shard = offloading.zeros(layout.shard_numel, params[0].local)
        for param, slot in zip(self.params, layout.slots, strict=True):
            shape = slot.local_shape(rank)
            param.lie_on(storage_slice(self.shard, slot.shard_offset, shape, slot.partition.stride(shape)))
        self.unsharded = Resizable(self.shard.new_empty(0))
        self.keeps_memory = self.lies_in_place = False
        self._unsharded_params: list[FSDPParam] = []
        self._locals: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []  # what autograd saves of them: of DTensors, the wrappers too
        self._offsets: list[int] = []
        self._versions: list[int] = []
        self._shard_slices: dict[tuple[int, int], torch.Tensor] = {}

    def shard_slice(self, start: int, numel: int) -> torch.Tensor:
        """(numel,) of the shard buffer; always the same tensor, as graphs of `torch.compile` rely on."""
        known = self._shard_slices.get((start, numel))
        if known is None:
            known = self._shard_slices[start, numel] = self.shard[start : start + numel]
        return known

    def prepare(self, device: torch.device, *, in_place: bool = False) -> None:
        """Lay out the unsharded buffer on ``device`` and the parameters on it. It has memory until it is freed.

        ``in_place``: they lie where the shards do, which nobody else has a part of.
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
        """The identity of the storage that the unsharded parameters lie on."""
        return _torch.storage_of(self.unsharded.flat)

    def free(self) -> None:
        """Free the unsharded buffer, unless it keeps its memory; every unsharded parameter loses its values."""
        if not self.keeps_memory:
            self.unsharded.free()

    def outdate(self) -> None:
        """Other values come where earlier ones were: autograd refuses backwards that have saved those."""
        torch.autograd.graph.increment_version(self._saved)
        self._versions = [version + 1 for version in self._versions]

    def changed(self) -> FSDPParam | None:
        """A parameter whose unsharded form was written, or moved off its slot by setting ``.data``, if there is one.

        Only while the unsharded buffer has memory. The engine itself writes through the buffer, which does not count in
        any parameter's version.
        """
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
        device: that place.
        is_host: offloaded.
        sums_on_host: gradients of backwards that are not the last add up in host memory; never if all is there.
        state_on_host: optimizers' states rest in host memory; never if all is there.
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
        """Equal for places that are the same."""
        return tuple(vars(self).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offloading) and self.key == other.key

    __hash__ = None  # type: ignore[assignment]
