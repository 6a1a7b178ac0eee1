"""Where every parameter lies in the flat buffers of its group: pure arithmetic, no tensor.

Used by the eager and the traced execution alike. Offsets and sizes count elements (``_numel``) or rows
(``_rows``). For two ranks, parameters ``a`` (3, 2) and ``b`` (2,), both packed::

    rows(a) = ceil(3/2) = 2       rows(b) = 1
    shard buffer, rank 0      | a0 a0 a1 a1 | b0 | 0 0 0 |      every rank's row is padded, to 32 bytes in fp32
    shard buffer, rank 1      | a2 a2 0  0  | b1 | 0 0 0 |      a has one row here, the second is padding
    staging buffer (gathered) | a0 a0 a1 a1 | b0 | 0 0 0 | a2 a2 0  0  | b1 | 0 0 0 |
    unsharded buffer          | a0 a0 a1 a1   a2 a2 0  0 | b0 b1 |

Rank order is row order and padding lies only at the tail, so a slot of the unsharded buffer, cut after ``size0``
rows, is the parameter: contiguous, without a copy. Parameters that one rank owns whole share a slot: see `Region`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp2.core.sharding import Partition, ceil_div

# Parameters that live whole on one rank: where they lie in the region that they share. Pure arithmetic.
#
# All owned parameters of one buffer form one *region*. Every rank has room for ``capacity`` elements there, the most
# that any rank owns, in which its own parameters follow each other. Three ranks, an alignment of one element (the
# engine's is 128 bytes); rank 0 owns ``a`` and ``b``, rank 2 ``c``::
#
#     shard buffers, rank by rank   | a a b |   | 0 0 0 |   | c c 0 |       capacity = 3
#     unsharded buffer              | a a b | 0 0 0 | c c 0 |
#
# One all-gather of even parts fills it, and every parameter is contiguous in it. Of gradients the same buffer is made,
# and one reduce-scatter gives each owner its own, whole.


@dataclass(frozen=True, slots=True)
class Region:
    """The places of owned parameters, in elements.

    Attributes:
        capacity: room on every rank.
        offsets: of each parameter, from the start of the unsharded region: ``owner * capacity`` and its place there.
            None: of those that nobody owns.
        filling: what the unsharded region holds, in order: ``(index, numel)`` of a parameter, ``(None, numel)`` of a
            gap. Parameters of no elements are left out.
    """

    capacity: int
    offsets: tuple[int | None, ...]
    filling: tuple[tuple[int | None, int], ...]

    @classmethod
    def build(cls, owners: Sequence[int | None], numels: Sequence[int], *, world_size: int, alignment: int) -> Region:
        """Lay out those parameters that have an owner, each at a multiple of ``alignment`` elements."""
        ends = [0] * world_size
        starts = [0] * len(owners)
        for index, (owner, numel) in enumerate(zip(owners, numels, strict=True)):
            if owner is not None:
                starts[index] = ends[owner]
                ends[owner] += -(-numel // alignment) * alignment
        capacity = max(ends)
        offsets = tuple(
            None if owner is None else owner * capacity + start for owner, start in zip(owners, starts, strict=True)
        )
        lying = sorted((offset, index) for index, offset in enumerate(offsets) if offset is not None and numels[index])
        filling: list[tuple[int | None, int]] = []
        position = 0
        for offset, index in lying:
            if offset > position:
                filling.append((None, offset - position))
            filling.append((index, numels[index]))
            position = offset + numels[index]
        if world_size * capacity > position:
            filling.append((None, world_size * capacity - position))
        return cls(capacity, offsets, tuple(filling))


DIRECT_ALIGNMENT_BYTES = 128
"""Direct slots start at multiples of this, as collectives like it."""

PACKED_ALIGNMENT_BYTES = 16
"""Packed slots start at multiples of this: the vector width of foreach and fused optimizer kernels."""

SMALLEST_ALIGNED_BYTES = 8 * PACKED_ALIGNMENT_BYTES
"""What a rank has of a smaller packed slot follows the one before directly: alignment adds less than an eighth."""

ALIGNED_ROW_BYTES = 8 * DIRECT_ALIGNMENT_BYTES
"""A packed row, which one rank sends or receives, is padded to `DIRECT_ALIGNMENT_BYTES` from this size on."""

DIRECT_THRESHOLD_BYTES = 1 << 20
"""Parameters of at least this unsharded size travel alone, straight into place; smaller ones are packed."""


UNFUSED_THRESHOLD_BYTES = 32 << 20
"""The same where each collective is a launch of its own, 10 to 20 us: as long as it takes to copy this much."""


def direct_threshold_bytes(*, fuses: bool) -> int:
    """The unsharded size from which a parameter travels alone. ``fuses``: several that do are one launch."""
    return DIRECT_THRESHOLD_BYTES if fuses else UNFUSED_THRESHOLD_BYTES


def align(numel: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``numel``."""
    return ceil_div(numel, alignment) * alignment


