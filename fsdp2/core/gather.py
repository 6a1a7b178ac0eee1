"""The all-gather of one group: what is sent, where it arrives, and the copies before and after it.

This file owns the send and staging buffers. It knows the layout, and nothing of phases, streams or process groups.

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
"""How many bytes one copy from the host carries at most, if it casts too.

torch brings such a source to the device as it is, casts it there, and frees that memory: the next piece reuses it. At
50 GB/s a piece takes 1.3 ms, and its cast 0.05 ms, which is too little to be worth a stream of its own.
"""

Transfer = tuple[torch.Tensor, torch.Tensor]
"""The (output, input) of one collective on the wire; both are one-dimensional and contiguous."""


class Unsharded(Protocol):
    """The owner of an unsharded buffer, such as `DtypeBuffers`.

    Attributes:
        unsharded: the flat buffer.
    """

    unsharded: Resizable


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Shards in one dtype, and the unsharded buffer that they are gathered into.

    Attributes:
        buffers: the owner of the unsharded buffer.
        shard: (layout.shard_numel,), this rank's shards.
        layout: where parameters lie in ``shard``, on each rank that takes part, and in the unsharded buffer.
    """

    buffers: Unsharded
    shard: torch.Tensor
    layout: BufferLayout

    @property
    def unsharded(self) -> torch.Tensor:
        """The flat unsharded buffer. It has memory from `Gather.allocate` or `Gather.copy_out` on."""
        return self.buffers.unsharded.flat

    @property
    def is_sent_as_it_lies(self) -> bool:
        """Whether the shards need neither cast nor move before they are sent."""
        return self.shard.dtype == self.unsharded.dtype and self.shard.device == self.unsharded.device

    @property
    def packed_bytes(self) -> int:
        """How many bytes of it one rank sends to the staging buffer."""
        return self.layout.packed_numel * self.unsharded.element_size()


def copies_columns(device: torch.device) -> bool:
    """Whether one kernel copies all columns of a matrix to where they belong. (On CPU, a few copies are faster.)"""
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies that one call makes: each of ``sources`` into its destination."""

    destinations: list[torch.Tensor]
    sources: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of ``staged`` (world_size, bytes), each ``widths`` bytes wide, and where one call copies them."""

    staged: torch.Tensor
    widths: list[int]
    destinations: list[torch.Tensor]


