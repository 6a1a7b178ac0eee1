"""The all-gather of one group: what is sent, where it arrives, and the copies before and after it.

Owns the send and staging buffers; knows the layout, nothing of phases, streams or process groups.

::

    shard buffers --(copy in: only to cast, to leave the host, or to join dtypes)--> send buffer
    send buffer or shard buffers --all-gather--> staging buffer (packed), unsharded buffer (direct)
    staging buffer --(copy out)--> unsharded buffer

Parameters of several dtypes share one packed all-gather, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fsdp2 import _torch
from fsdp2.core.buffers import (
    ALLOCATOR,
    Allocate,
    Arena,
    DtypeBuffers,
    Offloading,
    Resizable,
    on_the_wire,
    view_as_wider_dtype,
)
from fsdp2.core.layout import BufferLayout, Slot, direct_threshold_bytes, joined_row
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import FSDPParam, is_subclass
from fsdp2.core.plan import GatherPlan, indices_of
from fsdp2.core.ports import Port, missing
from fsdp2.core.sharding import rows_in_place
from fsdp2.errors import FSDPRuntimeError

CAST_UPLOAD_BYTES = 64 << 20
"""The most bytes that one copy from the host carries if it casts, too.

torch brings such a source to the device as it is, casts it there, and frees that memory: the next piece reuses it. At
50 GB/s a piece takes 1.3 ms, and its cast 0.05 ms, which is too little to be worth a stream of its own.
"""

Transfer = tuple[torch.Tensor, torch.Tensor]
"""The (output, input) of one collective on the wire; both one-dimensional and contiguous."""


class Unsharded(Protocol):
    """What has an unsharded buffer.

    Attributes:
        unsharded: flat.
    """

    unsharded: Resizable


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Shards in one dtype, and the unsharded buffer that they are gathered into.

    Attributes:
        buffers: whose unsharded buffer is filled.
        shard: flat, this rank's shards.
        layout: of ``shard`` over the ranks that take part, and of the unsharded buffer.
    """

    buffers: Unsharded
    shard: torch.Tensor
    layout: BufferLayout

    @property
    def unsharded(self) -> torch.Tensor:
        """Flat; has memory from `Gather.allocate` or `Gather.copy_out` on."""
        return self.buffers.unsharded.flat

    @property
    def is_sent_as_it_lies(self) -> bool:
        """Whether the shards need neither cast nor move before they are sent."""
        return self.shard.dtype == self.unsharded.dtype and self.shard.device == self.unsharded.device

    @property
    def packed_bytes(self) -> int:
        """What one rank sends of it to the staging buffer."""
        return self.layout.packed_numel * self.unsharded.element_size()


def copies_columns(device: torch.device) -> bool:
    """Whether one kernel copies all columns of a matrix to where they belong. (On CPU, a few copies are faster.)"""
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class _Copies:
    """Of each of ``sources`` into its destination."""

    destinations: list[torch.Tensor]
    sources: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Columns:
    """What lies in ``staged`` (world_size, bytes), ``widths`` bytes of every rank each, and where it is copied."""

    staged: torch.Tensor
    widths: list[int]
    destinations: list[torch.Tensor]


