"""Which entries of a whole tensor a rank has, as boxes: [start, stop) of each dim. Pure, but for `boxes_here`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2 import _torch
from fsdp2.core.sharding import ceil_div, row_range
from fsdp2.ragged.dtensor import views_of
from fsdp2.ragged.placement import BlockShard, Box, RaggedShard


def boxes_of(
    mesh_sizes: Sequence[int], placements: Sequence[Any], shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[Box, ...] | None:
    """Which entries of a DTensor of ``shape`` lie at ``coordinate`` of a mesh; None if they are no boxes.

    They follow each other in its local tensor. A worked example, two ranks: ``Shard(0)`` of (5, 3) has ((0, 3), (0, 3))
    at 0, and ((3, 5), (0, 3)) at 1. (Rows of merged dims may be several boxes, or none.)
    """
    axis = next((axis for axis, each in enumerate(placements) if isinstance(each, BlockShard)), None)
    if axis is None:
        box = _box_of(mesh_sizes, placements, shape, coordinate)
        return None if box is None else (box,)
    outer = _box_of(mesh_sizes, [*placements[:axis], Replicate(), *placements[axis + 1 :]], shape, coordinate)
    if outer is None:
        return None
    left = sizes_of(outer)  # by the other mesh dims, which cut first
    rows = placements[axis].rows_of_ranks(left, mesh_sizes[axis])
    start = sum(rows[: coordinate[axis]])
    found = placements[axis].boxes(left, start, start + rows[coordinate[axis]])
    return tuple(
        tuple((first + start, first + stop) for (start, stop), (first, _) in zip(box, outer, strict=True))
        for box in found
    )


def _box_of(
    mesh_sizes: Sequence[int], placements: Sequence[Any], shape: Sequence[int], coordinate: Sequence[int]
) -> Box | None:
    box = [(0, size) for size in shape]
    order: list[int] = []
    for dim in reversed(
        range(len(mesh_sizes))
    ):  # mesh dims from the left to the right, but strided ones after all others
        placement = placements[dim]
        if placement.is_replicate():
            continue
        is_ragged = isinstance(placement, RaggedShard)
        if not is_ragged and not _torch.is_shard(placement):
            return None
        same = [each for each in order if _cut_dim(placements[each]) == _cut_dim(placement)]
        factor = getattr(placement, "split_factor", 1)
        if factor == 1:
            order.insert(0, dim)
        elif factor == math.prod(mesh_sizes[each] for each in same):
            order.append(dim)
        else:
            return None
    for dim in order:
        placement, place = placements[dim], coordinate[dim]
        cut = _cut_dim(placement)
        start, stop = box[cut]
        if isinstance(placement, RaggedShard):
            first = sum(placement.rows[:place])
            box[cut] = (start + first, start + first + placement.rows[place])
        else:
            first, last = row_range(stop - start, ceil_div(stop - start, mesh_sizes[dim]), place)
            box[cut] = (start + first, start + last)
    return tuple(box)


def _cut_dim(placement: Any) -> int:
    return 0 if isinstance(placement, RaggedShard) else int(placement.dim)


def boxes_here(tensor: torch.Tensor) -> tuple[Box, ...] | None:
    """Which entries of ``tensor`` this rank has: all, unless it is a DTensor. None if these are no boxes."""
    if not isinstance(tensor, DTensor):
        return (tuple((0, size) for size in tensor.shape),)
    spec, local = _torch.spec_of(tensor), _torch.local_of(tensor)
    coordinate = spec.mesh.get_coordinate()
    boxes = None if coordinate is None else boxes_of(spec.mesh.shape, spec.placements, tensor.shape, coordinate)
    if boxes is None or sum(math.prod(sizes_of(box)) for box in boxes) != local.numel():
        return None
    is_merged = any(isinstance(each, BlockShard) for each in spec.placements)
    return boxes if is_merged or sizes_of(boxes[0]) == tuple(local.shape) else None


def entries(local: torch.Tensor, boxes: Sequence[Box], wanted: Box) -> Iterator[tuple[Box, torch.Tensor]]:
    """What ``local``, which has the entries of ``boxes``, has of ``wanted``: parts of it, and views of them."""
    for box, view in zip(boxes, views_of(local, boxes), strict=True):
        both = overlap(box, wanted)
        if both is not None:
            yield both, at_box(view, both, box)


def sizes_of(box: Box) -> tuple[int, ...]:
    """The shape of what is in it."""
    return tuple(stop - start for start, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """What is in both; None if nothing is."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in both) else both


def at_box(tensor: torch.Tensor, box: Box, outer: Box) -> torch.Tensor:
    """The entries ``box`` of ``tensor``, which has those of ``outer``."""
    for dim, ((start, stop), (first, _)) in enumerate(zip(box, outer, strict=True)):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - first, stop - start)
    return tensor


def pieces_of(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """``box`` in runs of rows of ``limit`` bytes at most; of larger rows, these in turn. Nothing of an empty one."""
    sizes = sizes_of(box)
    numel = math.prod(sizes)
    if not numel:
        return
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if numel * itemsize <= limit or dim is None:
        yield box
        return
    together = max(1, limit // (numel * itemsize // sizes[dim]))
    start, stop = box[dim]
    for first in range(start, stop, together):
        run = (*box[:dim], (first, min(first + together, stop)), *box[dim + 1 :])
        yield from pieces_of(run, itemsize, limit) if together == 1 else (run,)