class Gather:
    """One way of filling a group's unsharded buffers. Its buffers, views and copies are built once.

    Attributes:
        members: the (output, input) pairs that the collective carries, the packed one first.
    """

    def __init__(
        self, sources: Sequence[Source], world_size: int, rank: int, device: torch.device, allocate: Allocate | None
    ) -> None:
        self._sources = tuple(sources)
        self._world_size = world_size
        self._rank = rank
        self._allocate = allocate
        self._device = device
        # The send buffer has a head and a tail. The head is this rank's row of the packed gather, in which the parts of
        # several dtypes follow each other. It is needed only if dtypes are joined, cast, or moved from the host: else
        # the head of the shard buffer is sent as it lies.
        self._packed = [source for source in self._sources if source.layout.packed_numel]
        self._joins = len(self._packed) > 1
        self._heads, head_bytes = self._offsets(self._packed)
        sends_head = self._joins or any(not source.is_sent_as_it_lies for source in self._packed)
        self._copies_head = sends_head or (allocate is not None and bool(self._packed))
        # The tail holds the direct slots of those sources that must be cast or moved.
        tails = self._tail_sources()
        self._tails, tail_bytes = self._offsets(tails, tail=True)
        # A custom all-gather has its input within its output, see `_borrow`: no head is needed.
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
        if allocate is None:  # else each gather borrows other buffers, and views are built then
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
        # The copies out: one kernel for all columns, or else one strided copy for each run of like slots.
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
            return []  # a single rank copies them straight to the unsharded buffer
        return [source for source in self._sources if not source.is_sent_as_it_lies and _has_direct(source)]

    def _packed_member(self, staging: torch.Tensor, head: torch.Tensor) -> Transfer:
        if not self._copies_head:  # there is one dtype, sent from where it lies
            (source,) = self._packed
            shard = source.shard[: source.layout.packed_numel]
            return on_the_wire(staging.view(shard.dtype)), on_the_wire(shard)
        for source, offset in zip(self._packed, self._heads, strict=True):
            sent = head[offset : offset + source.packed_bytes].view(source.unsharded.dtype)
            self._add_copy_in(source.shard[: source.layout.packed_numel], sent)
        if self._joins:  # as bytes, for want of a common dtype
            return staging, head
        dtype = self._packed[0].unsharded.dtype
        return on_the_wire(staging.view(dtype)), on_the_wire(head.view(dtype))

    def _direct_members(self, source: Source, tail_offset: int | None) -> list[Transfer]:
        if not _has_direct(source):
            return []
        # `shard` begins at element `first` of the shard buffer: at 0, or behind the packed part if it is a copy.
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
                    # The cast goes to the output at once; a transport of one rank copies nothing onto itself.
                    self._add_copy_in(part, whole)
                    part = whole
                members.append((on_the_wire(whole), on_the_wire(part)))
        return members

    def _add_copy_in(self, shard: torch.Tensor, sent: torch.Tensor) -> None:
        """Let `copy_in` copy ``shard`` to ``sent``; in pieces if that casts on the way from the host."""
        # One call for each dtype: up to torch 2.12, one kernel for several dtypes writes wrong values on CUDA.
        copies = self._copies_in.setdefault(sent.dtype, _Copies([], []))
        numel = max(sent.numel(), 1)
        if shard.device != self._device and shard.dtype != sent.dtype:
            numel = CAST_UPLOAD_BYTES // shard.element_size()
        copies.sources.extend(shard.split(numel))
        copies.destinations.extend(sent.split(numel))

    def _as_columns(self, staged: torch.Tensor) -> _Columns | None:
        """The columns of ``staged`` (world_size, bytes): slots, and gaps between them. None if a slot is rearranged."""
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
        # The columns must add up to the row, so gaps (of alignment) are columns too: they go to one scratch buffer.
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
        """Let `copy_out` move ``slot`` from ``staged`` (world_size, n) to its place in ``unsharded``."""
        piece = staged[:, slot.shard_offset : slot.shard_offset + slot.shard_numel]
        for copy in rows_in_place(piece, unsharded[slot.unsharded_offset :], slot.partition, slot.rows):
            self._add_copy(*copy)

    def _add_copies_out(self, unsharded: torch.Tensor, staged: torch.Tensor, slots: Sequence[Slot]) -> None:
        """Let one strided copy move all ``slots``, a run of `_moved_as_one`.

        They lie as (world_size, slot, row) in ``staged``, and as (slot, world_size, row) in ``unsharded``.
        """
        # Both views have the dims (rank, slot, element of a row), and differ in their strides.
        first, second = slots[0], slots[1]
        ranks, count, numel = self._world_size, len(slots), first.shard_numel
        strides = (staged.stride(0), second.shard_offset - first.shard_offset, 1)
        pieces = staged.as_strided((ranks, count, numel), strides, staged.storage_offset() + first.shard_offset)
        strides = (numel, second.unsharded_offset - first.unsharded_offset, 1)
        self._add_copy(pieces, unsharded.as_strided((ranks, count, numel), strides, first.unsharded_offset))

    def _add_copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        if self._device.type == "cpu":  # where a strided copy takes as long as it has elements
            source, destination = view_as_wider_dtype((source, destination))
        self._copies_out.sources.append(source)
        self._copies_out.destinations.append(destination)

    @property
    def allocated_bytes(self) -> int:
        """How many bytes the send and the staging buffer have at the moment."""
        return self._send.storage.nbytes() + self._staging.storage.nbytes()

    def allocate(self, arena: Arena = ALLOCATOR) -> None:
        """Give memory from ``arena`` to the buffers that the collective reads and writes.

        Stream: the one that writes them first must be current.
        """
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
        # A custom all-gather gathers in place: its input is this rank's row of its output.
        self._bind(staging, staging[self._rank * self._head_bytes : (self._rank + 1) * self._head_bytes])

    def _allocate_unsharded(self) -> None:
        for source in self._sources:
            source.buffers.unsharded.allocate(self._arena)

    def copy_in(self, version: object = None) -> None:
        """Cast, join or move to the device what cannot be sent as it lies: one copy of each element.

        ``version``: a version of the shards. Their copies are kept, and sent again by gathers that pass the same
        version. None: they are copied for this gather only. (A custom all-gather keeps none, as it borrows its buffers;
        a single rank keeps none, as it copies to the unsharded buffer.)
        """
        if not self._copies_in or (version is not None and version == self._sent_version):
            return
        # If an exception interrupts the copies, nothing must pass for kept.
        self._sent_version = None
        for copies in self._copies_in.values():
            _torch.foreach_copy(copies.destinations, copies.sources, non_blocking=True)
        if self._allocate is None and self._world_size > 1:
            self._sent_version = version

    def forget(self) -> None:
        """Drop copies of shards that were kept for further gathers."""
        self._sent_version = None
        if not self._has_memory:  # else a gather is under way, which frees it
            self._send.free()

    def copy_out(self) -> None:
        """Move packed parameters from the staging buffer to their slots, and free what the gather needed.

        Stream: the one that gathered must be current, so that freeing needs no wait.
        """
        if not self._has_direct and self._allocate is None:
            # Not earlier: a gather in flight ahead of its use then holds its staging buffer only.
            self._allocate_unsharded()
        if self._columns is not None:
            if self._columns.widths:  # the kernel divides by the size of its input, so it must not be empty
                _torch.copy_columns(self._columns.staged, self._columns.widths, self._columns.destinations)
        elif self._copies_out.sources:
            _torch.foreach_copy(self._copies_out.destinations, self._copies_out.sources)
        self.free()

    def free(self) -> None:
        """Free the staging buffer, and the send buffer unless copies of shards are kept there."""
        if not self._has_memory:
            return
        self._has_memory = False
        for buffer in self._temporary:
            if buffer is not self._send or self._sent_version is None:
                buffer.free()
        if self._allocate is not None:  # borrowed memory goes back to its owner with the last view of it
            self._let_go()

    def _let_go(self) -> None:
        self.members = ()
        self._copies_in, self._copies_out, self._columns = {}, _Copies([], []), None


