"""Which entries of a whole tensor a rank has, as boxes: [start, stop) of each dim. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.sharding import contiguous_stride
from fsdp2.plugs.parameters.whole_operators import chunk_of
from fsdp2.ragged.dtensor import boxes_of, views_of
from fsdp2.ragged.placement import Box, RowsPlacement


def boxes_here(tensor: torch.Tensor) -> tuple[Box, ...] | None:
    """Which entries of ``tensor`` this rank has: all, unless it is a DTensor. None if these are no boxes.

    They follow each other in its local tensor. A worked example, two ranks: ``Shard(0)`` of (5, 3) has ((0, 3), (0, 3))
    on the first, and ((3, 5), (0, 3)) on the other. (Rows of merged dims may be several boxes, or none.)
    """
    if not isinstance(tensor, DTensor):
        return (tuple((0, size) for size in tensor.shape),)
    spec, local = _torch.spec_of(tensor), _torch.local_of(tensor)
    if spec.mesh.get_coordinate() is None:
        return None
    if any(isinstance(each, RowsPlacement) for each in spec.placements):
        return tuple(boxes_of(spec))
    if any(not (each.is_replicate() or _torch.is_shard(each)) for each in spec.placements):
        return None
    part = chunk_of(torch.empty(tuple(tensor.shape), device="meta"), spec)
    left, box = int(part.storage_offset()), list[tuple[int, int]]()
    for size, stride in zip(part.shape, contiguous_stride(tensor.shape), strict=True):
        start, left = divmod(left, stride) if part.numel() else (0, 0)
        box.append((start, start + size))
    return (tuple(box),) if part.shape == local.shape else None


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
