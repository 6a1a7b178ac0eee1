"""Where every parameter lies in the flat buffers of its group: pure arithmetic, no tensor.

Used by the eager and the traced execution alike. Offsets and sizes count elements (``_numel``) or rows
(``_rows``). For two ranks, parameters ``a`` (3, 2) and ``b`` (2,), alignment of 4 elements, both packed::

    rows(a) = ceil(3/2) = 2       rows(b) = 1
    shard buffer, rank 0      | a0 a0 a1 a1 | b0 |      a later slot would start at the next multiple of 4
    shard buffer, rank 1      | a2 a2 0  0  | b1 |      a has one row here, the second is padding
    staging buffer (gathered) | a0 a0 a1 a1 | b0 | a2 a2 0  0  | b1 |
    unsharded buffer          | a0 a0 a1 a1   a2 a2 0  0 | b0 b1 |

Rank order is row order and padding lies only at the tail, so a slot of the unsharded buffer, cut after ``size0``
rows, is the parameter: contiguous, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

DIRECT_ALIGNMENT_BYTES = 128
"""Direct slots start at multiples of this, as collectives like it."""

PACKED_ALIGNMENT_BYTES = 16
"""Packed slots start at multiples of this: the vector width of foreach and fused optimizer kernels."""

DIRECT_THRESHOLD_BYTES = 1 << 20
"""Parameters of at least this unsharded size travel alone, straight into place; smaller ones are packed."""


def ceil_div(numerator: int, denominator: int) -> int:
    """ceil(numerator / denominator) for non-negative integers."""
    return -(-numerator // denominator)


def align(numel: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``numel``."""
    return ceil_div(numel, alignment) * alignment


def alignment_numel(*, direct: bool, itemsize: int) -> int:
    """How many elements of ``itemsize`` bytes a slot's offset is a multiple of."""
    alignment_bytes = DIRECT_ALIGNMENT_BYTES if direct else PACKED_ALIGNMENT_BYTES
    return max(alignment_bytes // itemsize, 1)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the shard buffer and in the unsharded buffer of its group.

    Attributes:
        shape: the unsharded shape.
        dim: the dim that is cut.
        outer: product of the sizes before ``dim``.
        rows: entries of ``dim`` that every rank keeps room for, ceil(shape[dim] / world_size).
        row_numel: elements of one of them, counted behind ``dim`` only.
        shard_offset: first element in the shard buffer.
        unsharded_offset: first element in the unsharded buffer.
        direct: gathered straight into the unsharded buffer; else through the staging buffer.
    """

    shape: tuple[int, ...]
    dim: int
    outer: int
    rows: int
    row_numel: int
    shard_offset: int
    unsharded_offset: int
    direct: bool

    @property
    def shard_numel(self) -> int:
        """Elements that every rank keeps room for."""
        return self.outer * self.rows * self.row_numel

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    def row_range(self, rank: int) -> tuple[int, int]:
        """The entries [start, stop) of ``dim`` that ``rank`` holds; empty on the last ranks of short ones."""
        return row_range(self.shape[self.dim], self.rows, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the sharded parameter's local tensor on ``rank``."""
        start, stop = self.row_range(rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])