def _moved_as_one(layout: BufferLayout) -> list[list[Slot]]:
    """The packed slots in the order of the staging buffer, in runs that one strided copy moves.

    The slots of a run are of one size, and at equal distances from each other in both buffers.
    """
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
    # Any two slots of one size make a run; from the third on their distance must repeat.
    return len(run) == 1 or _distances(last, slot) == _distances(first, run[1])


def _distances(slot: Slot, other: Slot) -> tuple[int, int]:
    return other.shard_offset - slot.shard_offset, other.unsharded_offset - slot.unsharded_offset


def _has_direct(source: Source) -> bool:
    return any(slot.direct and slot.shard_numel for slot in source.layout.carried)


def gather_between(
    mesh: DataParallelMesh, sources: Sequence[Source], device: torch.device, *, allocate: Allocate | None
) -> Gather:
    """The gather of ``sources`` between the ranks that ``mesh`` shards over. The unsharded buffers must have memory.

    With ``allocate``, by which a custom all-gather makes its buffers, everything is packed.
    """
    if allocate is not None:
        sources = [Source(each.buffers, each.shard, each.layout.all_packed()) for each in sources]
    return Gather(sources, mesh.shard_size, mesh.shard_rank, device, allocate)


# `GroupStorage`: all memory that the parameters of one group lie on, and the gathers that fill it.
#
# It decides how parameters are laid out (by dtype, direct or packed, by an extension of their own). It knows nothing of
# phases, modules, streams or process groups' collectives.


class PostForwardShards(Protocol):
    """The shards of a group between forward and backward, if it reshards to fewer ranks then.

    Attributes:
        mesh: the mesh of these ranks.
        gather: from these shards to the unsharded buffers; None before `prepare`.
    """

    mesh: DataParallelMesh
    gather: Gather | None

    def prepare(self, buffers: Sequence[DtypeBuffers], device: torch.device, allocate: Allocate | None) -> None:
        """Lay out these shards, without memory. The unsharded buffers must have memory."""

    def let_go(self) -> None:
        """Forget the buffers until the next `prepare`. No shards are here."""

    def gather_with(self, allocate: Allocate | None, device: torch.device) -> None:
        """Build the gather anew, with ``allocate`` as in `gather_between`. The unsharded buffers must have memory."""

    def take(self) -> None:
        """Copy this rank's shards out of the unsharded buffers."""

    def changed(self) -> FSDPParam | None:
        """A parameter of which these shards were written, if there is one."""

    def free(self) -> None:
        """Free these shards, once they have been gathered."""


RESTS: Port[Callable[[DataParallelMesh, int], PostForwardShards]] = Port(missing("memory.reshard_to_fewer"))
"""Makes the post-forward shards of a group from its mesh and the number of ranks, by process groups: all ranks call."""


class ExtensionGather(Protocol):
    """The gather of those parameters of a group that gather themselves, by ``fsdp_pre_all_gather``.

    Attributes:
        keeps_memory: whether `free` leaves the unsharded tensors their memory.
        allocate: makes the buffers of a custom all-gather; None: the engine makes them.
    """

    keeps_memory: bool
    allocate: Allocate | None

    def begin(self) -> list[Transfer]:
        """Return the (output, input) pairs to gather."""

    def begin_from_rests(self, neighbours: DataParallelMesh) -> list[Transfer]:
        """Return the (output, input) pairs to gather the post-forward shards among ``neighbours``."""

    def finish(self, neighbours: DataParallelMesh | None) -> None:
        """All has arrived: make the unsharded tensors, and keep post-forward shards for ``neighbours``."""

    def finish_from_rests(self) -> None:
        """All post-forward shards have arrived: make the unsharded tensors."""

    def outdate(self) -> None:
        """Other values come to the same memory: let autograd refuse backwards that have saved earlier ones."""

    def free(self) -> None:
        """Free the unsharded tensors."""

    def free_rests(self) -> None:
        """Free the post-forward shards."""

    def storages(self) -> set[int]:
        """The identities of the storages that the unsharded tensors lie on."""


