"""Placements that split rows otherwise than torch's ``Shard``: `RaggedShard` and `BlockShard`.

torch's ``Shard`` splits rows as ``torch.chunk`` does. That will not do if shards must not cut through a block of rows,
or if one rank holds everything: `RaggedShard` says how many rows each rank has, as in veScale-FSDP. If a stack of few
matrices is split over many ranks, `BlockShard` splits the rows of all of them together, as in a torch after 2.15.

Three ranks, ``RaggedShard((4, 0, 3))``, a tensor of 7 rows::

    rank 0  | r0 r1 r2 r3 |        rank 1  | |        rank 2  | r4 r5 r6 |

Three ranks, ``BlockShard.split_leading((2, 4, 5), 2)``, two matrices a and b of 4 rows of 5 elements each::

    rank 0  | a0 a1 a2 |        rank 1  | a3 b0 b1 |        rank 2  | b2 b3 |
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from fsdp2.arguments import checked
from fsdp2.errors import FSDPNotImplementedError, FSDPTypeError, FSDPValueError

Box = tuple[tuple[int, int], ...]
"""[start, stop) in each dim."""


class RowsPlacement(Placement):
    """A placement that splits rows: each rank's rows follow those of the ranks before it. Immutable."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; make another one to change {name}.")

    def __deepcopy__(self, memo: dict[int, Any]) -> RowsPlacement:
        return self

    @abstractmethod
    def in_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with its rows in dim 0: a view, if it is contiguous."""

    @abstractmethod
    def rows_of_ranks(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """How many rows each of ``count`` ranks has of a tensor of ``shape``.

        Raises:
            FSDPValueError: the placement does not fit such a tensor, or ``count`` ranks.
        """

    @abstractmethod
    def boxes(self, shape: Sequence[int], start: int, stop: int) -> list[Box]:
        """The boxes of a tensor of ``shape`` that together are its rows [start, stop), in order."""


class RaggedShard(RowsPlacement):
    """Dim 0 is split: ``rows[r]`` consecutive rows lie on rank r of the mesh dim, in rank order.

    Immutable; equal to another one with the same rows.

    Attributes:
        rows: one number for each rank of the mesh dim, 0 allowed; their sum is the tensor's size in dim 0.
    """

    rows: tuple[int, ...]

    @checked()
    def __init__(self, rows: Sequence[int]) -> None:
        """Check the numbers of rows.

        Raises:
            FSDPTypeError: a number of rows is no int.
            FSDPValueError: a number is negative, or there is none.
        """
        super().__init__()
        rows = tuple(rows)
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in rows):
            raise FSDPTypeError(f"RaggedShard takes one int for each rank of the mesh dim, got {rows}.")
        if not rows or min(rows) < 0:
            raise FSDPValueError(f"RaggedShard takes one number >= 0 for each rank of the mesh dim, got {rows}.")
        object.__setattr__(self, "rows", rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash((RaggedShard, self.rows))

    def __repr__(self) -> str:
        return f"RaggedShard({self.rows})"

    def __reduce__(self) -> Any:
        return RaggedShard, (self.rows,)

    def in_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself."""
        return tensor

    def rows_of_ranks(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """Its own ``rows``, if they fit."""
        if len(self.rows) != count or not shape or sum(self.rows) != shape[0]:
            raise FSDPValueError(
                f"{self} does not fit a tensor of shape {tuple(shape)} over {count} ranks: it must have one number of "
                "rows for each rank, which add up to the tensor's size in dim 0."
            )
        return self.rows

    def boxes(self, shape: Sequence[int], start: int, stop: int) -> list[Box]:
        """One box, as rows of dim 0 are contiguous."""
        return [((start, stop), *((0, size) for size in shape[1:]))]


class BlockShard(RowsPlacement):
    """The leading dims are merged to rows, which are split as ``torch.chunk`` does: cuts may fall inside of a matrix.

    Rank r of W has the rows [r * q, (r + 1) * q) of n, with q = ceil(n / W); the last ranks have fewer or none. The
    local tensor has shape (rows, elements of a row); the DTensor has the shape of the full tensor. Made by
    `split_leading`. Immutable; equal to another one of the same blocks, of this class or of torch's.

    Other blocks than rows of equal size can be described, but `fully_shard` refuses them.

    Attributes:
        block_numels: how many elements each block has, in memory order; (n,): all blocks have n.
        block_repeats: how often each block is repeated; None: each comes once.
    """

    block_numels: tuple[int, ...]
    block_repeats: tuple[int, ...] | None

    @checked()
    def __init__(self, block_numels: Sequence[int], block_repeats: Sequence[int] | None = None) -> None:
        """Check the blocks; several equal ones are stored as one.

        Raises:
            FSDPValueError: there are no numbers of elements, or negative ones, or only zeros; the repeats are not as
                many, or one is less than 1; a number is no int.
        """
        super().__init__()
        numels = tuple(block_numels)
        repeats = (1,) * len(numels) if block_repeats is None else tuple(block_repeats)
        if not _are_ints(numels, 0) or not any(numels):
            raise FSDPValueError(f"BlockShard takes the elements of each block, ints >= 0 and not all 0, got {numels}.")
        if len(repeats) != len(numels) or not _are_ints(repeats, 1):
            raise FSDPValueError(
                f"BlockShard takes as block_repeats an int >= 1 for each of {len(numels)} blocks, got {repeats}."
            )
        if len(set(numels)) == 1:
            numels, repeats = numels[:1], (1,)
        object.__setattr__(self, "block_numels", numels)
        object.__setattr__(self, "block_repeats", None if set(repeats) == {1} else repeats)

    @staticmethod
    @checked()
    def split_leading(shape: Sequence[int], k: int) -> BlockShard:
        """The placement for the first ``k`` dims of a tensor of ``shape``, merged: rows have prod(shape[k:]) elements.

        Raises:
            FSDPValueError: ``k`` is 1, for which there is ``Shard(0)``, or no number of dims of ``shape``; the sizes of
                the dims behind the first are all 1, or one is 0.
        """
        sizes = tuple(shape)
        if not 1 <= k <= len(sizes):
            raise FSDPValueError(f"BlockShard.split_leading takes 2 to {len(sizes)} of the dims of {sizes}, got {k}.")
        row_numel = math.prod(sizes[k:])
        if not math.prod(sizes[1:]):
            raise FSDPValueError(f"rows of a tensor of shape {sizes} have no elements: use Shard(0).")
        placement = BlockShard((row_numel,))
        placement.leading(sizes)
        return placement

    def leading(self, shape: Sequence[int]) -> int:
        """How many leading dims of a tensor of ``shape`` are merged: the fewest whose entries are one block each.

        Raises:
            FSDPValueError: it is one, for which there is ``Shard(0)``.
            FSDPNotImplementedError: the blocks are no rows of merged leading dims.
        """
        sizes = tuple(shape)
        if len(self.block_numels) == 1 and sizes:
            for k in range(1, len(sizes) + 1):
                if math.prod(sizes[k:]) == self.block_numels[0]:
                    if k == 1:
                        raise FSDPValueError(
                            f"{self} deals out the rows of dim 0 of a tensor of shape {sizes}: use Shard(0)."
                        )
                    return k
        raise FSDPNotImplementedError(
            f"{self} does not deal out the rows of merged leading dims of a tensor of shape {sizes}, and other blocks "
            "are not supported: use BlockShard.split_leading(parameter.shape, k), with k from 2 to the number of dims."
        )

    def is_block_shard(self) -> bool:
        """True. torch's class has this method too."""
        return True

    def __eq__(self, other: object) -> bool:
        return is_block_shard(other) and (self.block_numels, self.block_repeats or None) == _blocks_of(other)

    def __hash__(self) -> int:
        return hash((self.block_numels, self.block_repeats))

    def __repr__(self) -> str:
        repeats = "" if self.block_repeats is None else f", block_repeats={self.block_repeats}"
        return f"BlockShard(block_numels={self.block_numels}{repeats})"

    def __reduce__(self) -> Any:
        return BlockShard, (self.block_numels, self.block_repeats)

    def in_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as (rows, elements of a row)."""
        return tensor.reshape(-1, self.block_numels[0])

    def rows_of_ranks(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """The numbers of rows that ``torch.chunk`` would give each rank."""
        size = math.prod(tuple(shape)[: self.leading(shape)])
        rows = -(-size // count)
        return tuple(max(0, min(rows, size - rank * rows)) for rank in range(count))

    def boxes(self, shape: Sequence[int], start: int, stop: int) -> list[Box]:
        """A few boxes: parts of the first and of the last matrix, and what lies between."""
        k = self.leading(shape)
        behind = tuple((0, size) for size in tuple(shape)[k:])
        return [(*box, *behind) for box in _boxes_of_run(tuple(shape)[:k], start, stop)]


def _are_ints(values: tuple[Any, ...], least: int) -> bool:
    return all(type(each) is int and each >= least for each in values)


def is_block_shard(placement: object) -> bool:
    """Whether ``placement`` is a `BlockShard`, this package's or a later torch's, which name and fields tell."""
    return (
        isinstance(placement, Placement)
        and any(kind.__name__ == "BlockShard" for kind in type(placement).__mro__)
        and hasattr(placement, "block_numels")
    )


def _blocks_of(placement: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    repeats = getattr(placement, "block_repeats", None)
    repeats = None if repeats is None or set(repeats) == {1} else tuple(repeats)
    return tuple(placement.block_numels), repeats


def own_block_shard(placement: Any) -> BlockShard:
    """This package's `BlockShard` for a ``placement`` that `is_block_shard`."""
    return placement if isinstance(placement, BlockShard) else BlockShard(*_blocks_of(placement))


def _boxes_of_run(sizes: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The entries [start, stop) of a tensor of ``sizes``, in row-major order, as boxes that follow each other."""
    if start >= stop:
        return []
    if len(sizes) == 1:
        return [((start, stop),)]
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner  # the full entries of the first dim in the run
    if first > last:  # the run lies inside of one entry
        return _inside(sizes, last, start, stop)
    boxes = _inside(sizes, first - 1, start, first * inner)
    if first < last:
        boxes.append(((first, last), *((0, size) for size in sizes[1:])))
    return [*boxes, *_inside(sizes, last, last * inner, stop)]


def _inside(sizes: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    inner = math.prod(sizes[1:])
    parts = _boxes_of_run(sizes[1:], start - index * inner, stop - index * inner)
    return [((index, index + 1), *part) for part in parts]
