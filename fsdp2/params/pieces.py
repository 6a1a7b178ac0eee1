"""Pieces of a few bytes seen as single elements of another dtype, so that strided copies move each of them at once.

In a large world a rank's piece of a vector is a few bytes: a copy that walks through pieces of 8 or 16 bytes takes
three times as long as one through as many elements of that size. Only copies may see tensors so: the numbers are not
what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_DTYPES = {dtype.itemsize: dtype for dtype in (torch.int16, torch.int32, torch.int64, torch.complex128)}


def piece_dtype(nbytes: int) -> torch.dtype | None:
    """The dtype whose elements have ``nbytes``; None if there is none."""
    return _DTYPES.get(nbytes)


def seen_as_pieces(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of ``tensors`` (..., n) as (..., 1), where n elements can be one in all of them; else ``tensors``."""
    first = tensors[0]
    numel = first.shape[-1]
    dtype = piece_dtype(numel * first.element_size())
    if dtype is None or numel == 1 or not all(_can_be_seen(each, numel) for each in tensors):
        return tensors
    return [each.view(dtype) for each in tensors]


def _can_be_seen(tensor: torch.Tensor, numel: int) -> bool:
    *strides, last = tensor.stride()
    return last == 1 and not any(stride % numel for stride in strides) and tensor.storage_offset() % numel == 0