GATHERS_ITSELF: Port[Callable[[torch.Tensor], bool]] = Port(is_subclass)
"""Tells whether a tensor gathers itself, so that it lies in no flat buffer. Plain ones without attributes never do."""

EXTENSION_GATHER: Port[Callable[[Sequence[FSDPParam], DataParallelMesh, Allocate | None], ExtensionGather]] = Port(
    missing("parameters.tensor_extensions")
)
"""Makes the gather of parameters that gather themselves."""


class GroupStorage:
    """Where the parameters of one group lie.

    Attributes:
        offloading: where shards live.
        allocate: makes the buffers of a custom all-gather, for which everything is packed; None: the engine makes them.
        post_forward: the shards between forward and backward, if the group reshards to fewer ranks.
        caches_shards: whether cast shards are kept for later gathers.
        gather: the gather from the shards; None until `prepare`.
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

        The gather is dropped with them: it would keep the old shard buffers alive until the next `prepare`.
        """
        self._buffers, self.gather = (), None
        if self.post_forward is not None:
            self.post_forward.let_go()
        self._extended = self._find_extended()
        if any([param.local.is_meta for param in self._params]):
            return
        if self.offloading.is_host:  # the others move with their buffer
            for param in self._extended:
                param.move(self.offloading.device)
        self._buffers = tuple(
            DtypeBuffers(params, self._plan(*dtypes, params), rank=self._mesh.shard_rank, offloading=self.offloading)
            for dtypes, params in self._by_dtype().items()
        )

    def _by_dtype(self) -> dict[tuple[torch.dtype, torch.dtype], list[FSDPParam]]:
        # Parameters of one original and one unsharded dtype share buffers, so that casts and copies treat them as one.
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[FSDPParam]] = {}
        for param in self._params:
            if param not in self._extended:
                by_dtype.setdefault((param.dtype, param.param_dtype), []).append(param)
        return by_dtype

    @property
    def plans(self) -> tuple[GatherPlan, ...]:
        """One plan for each pair of original and unsharded dtype. On meta too, where there are no buffers yet."""
        if self._buffers:
            return tuple(buffers.plan for buffers in self._buffers)
        return tuple(self._plan(*dtypes, params) for dtypes, params in self._by_dtype().items())

    def _plan(self, dtype: torch.dtype, param_dtype: torch.dtype, params: Sequence[FSDPParam]) -> GatherPlan:
        layout = BufferLayout.build(
            [param.sharding.partition for param in params],
            world_size=self._mesh.shard_size,
            # One layout serves both buffers: offsets that are aligned in the narrower dtype are so in both.
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
        # Views can only be made of buffers that have memory. At the end all of it is freed.
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
            param.post_forward = None  # extensions keep post-forward shards; the sharded parameter is registered
        if self.extensions is not None:
            self.extensions.keeps_memory = self._keeps_memory
        self.gathers_nothing = self.extensions is None and all([buffers.lies_in_place for buffers in self._buffers])
        self._unsharded_storages = frozenset(buffers.unsharded_storage for buffers in self._buffers)

    def _make_gather(self) -> Gather:
        """The gather from the shards. The unsharded buffers must have memory."""
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
        """Build the gather anew, with ``allocate`` as in `gather_between`. No gather is under way."""
        self.allocate = allocate
        if self.gather is None:
            return
        # Buffers without memory get some for the views; unsharded parameters keep what they have.
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
        """The gather from the post-forward shards; None if there are none."""
        return None if self.post_forward is None else self.post_forward.gather

    def with_extended(self, members: Sequence[Transfer], *, resumes: bool) -> Sequence[Transfer]:
        """``members``, and those of parameters that gather themselves. ``resumes``: from post-forward shards."""
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
        """Other values come to the same memory: let autograd refuse backwards that have saved earlier ones."""
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
        """Drop cast shards that are kept, so that the next gather casts anew."""
        if self.gather is not None:
            self.gather.forget()

    def free_rests(self) -> None:
        """Free the post-forward shards: the next gather is from the shards of all ranks."""
        if self.post_forward is not None:
            self.post_forward.free()
        if self.extensions is not None:
            self.extensions.free_rests()

    def keep_memory(self, keep: bool) -> None:
        """Set whether `free` leaves the unsharded parameters their memory."""
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
        """The buffers, one for each pair of original and unsharded dtype. `lay_out` makes others."""
        return self._buffers

    @property
    def unsharded_bytes(self) -> int:
        """How many bytes the unsharded buffers have while they have memory."""
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