def padded_row(numel: int, itemsize: int) -> int:
    """What ``numel`` elements, one rank's in a packed buffer, are padded to, so that every rank's row is aligned.

    NCCL reads and writes 16 bytes at a time only if all of its pointers are multiples of 16; else single elements. At
    most 15 bytes are added, or an eighth.
    """
    alignment_bytes = DIRECT_ALIGNMENT_BYTES if numel * itemsize >= ALIGNED_ROW_BYTES else PACKED_ALIGNMENT_BYTES
    return align(numel, max(alignment_bytes // itemsize, 1))


def joined_row(parts_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Where the parts of one rank's row, packed for several dtypes and joined, start, and how long it is; in bytes.

    >>> joined_row([24, 64])
    ([0, 32], 96)
    """
    starts, end = [], 0
    for nbytes in parts_bytes:
        start = align(end, PACKED_ALIGNMENT_BYTES)
        starts.append(start)
        end = start + nbytes
    return starts, padded_row(end, 1)


def alignment_numel(*, direct: bool, itemsize: int) -> int:
    """How many elements of ``itemsize`` bytes an aligned slot's offset is a multiple of."""
    alignment_bytes = DIRECT_ALIGNMENT_BYTES if direct else PACKED_ALIGNMENT_BYTES
    return max(alignment_bytes // itemsize, 1)


def shard_start(end: int, numel: int, *, direct: bool, itemsize: int) -> int:
    """Where ``numel`` elements of ``itemsize`` bytes start in what one rank holds, if others have filled it to ``end``.

    With many ranks, alignment of small slots would make up most of what is exchanged.
    """
    if not direct and numel * itemsize < SMALLEST_ALIGNED_BYTES:
        return end
    return align(end, alignment_numel(direct=direct, itemsize=itemsize))


def byte_start(end: int, nbytes: int, itemsize: int) -> int:
    """The same in bytes, where elements of several sizes follow each other: each at a multiple of its size."""
    return align(shard_start(end, nbytes, direct=False, itemsize=1), itemsize)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the shard buffer and in the unsharded buffer of its group.

    Attributes:
        partition: how it is dealt out.
        rows: that every rank keeps room for.
        shard_offset: first element in the shard buffer.
        unsharded_offset: first element in the unsharded buffer.
        direct: gathered straight into the unsharded buffer; else through the staging buffer.
    """

    partition: Partition
    rows: int
    shard_offset: int
    unsharded_offset: int
    direct: bool

    @property
    def shard_numel(self) -> int:
        """Elements that every rank keeps room for."""
        return self.partition.outer * self.rows * self.partition.row_numel

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the sharded parameter's local tensor on ``rank``."""
        return self.partition.local_shape(self.rows, rank)


def largest_first(partitions: Sequence[Partition], rows_of: Sequence[int]) -> list[int]:
    """The indices of ``partitions``, each with its rows, in the order in which they lie, without those that are owned.

    Equal ones follow each other, so that one copy moves all of them, and optimizers step on them as one.
    """
    sizes = [
        (-partition.outer * rows * partition.row_numel, -partition.numel)
        for partition, rows in zip(partitions, rows_of, strict=True)
    ]
    return sorted(
        [index for index, partition in enumerate(partitions) if partition.owner is None], key=sizes.__getitem__
    )


@dataclass(frozen=True, slots=True)
class Row:
    """Where one rank's parts of several parameters lie: the packed ones, then each direct one by itself.

    ::

        | pad | packed | pad | packed | behind | padding of the packed row | direct | direct |

    Attributes:
        starts: the first element of each parameter's part, in the order in which they lie.
        pads: the elements before it, for alignment.
        packed_end: where the packed ones end, and what follows ``behind`` them begins.
        packed_numel: length of the packed row, a `padded_row`.
        numel: length of all.
    """

    starts: dict[int, int]
    pads: dict[int, int]
    packed_end: int
    packed_numel: int
    numel: int

    @classmethod
    def build(
        cls, partitions: Sequence[Partition], direct: Sequence[bool], *, world_size: int, itemsize: int, behind: int = 0
    ) -> Row:
        """Lay out a part of each of ``partitions`` that nobody owns, with room ``behind`` the packed ones."""
        rows_of = [partition.rows(world_size) for partition in partitions]
        lying = largest_first(partitions, rows_of)
        starts, pads = {}, {}
        end = packed_end = packed_numel = 0
        for wanted in (False, True):
            for index in lying:
                if direct[index] is wanted:
                    numel = partitions[index].outer * rows_of[index] * partitions[index].row_numel
                    starts[index] = shard_start(end, numel, direct=wanted, itemsize=itemsize)
                    pads[index] = starts[index] - end
                    end = starts[index] + numel
            if not wanted:
                packed_end, end = end, padded_row(end + behind, itemsize)
                packed_numel = end
        return cls(starts, pads, packed_end, packed_numel, end)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of one group's parameters of one dtype over ``world_size`` ranks.

    ``slots`` follow the order of the parameters; in the buffers the packed ones come first, the largest first of these
    and of the direct ones.

    Attributes:
        packed_numel: length of the packed head of the shard buffer, a `padded_row`: what one rank sends to the
            staging buffer.
        shard_numel: length of the shard buffer, the same on every rank.
        unsharded_numel: length of the unsharded buffer.
        region: the slot that owned parameters share, as of one flat parameter that is dealt out evenly.
    """

    world_size: int
    slots: tuple[Slot, ...]
    packed_numel: int
    shard_numel: int
    unsharded_numel: int
    region: Slot | None = None

    @property
    def carried(self) -> tuple[Slot, ...]:
        """What a gather moves: the slots, but the region in the place of those that lie in it."""
        if self.region is None:
            return self.slots
        return (*(slot for slot in self.slots if slot.partition.owner is None), self.region)

    @classmethod
    def build(
        cls,
        partitions: Sequence[Partition],
        *,
        world_size: int,
        itemsize: int,
        direct_threshold_bytes: float = DIRECT_THRESHOLD_BYTES,
    ) -> BufferLayout:
        """Lay out one parameter for each of ``partitions``."""
        region = region_of(partitions, world_size=world_size, itemsize=itemsize)
        carried = [*partitions, Partition((world_size * region.capacity,))] if region else list(partitions)
        rows_of = [partition.rows(world_size) for partition in carried]
        # Padding is at the end where rank order is the order of the parameter.
        rooms = [
            world_size * rows * partition.row_numel if partition.arrives_in_order else partition.numel
            for partition, rows in zip(carried, rows_of, strict=True)
        ]
        direct = [
            partition.arrives_in_order and room * itemsize >= direct_threshold_bytes
            for partition, room in zip(carried, rooms, strict=True)
        ]
        row = Row.build(carried, direct, world_size=world_size, itemsize=itemsize)
        slots: dict[int, Slot] = {}
        end = 0
        for index in row.starts:
            start = align(end, alignment_numel(direct=direct[index], itemsize=itemsize))  # kernels read it there
            slots[index] = Slot(carried[index], rows_of[index], row.starts[index], start, direct[index])
            end = start + rooms[index]
        shared = slots[len(partitions)] if region else None
        if region and shared:
            for index, place in enumerate(region.offsets):
                if place is not None:
                    slots[index] = slot_in_region(partitions[index], shared, shared.unsharded_offset + place)
        placed = tuple([slots[index] for index in range(len(partitions))])
        return cls(world_size, placed, row.packed_numel, padded_row(row.numel, itemsize), end, shared)

    def all_packed(self) -> BufferLayout:
        """The same buffers, every slot gathered through the staging buffer."""
        slots = tuple(replace(slot, direct=False) for slot in self.slots)
        region = None if self.region is None else replace(self.region, direct=False)
        return replace(self, slots=slots, region=region, packed_numel=self.shard_numel)


def region_of(partitions: Sequence[Partition], *, world_size: int, itemsize: int) -> Region | None:
    """Where the owned ones of ``partitions`` lie in the region that they share; None if there are none."""
    owners = [partition.owner for partition in partitions]
    if owners.count(None) == len(owners):
        return None
    alignment = alignment_numel(direct=True, itemsize=itemsize)
    return Region.build(
        owners, [partition.numel for partition in partitions], world_size=world_size, alignment=alignment
    )


def slot_in_region(partition: Partition, region: Slot, unsharded_offset: int) -> Slot:
    """The slot of an owned parameter. (Its place in the shard buffer is the owner's; others keep nothing.)"""
    place = (unsharded_offset - region.unsharded_offset) % region.shard_numel if region.shard_numel else 0
    return Slot(partition, partition.size, region.shard_offset + place, unsharded_offset, region.direct)


@dataclass(frozen=True, slots=True)
class GradientSlot:
    """One trainable parameter's place in the output of a reduce-scatter.

    Attributes:
        partition: of the parameter.
        rows: that every rank receives.
        shard_numel: elements that every rank receives, padding of short ranks included.
        offset: first element in the output.
        direct: its gradient is itself the input of the reduce-scatter; else it is packed.
        is_dealt_out: what the ranks receive is not the gradient as ``torch.chunk`` cuts it, which must be rearranged.
        pad_numel: alignment before a packed slot.
    """

    partition: Partition
    rows: int
    shard_numel: int
    offset: int
    direct: bool
    is_dealt_out: bool
    pad_numel: int

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part that ``rank`` receives."""
        return self.partition.local_shape(self.rows, rank)


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """The layout of the reduce-scatter of one group's trainable parameters in one dtype.

    Two trainable parameters, one packed, one direct::

        output, per rank  | pad | packed slot | presence (one element per parameter) | pad of the row | direct slot |
        packed input      | the same head for rank 0 | for rank 1 | ...                  direct input: the gradient

    What travels is fixed by the plan: a parameter without gradient on this rank contributes zeros, and its element of
    ``presence`` says so; the reduced presence tells every rank whether any rank had a gradient.

    Owned parameters share a slot, the ``region``, as one flat gradient would that is dealt out evenly; it is put
    together from theirs as ``filling`` says.
    """

    slots: tuple[GradientSlot, ...]
    presence_offset: int
    packed_numel: int
    numel: int
    region: GradientSlot | None = None
    filling: tuple[tuple[int | None, int], ...] = ()

    @property
    def carried(self) -> tuple[GradientSlot, ...]:
        """What the reduce-scatter carries: the slots, but the region in the place of those that lie in it."""
        if self.region is None:
            return self.slots
        return (*(slot for slot in self.slots if slot.partition.owner is None), self.region)

    @classmethod
    def build(
        cls,
        partitions: Sequence[Partition],
        direct: Sequence[bool],
        *,
        world_size: int,
        itemsize: int,
        region_threshold_bytes: float = math.inf,
    ) -> GradientLayout:
        """Lay out one gradient for each of ``partitions``.

        ``direct`` says which may travel alone; one whose rows do not divide by ``world_size`` needs the packing's
        padding all the same. So does the region if it has ``region_threshold_bytes``.
        """
        region = region_of(partitions, world_size=world_size, itemsize=itemsize)
        carried = list(partitions)
        alone = [
            may and partition.rows(world_size) * world_size == partition.size
            for may, partition in zip(direct, partitions, strict=True)
        ]
        if region:
            carried.append(Partition((world_size * region.capacity,)))
            alone = [may and partition.owner is None for may, partition in zip(alone, partitions, strict=True)]
            alone.append(carried[-1].numel * itemsize >= region_threshold_bytes)
        row = Row.build(carried, alone, world_size=world_size, itemsize=itemsize, behind=len(partitions))
        placed: dict[int, GradientSlot] = {}
        for index, offset in row.starts.items():
            partition = carried[index]
            rows = partition.rows(world_size)
            placed[index] = GradientSlot(
                partition,
                rows,
                shard_numel=partition.outer * rows * partition.row_numel,
                offset=offset,
                direct=alone[index],
                is_dealt_out=partition.dim is None or partition.memory_dim > 0 or not partition.is_chunked(world_size),
                pad_numel=0 if alone[index] else row.pads[index],
            )
        shared = placed.get(len(partitions))
        for index, place in enumerate(region.offsets if region else ()):
            if place is not None and region and shared:
                start = shared.offset + (place % region.capacity if region.capacity else 0)
                pad_numel = shared.pad_numel if start == shared.offset else 0
                placed[index] = replace(shared, partition=partitions[index], offset=start, pad_numel=pad_numel)
        ordered = tuple(placed[index] for index in range(len(partitions)))
        filling = region.filling if region else ()
        return cls(ordered, row.packed_end, row.packed_numel, row.numel, shared, filling)