def row_range(size: int, rows: int, rank: int) -> tuple[int, int]:
    """The rows [start, stop) of ``rank`` when ``size`` rows are dealt out ``rows`` at a time."""
    start = min(rows * rank, size)
    return start, min(start + rows, size)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of one group's parameters of one dtype over ``world_size`` ranks.

    ``slots`` follow the order of the parameters; in the buffers the packed ones come first.

    Attributes:
        packed_numel: length of the packed head of the shard buffer: what one rank sends to the staging buffer.
        shard_numel: length of the shard buffer, the same on every rank.
        unsharded_numel: length of the unsharded buffer.
    """

    world_size: int
    slots: tuple[Slot, ...]
    packed_numel: int
    shard_numel: int
    unsharded_numel: int

    @classmethod
    def build(
        cls,
        shapes: Sequence[tuple[int, ...]],
        dims: Sequence[int] | None = None,
        *,
        world_size: int,
        itemsize: int,
        direct_threshold_bytes: float = DIRECT_THRESHOLD_BYTES,
    ) -> BufferLayout:
        """Lay out parameters of the given unsharded ``shapes`` (each of at least one dim), cut in ``dims`` (0)."""
        dims = [0] * len(shapes) if dims is None else dims
        slots: list[Slot | None] = [None] * len(shapes)
        shard_offset = unsharded_offset = packed_numel = 0
        for wanted in (False, True):
            alignment = alignment_numel(direct=wanted, itemsize=itemsize)
            for index, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
                outer, row_numel = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
                rows = ceil_div(shape[dim], world_size)
                numel = world_size * outer * rows * row_numel
                # Only in dim 0 is rank order the order of the parameter.
                if (outer == 1 and numel * itemsize >= direct_threshold_bytes) is not wanted:
                    continue
                shard_offset, unsharded_offset = align(shard_offset, alignment), align(unsharded_offset, alignment)
                slots[index] = Slot(shape, dim, outer, rows, row_numel, shard_offset, unsharded_offset, wanted)
                shard_offset, unsharded_offset = shard_offset + numel // world_size, unsharded_offset + numel
            if not wanted:
                packed_numel = shard_offset
        placed = tuple(slot for slot in slots if slot is not None)
        assert len(placed) == len(shapes), "every parameter is either packed or direct"
        return cls(world_size, placed, packed_numel, shard_offset, unsharded_offset)

    def all_packed(self) -> BufferLayout:
        """The same buffers, every slot gathered through the staging buffer."""
        slots = tuple(replace(slot, direct=False) for slot in self.slots)
        return replace(self, slots=slots, packed_numel=self.shard_numel)

    def over(self, world_size: int, itemsize: int) -> BufferLayout:
        """The same unsharded buffer, sharded over fewer ranks: a divisor of this layout's ``world_size``."""
        slots: list[Slot | None] = [None] * len(self.slots)
        offset = packed_numel = 0
        for wanted in (False, True):
            alignment = alignment_numel(direct=wanted, itemsize=itemsize)
            for index, slot in enumerate(self.slots):
                if slot.direct is wanted:
                    offset = align(offset, alignment)
                    rows = ceil_div(slot.shape[slot.dim], world_size)
                    slots[index] = replace(slot, rows=rows, shard_offset=offset)
                    offset += slot.outer * rows * slot.row_numel
            if not wanted:
                packed_numel = offset
        placed = tuple(slot for slot in slots if slot is not None)
        return BufferLayout(world_size, placed, packed_numel, offset, self.unsharded_numel)


@dataclass(frozen=True, slots=True)
class GradientSlot:
    """One trainable parameter's place in the output of a reduce-scatter.

    Attributes:
        shape: the unsharded shape.
        dim: the dim that is cut.
        outer: product of the sizes before ``dim``.
        rows: entries of ``dim`` that every rank receives, ceil(shape[dim] / world_size).
        row_numel: elements of one of them, counted behind ``dim`` only.
        offset: first element in the output.
        direct: its gradient is itself the input of the reduce-scatter; else it is packed.
        pad_numel: alignment after a packed slot.
    """

    shape: tuple[int, ...]
    dim: int
    outer: int
    rows: int
    row_numel: int
    offset: int
    direct: bool
    pad_numel: int

    @property
    def shard_numel(self) -> int:
        """Elements that every rank receives, padding of short ranks included."""
        return self.outer * self.rows * self.row_numel

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part that ``rank`` receives."""
        start, stop = row_range(self.shape[self.dim], self.rows, rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """The layout of the reduce-scatter of one group's trainable parameters in one dtype.

    Two trainable parameters, one packed, one direct::

        output, per rank  | packed slot | pad | presence (one element per parameter) | pad | direct slot |
        packed input      | the same head for rank 0 | for rank 1 | ...                  direct input: the gradient

    What travels is fixed by the plan: a parameter without gradient on this rank contributes zeros, and its element of
    ``presence`` says so; the reduced presence tells every rank whether any rank had a gradient.
    """

    slots: tuple[GradientSlot, ...]
    presence_offset: int
    packed_numel: int
    numel: int

    @classmethod
    def build(
        cls,
        shapes: Sequence[tuple[int, ...]],
        dims: Sequence[int],
        direct: Sequence[bool],
        *,
        world_size: int,
        itemsize: int,
    ) -> GradientLayout:
        """Lay out gradients of the given unsharded ``shapes``, cut in ``dims``.

        ``direct`` says which may travel alone; one whose rows do not divide by ``world_size`` needs the packing's
        padding all the same.
        """
        fine, coarse = (alignment_numel(direct=each, itemsize=itemsize) for each in (False, True))
        alone = [may and shape[0] % world_size == 0 for may, shape in zip(direct, shapes, strict=True)]
        placed: dict[int, GradientSlot] = {}
        offset = 0
        presence_offset = packed_numel = 0
        for wanted in (False, True):
            for index, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
                if alone[index] is not wanted:
                    continue
                outer, row_numel = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
                rows = ceil_div(shape[dim], world_size)
                numel = outer * rows * row_numel
                step = align(numel, coarse if wanted else fine)
                pad_numel = 0 if wanted else step - numel
                placed[index] = GradientSlot(shape, dim, outer, rows, row_numel, offset, wanted, pad_numel)
                offset += step
            if not wanted:
                presence_offset = offset
                packed_numel = offset + len(shapes)
                offset = align(packed_numel, coarse) if any(alone) else packed_numel
        ordered = tuple(placed[index] for index in range(len(shapes)))
        return cls(ordered, presence_offset, packed_numel, offset)