class Gather:
    """One way of filling a group's unsharded buffers: all buffers, views and copies of it, built once.

    Attributes:
        members: what the collective carries, packed part first.
    """

    def __init__(
        self, sources: Sequence[Source], world_size: int, rank: int, device: torch.device, allocate: Allocate | None
    ) -> None:
        self._sources = tuple(sources)
        self._world_size = world_size
        self._rank = rank
        self._allocate = allocate
        self._device = device
        self._packed = [source for source in self._sources if source.layout.packed_numel]
        self._joins = len(self._packed) > 1
        self._heads, head_bytes = self._offsets(self._packed)
        sends_head = self._joins or any(not source.is_sent_as_it_lies for source in self._packed)
        self._copies_head = sends_head or (allocate is not None and bool(self._packed))
        tails = self._tail_sources()
        # The head of the send buffer is what is packed, then come the direct slots of sources that must be copied.
        self._tails, tail_bytes = self._offsets(tails, tail=True)
        own_head = head_bytes if sends_head and allocate is None else 0
        self._head_bytes, self._send_head_bytes = head_bytes, own_head
        self._send = Resizable(torch.empty(own_head + tail_bytes, dtype=torch.uint8, device=device))
        self._staging = Resizable(
            torch.empty(0 if allocate is not None else world_size * head_bytes, dtype=torch.uint8, device=device)
        )
        self._temporary = [buffer for buffer in (self._send, self._staging) if buffer.nbytes]
        self._has_memory = True
        self._arena = ALLOCATOR
        self._sent_version: object = None
        self._has_direct = any(_has_direct(source) for source in self._sources)
        self._copies_in: dict[torch.dtype, _Copies] = {}
        self._copies_out = _Copies([], [])
        self._columns: _Columns | None = None
        self.members: tuple[Transfer, ...] = ()
        if allocate is None:
            self._bind(self._staging.flat, self._send.flat[:own_head])

    @staticmethod
    def _offsets(sources: Sequence[Source], *, tail: bool = False) -> tuple[list[int], int]:
        if not tail:
            return joined_row([source.packed_bytes for source in sources])
        itemsizes = [source.unsharded.element_size() for source in sources]
        pairs = zip(sources, itemsizes, strict=True)
        return joined_row([source.layout.shard_numel * itemsize - source.packed_bytes for source, itemsize in pairs])

    def _bind(self, staging: torch.Tensor, head: torch.Tensor) -> None:
        """Build every view, given the staging buffer (world_size * n,) and this rank's packed input (n,), in bytes."""
        self._let_go()
        members: list[Transfer] = []
        if self._packed:
            members.append(self._packed_member(staging, head))
        staged = staging.view(self._world_size, self._head_bytes)
        if copies_columns(self._device):
            self._columns = self._as_columns(staged)
        for source, offset in zip(self._packed if self._columns is None else (), self._heads, strict=False):
            part = staged[:, offset : offset + source.packed_bytes].view(source.unsharded.dtype)
            for slots in _moved_as_one(source.layout):
                if len(slots) > 1:
                    self._add_copies_out(source.unsharded, part, slots)
                else:
                    self._add_copy_out(source.unsharded, part, slots[0])
        tails = {id(source): offset for source, offset in zip(self._tail_sources(), self._tails, strict=True)}
        for source in self._sources:
            members += self._direct_members(source, tails.get(id(source)))
        self.members = tuple(members)

    def _tail_sources(self) -> list[Source]:
        if self._world_size == 1:
            return []  # copied to where they belong at once
        return [source for source in self._sources if not source.is_sent_as_it_lies and _has_direct(source)]

    def _packed_member(self, staging: torch.Tensor, head: torch.Tensor) -> Transfer:
        if not self._copies_head:
            (source,) = self._packed
            shard = source.shard[: source.layout.packed_numel]
            return on_the_wire(staging.view(shard.dtype)), on_the_wire(shard)
        for source, offset in zip(self._packed, self._heads, strict=True):
            sent = head[offset : offset + source.packed_bytes].view(source.unsharded.dtype)
            self._add_copy_in(source.shard[: source.layout.packed_numel], sent)
        if self._joins:
            return staging, head
        dtype = self._packed[0].unsharded.dtype
        return on_the_wire(staging.view(dtype)), on_the_wire(head.view(dtype))

    def _direct_members(self, source: Source, tail_offset: int | None) -> list[Transfer]:
        if not _has_direct(source):
            return []
        shard, first = source.shard, 0
        if tail_offset is not None:
            first = source.layout.packed_numel
            start = self._send_head_bytes + tail_offset
            nbytes = (source.layout.shard_numel - first) * source.unsharded.element_size()
            shard = self._send.flat[start : start + nbytes].view(source.unsharded.dtype)
            self._add_copy_in(source.shard[first:], shard)
        members = []
        for slot in source.layout.carried:
            if slot.direct and slot.shard_numel:
                whole = source.unsharded.narrow(0, slot.unsharded_offset, self._world_size * slot.shard_numel)
                part = shard.narrow(0, slot.shard_offset - first, slot.shard_numel)
                if self._world_size == 1 and not source.is_sent_as_it_lies:
                    self._add_copy_in(part, whole)
                    part = whole
                members.append((on_the_wire(whole), on_the_wire(part)))
        return members

    def _add_copy_in(self, shard: torch.Tensor, sent: torch.Tensor) -> None:
        """(Apart by dtype: up to torch 2.12, one kernel for several of them writes wrong values on CUDA.)"""
        copies = self._copies_in.setdefault(sent.dtype, _Copies([], []))
        numel = max(sent.numel(), 1)
        if shard.device != self._device and shard.dtype != sent.dtype:
            numel = CAST_UPLOAD_BYTES // shard.element_size()
        copies.sources.extend(shard.split(numel))
        copies.destinations.extend(sent.split(numel))

    def _as_columns(self, staged: torch.Tensor) -> _Columns | None:
        """What is staged, (world_size, bytes), as columns of slots and of gaps; None if some must be rearranged."""
        places: list[tuple[int, torch.Tensor]] = []
        for source, head in zip(self._packed, self._heads, strict=True):
            itemsize, whole = source.unsharded.element_size(), source.unsharded.view(torch.uint8)
            for slot in source.layout.carried:
                if slot.direct or not slot.shard_numel:
                    continue
                if not slot.partition.arrives_in_order:
                    return None
                start, nbytes = slot.unsharded_offset * itemsize, self._world_size * slot.shard_numel * itemsize
                column = whole[start : start + nbytes].view(self._world_size, -1)
                places.append((head + slot.shard_offset * itemsize, column))
        places.sort(key=lambda place: place[0])
        starts = [*(start for start, _ in places), self._head_bytes]
        ends = [0, *(start + column.shape[1] for start, column in places)]
        gaps = [start - end for start, end in zip(starts, ends, strict=True)]
        nowhere = torch.empty(self._world_size * max(gaps), dtype=torch.uint8, device=self._device)
        columns: list[torch.Tensor] = []
        for index, gap in enumerate(gaps):
            if gap:
                columns.append(nowhere[: self._world_size * gap].view(self._world_size, gap))
            columns += [column for _, column in places[index : index + 1]]
        return _Columns(staged, [column.shape[1] for column in columns], columns)

    def _add_copy_out(self, unsharded: torch.Tensor, staged: torch.Tensor, slot: Slot) -> None:
        """From (world_size, ...) rank-major to the slot."""
        piece = staged[:, slot.shard_offset : slot.shard_offset + slot.shard_numel]
        for copy in rows_in_place(piece, unsharded[slot.unsharded_offset :], slot.partition, slot.rows):
            self._add_copy(*copy)

    def _add_copies_out(self, unsharded: torch.Tensor, staged: torch.Tensor, slots: Sequence[Slot]) -> None:
        """The same for slots that `_moved_as_one`: (world_size, slot, row) to (slot, world_size, row)."""
        first, second = slots[0], slots[1]
        ranks, count, numel = self._world_size, len(slots), first.shard_numel
        strides = (staged.stride(0), second.shard_offset - first.shard_offset, 1)
        pieces = staged.as_strided((ranks, count, numel), strides, staged.storage_offset() + first.shard_offset)
        strides = (numel, second.unsharded_offset - first.unsharded_offset, 1)
        self._add_copy(pieces, unsharded.as_strided((ranks, count, numel), strides, first.unsharded_offset))

    def _add_copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        if self._device.type == "cpu":
            source, destination = view_as_wider_dtype((source, destination))
        self._copies_out.sources.append(source)
        self._copies_out.destinations.append(destination)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the send and the staging buffer have at the moment."""
        return self._send.storage.nbytes() + self._staging.storage.nbytes()

    def allocate(self, arena: Arena = ALLOCATOR) -> None:
        """Give memory from ``arena`` to what is sent and what is gathered into. On the stream that writes it first."""
        self._has_memory = True
        self._arena = arena
        for buffer in self._temporary:
            buffer.allocate(arena)
        if self._has_direct or self._allocate is not None:
            self._allocate_unsharded()
        if self._allocate is not None and self._packed:
            self._borrow(self._allocate)

    def _borrow(self, allocate: Allocate) -> None:
        dtype = torch.uint8 if self._joins else self._packed[0].unsharded.dtype
        numel = self._head_bytes // dtype.itemsize
        size = (self._world_size * numel,)
        staging = allocate(size, dtype=dtype, device=self._device).view(torch.uint8)
        self._bind(staging, staging[self._rank * self._head_bytes : (self._rank + 1) * self._head_bytes])

    def _allocate_unsharded(self) -> None:
        for source in self._sources:
            source.buffers.unsharded.allocate(self._arena)

    def copy_in(self, version: object = None) -> None:
        """Cast, join or move to the device what cannot be sent as it lies: one copy of each element.

        ``version``: of the shards. What is copied then stays, and is sent again as long as the version is the same.
        None: it is copied for this gather only. (A custom all-gather borrows its buffers, and keeps nothing; nor is
        anything kept where there is nobody to send it to.)
        """
        if not self._copies_in or (version is not None and version == self._sent_version):
            return
        self._sent_version = None
        for copies in self._copies_in.values():
            _torch.foreach_copy(copies.destinations, copies.sources, non_blocking=True)
        if self._allocate is None and self._world_size > 1:
            self._sent_version = version

    def forget(self) -> None:
        """Keep nothing of what was copied in before."""
        self._sent_version = None
        if not self._has_memory:
            self._send.free()

    def copy_out(self) -> None:
        """Move packed parameters from the staging buffer to their slots, and free what the gather needed.

        On the stream that gathered, so that freeing needs no wait.
        """
        if not self._has_direct and self._allocate is None:
            self._allocate_unsharded()  # not before: while it is in flight, a gather holds its staging buffer only
        if self._columns is not None:
            if self._columns.widths:  # a device's kernel divides by the size of what it is given
                _torch.copy_columns(self._columns.staged, self._columns.widths, self._columns.destinations)
        elif self._copies_out.sources:
            _torch.foreach_copy(self._copies_out.destinations, self._copies_out.sources)
        self.free()

    def free(self) -> None:
        """Free the staging buffer, and the send buffer unless what lies there is kept."""
        if not self._has_memory:
            return
        self._has_memory = False
        for buffer in self._temporary:
            if buffer is not self._send or self._sent_version is None:
                buffer.free()
        if self._allocate is not None:  # what was borrowed goes back with the last view of it
            self._let_go()

    def _let_go(self) -> None:
        self.members = ()
        self._copies_in, self._copies_out, self._columns = {}, _Copies([], []), None


def _moved_as_one(layout: BufferLayout) -> list[list[Slot]]:
    """The packed slots as they lie, those together that are equal and equally far from each other in both buffers."""
    runs: list[list[Slot]] = []
    packed = [slot for slot in layout.carried if not slot.direct and slot.shard_numel]
    for slot in sorted(packed, key=lambda slot: slot.shard_offset):
        if runs and _continues(runs[-1], slot):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _continues(run: Sequence[Slot], slot: Slot) -> bool:
    first, last = run[0], run[-1]
    arrives_in_order = first.partition.arrives_in_order and slot.partition.arrives_in_order
    if not arrives_in_order or slot.shard_numel != first.shard_numel:
        return False
    return len(run) == 1 or _distances(last, slot) == _distances(first, run[1])


def _distances(slot: Slot, other: Slot) -> tuple[int, int]:
    return other.shard_offset - slot.shard_offset, other.unsharded_offset - slot.unsharded_offset


def _has_direct(source: Source) -> bool:
    return any(slot.direct and slot.shard_numel for slot in source.layout.carried)


def gather_between(
    mesh: DataParallelMesh, sources: Sequence[Source], device: torch.device, *, allocate: Allocate | None
) -> Gather:
    """The gather of ``sources`` between the ranks that ``mesh`` shards over; the unsharded buffers have memory.

    With ``allocate``, which says where buffers come from, everything travels packed.
    """
    if allocate is not None:
        sources = [Source(each.buffers, each.shard, each.layout.all_packed()) for each in sources]
    return Gather(sources, mesh.shard_size, mesh.shard_rank, device, allocate)


# `GroupStorage`: all memory that the parameters of one group lie on, and the gathers that fill it.
#
# Decides how parameters are laid out (by dtype, direct or packed, by an extension of their own); knows nothing of
# phases, modules, streams or process groups' collectives.


class PostForwardShards(Protocol):
    """Where the parameters of a group rest between forward and backward, if on fewer ranks.

    Attributes:
        mesh: of these ranks.
        gather: from there to the unsharded buffers; None before `prepare`.
    """

    mesh: DataParallelMesh
    gather: Gather | None

    def prepare(self, buffers: Sequence[DtypeBuffers], device: torch.device, allocate: Allocate | None) -> None:
        """Lay out what rests, without memory. The unsharded buffers have memory."""

    def let_go(self) -> None:
        """Forget the buffers, until the next `prepare`. Nothing rests here."""

    def gather_with(self, allocate: Allocate | None, device: torch.device) -> None:
        """Gather so from now on, as `gather_between` says. The unsharded buffers have memory."""

    def take(self) -> None:
        """Take from the unsharded buffers what is to rest here."""

    def changed(self) -> FSDPParam | None:
        """A parameter that was written while it rested here, if there is one."""

    def free(self) -> None:
        """Free what rests here, once it has been gathered."""


RESTS: Port[Callable[[DataParallelMesh, int], PostForwardShards]] = Port(missing("memory.reshard_to_fewer"))
"""Makes it, of the mesh of the group and the number of ranks. Makes process groups: all ranks call."""


class ExtensionGather(Protocol):
    """The gather of the tensors of a group that gather themselves.

    Attributes:
        keeps_memory: whether `free` leaves the unsharded tensors their memory.
        allocate: where the buffers come from, if these say it.
    """

    keeps_memory: bool
    allocate: Allocate | None

    def begin(self) -> list[Transfer]:
        """What they send, and where it arrives."""

    def begin_from_rests(self, neighbours: DataParallelMesh) -> list[Transfer]:
        """The same, of what rests on ``neighbours``."""

    def finish(self, neighbours: DataParallelMesh | None) -> None:
        """All has arrived: make the unsharded tensors, and keep what is to rest on ``neighbours``."""

    def finish_from_rests(self) -> None:
        """The same, of what came from there."""

    def outdate(self) -> None:
        """Other values come where earlier ones were."""

    def free(self) -> None:
        """The unsharded tensors are used no more."""

    def free_rests(self) -> None:
        """What rested is used no more."""

    def storages(self) -> set[int]:
        """The identities of what the unsharded tensors lie on."""


GATHERS_ITSELF: Port[Callable[[torch.Tensor], bool]] = Port(is_subclass)
"""Whether a tensor gathers itself, or lies in no flat buffer. Not asked of a plain one that has no attributes."""

EXTENSION_GATHER: Port[Callable[[Sequence[FSDPParam], DataParallelMesh, Allocate | None], ExtensionGather]] = Port(
    missing("parameters.tensor_extensions")
)
"""Makes the gather of such parameters."""


class GroupStorage:
    """Where the parameters of one group lie.

    Attributes:
        offloading: where shards live.
        allocate: where the buffers of gathers come from, if these say it; everything then travels packed.
        post_forward: where the parameters rest between forward and backward, if on fewer ranks.
        caches_shards: whether what was copied to be sent is kept for later gathers.
        gather: from the shards; None until there are any, prepared.
        gathers_nothing: all unsharded parameters are views of the shards.
        extensions: the gather of those parameters that gather themselves; None if there are none.
    """

    def __init__(self, params: Sequence[FSDPParam], mesh: DataParallelMesh, offloading: Offloading) -> None:
        self.offloading = offloading
        self.allocate: Allocate | None = None
        self.post_forward: PostForwardShards | None = None
        self.caches_shards = any([param.policy.cache_shards for param in params])
        self._params = tuple(params)
        self._mesh = mesh
        self._keeps_memory = False
        self._buffers: tuple[DtypeBuffers, ...] = ()
        self._extended: tuple[FSDPParam, ...] = ()
        self.extensions: ExtensionGather | None = None
        self.gather: Gather | None = None
        self.gathers_nothing = False
        self._unsharded_storages: frozenset[int] = frozenset()

    @property
    def extended(self) -> tuple[int, ...]:
        """The indices of the parameters that gather themselves."""
        return indices_of(self._params, self._extended)

    def lay_out(self) -> None:
        """Move the sharded parameters into one shard buffer per dtype (on meta there is nothing to move).

        Nothing keeps the shard buffers of before alive, although the next gather may be prepared much later.
        """
        self._buffers, self.gather = (), None
        if self.post_forward is not None:
            self.post_forward.let_go()
        self._extended = self._find_extended()
        if any([param.local.is_meta for param in self._params]):
            return
        if self.offloading.is_host:
            for param in self._extended:
                param.move(self.offloading.device)
        self._buffers = tuple(
            DtypeBuffers(params, self._plan(*dtypes, params), rank=self._mesh.shard_rank, offloading=self.offloading)
            for dtypes, params in self._by_dtype().items()
        )

    def _by_dtype(self) -> dict[tuple[torch.dtype, torch.dtype], list[FSDPParam]]:
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[FSDPParam]] = {}
        for param in self._params:
            if param not in self._extended:
                by_dtype.setdefault((param.dtype, param.param_dtype), []).append(param)
        return by_dtype

    @property
    def plans(self) -> tuple[GatherPlan, ...]:
        """How the parameters are laid out, one plan for each dtype: on meta too, where there are no buffers yet."""
        if self._buffers:
            return tuple(buffers.plan for buffers in self._buffers)
        return tuple(self._plan(*dtypes, params) for dtypes, params in self._by_dtype().items())

    def _plan(self, dtype: torch.dtype, param_dtype: torch.dtype, params: Sequence[FSDPParam]) -> GatherPlan:
        layout = BufferLayout.build(
            [param.sharding.partition for param in params],
            world_size=self._mesh.shard_size,
            itemsize=min(dtype.itemsize, param_dtype.itemsize),
            direct_threshold_bytes=direct_threshold_bytes(fuses=self._mesh.fuses),
        )
        return GatherPlan(dtype, param_dtype, indices_of(self._params, params), layout)

    def _find_extended(self) -> tuple[FSDPParam, ...]:
        params = [param for param in self._params if type(param.local) is not torch.Tensor or param.local.__dict__]
        return tuple([param for param in params if GATHERS_ITSELF.filling(param.local)])

    def check_devices(self, name: str) -> None:
        """Refuse parameters on meta, or elsewhere than their shards live.

        Raises:
            FSDPRuntimeError: naming them.
        """
        meta = [param.path for param in self._params if param.local.is_meta]
        if meta:
            raise FSDPRuntimeError(
                f"parameters of '{name}' are still on the meta device: {', '.join(meta)}. Materialize the model "
                "before its first forward: model.to_empty(device=...), then initialize it or load a state dict."
            )
        device = self.offloading.device
        for param in self._params:
            if param.local.device != device:
                why = "with CPU offload it must be on" if self.offloading.is_host else "its mesh is on"
                raise FSDPRuntimeError(
                    f"parameter '{param.path}' is on {param.local.device}, but {why} {device}: move the model back "
                    f"with model.to('{device}')."
                )

    def prepare(self, *, is_alone: bool = False) -> None:
        """Build the unsharded parameters and the gathers, all left without memory.

        ``is_alone``: one rank has all of every parameter. Then there may be nothing to gather.
        """
        if self._extended != self._find_extended():
            self.lay_out()  # extensions may be given to local tensors until now
        mesh = self._mesh
        for buffers in self._buffers:
            buffers.prepare(mesh.device, in_place=is_alone and self.could_lie_in_place(buffers.plan))
            buffers.keeps_memory = self._keeps_memory
        self.gather = self._make_gather()
        if self.post_forward is not None:
            self.post_forward.prepare(self._buffers, mesh.device, self.allocate)
        self.gather.free()
        for buffers in self._buffers:
            buffers.unsharded.free()
        self.extensions = EXTENSION_GATHER.filling(self._extended, mesh, self.allocate) if self._extended else None
        for param in self._extended:
            param.post_forward = None
        if self.extensions is not None:
            self.extensions.keeps_memory = self._keeps_memory
        self.gathers_nothing = self.extensions is None and all([buffers.lies_in_place for buffers in self._buffers])
        self._unsharded_storages = frozenset(buffers.unsharded_storage for buffers in self._buffers)

    def _make_gather(self) -> Gather:
        """The gather from the shards; the unsharded buffers have memory."""
        sources = [
            Source(buffers, buffers.shard, buffers.layout) for buffers in self._buffers if not buffers.lies_in_place
        ]
        mesh = self._mesh
        return gather_between(mesh, sources, mesh.device, allocate=self.allocate)

    def could_lie_in_place(self, plan: GatherPlan) -> bool:
        """Whether one rank that has all of the parameters of ``plan`` needs no other memory to compute with them."""
        if self.offloading.is_host or plan.dtype != plan.param_dtype:
            return False
        return all([slot.partition.owner is None for slot in plan.layout.slots])

    @property
    def lies_in_place(self) -> bool:
        """Whether some unsharded parameters are views of the shards."""
        return any([buffers.lies_in_place for buffers in self._buffers])

    def gather_with(self, allocate: Allocate | None) -> None:
        """Gather so from now on, as `gather_between` says. Unsharded parameters stay: none is being gathered."""
        self.allocate = allocate
        if self.gather is None:
            return
        empty = [buffers for buffers in self._buffers if not buffers.unsharded.storage.nbytes()]
        for buffers in empty:
            buffers.unsharded.allocate()
        self.gather = self._make_gather()
        self.gather.free()
        if self.post_forward is not None:
            self.post_forward.gather_with(allocate, self._mesh.device)
        for buffers in empty:
            buffers.free()
        if self.extensions is not None:
            self.extensions.allocate = allocate

    # -- one gather

    @property
    def gather_from_rests(self) -> Gather | None:
        """The gather from where the parameters rest after forward."""
        return None if self.post_forward is None else self.post_forward.gather

    def with_extended(self, members: Sequence[Transfer], *, resumes: bool) -> Sequence[Transfer]:
        """``members`` of a gather, and what parameters that gather themselves send. ``resumes``: from their rests."""
        assert self.extensions is not None, "there are some"
        with torch.inference_mode(False), torch.no_grad():  # what they make is used in training as well
            if resumes and self.post_forward is not None:
                return [*members, *self.extensions.begin_from_rests(self.post_forward.mesh)]
            return [*members, *self.extensions.begin()]

    def finish_extended(self, *, resumes: bool) -> None:
        """All has arrived: let parameters that gather themselves make what is unsharded."""
        assert self.extensions is not None, "there are some"
        with torch.inference_mode(False), torch.no_grad():
            if resumes:
                self.extensions.finish_from_rests()
            else:
                self.extensions.finish(None if self.post_forward is None else self.post_forward.mesh)

    def outdate(self) -> None:
        """Other values come where earlier ones were: autograd refuses backwards that have saved those."""
        for buffers in self._buffers:
            buffers.outdate()
        if self.extensions is not None:
            self.extensions.outdate()

    def free(self) -> None:
        """Free everything but the shards; every unsharded parameter loses its values with it."""
        if self.gather is not None:
            self.gather.free()
        for buffers in self._buffers:
            buffers.free()
        if self.extensions is not None:
            self.extensions.free()

    def forget_sent(self) -> None:
        """Copy shards anew in the next gather, whatever is kept."""
        if self.gather is not None:
            self.gather.forget()

    def free_rests(self) -> None:
        """Free what was kept for a gather in backward; the sharded parameters are all there is then."""
        if self.post_forward is not None:
            self.post_forward.free()
        if self.extensions is not None:
            self.extensions.free_rests()

    def keep_memory(self, keep: bool) -> None:
        """Whether `free` leaves the unsharded parameters their memory."""
        self._keeps_memory = keep
        for buffers in self._buffers:
            buffers.keeps_memory = keep
        if self.extensions is not None:
            self.extensions.keeps_memory = keep

    @property
    def keeps_memory(self) -> bool:
        """What `keep_memory` has set."""
        return self._keeps_memory

    # -- what lies here

    @property
    def buffers(self) -> tuple[DtypeBuffers, ...]:
        """One for each dtype; others after the parameters were laid out anew."""
        return self._buffers

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded buffers while they have memory."""
        return sum(buffers.unsharded_bytes for buffers in self._buffers)

    def lies_on_unsharded(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is, or is a view of, an unsharded parameter."""
        storage = _torch.storage_of(tensor)
        if self.extensions is not None and storage in self.extensions.storages():
            return True
        return storage in self._unsharded_storages

    def changed(self) -> FSDPParam | None:
        """A parameter that was written, or moved off its place, while it was unsharded, if there is one."""
        for buffers in self._buffers:
            changed = buffers.changed()
            if changed is not None:
                return changed
        return None
