"""Pieces of a few bytes seen as elements of a wider dtype, so that strided copies move more bytes at once.

In a large world a rank's piece of a vector is a few bytes: a copy that walks through pieces of 8 or 16 bytes takes
three times as long as one through as many elements of that size. Only copies may see tensors so: the numbers are not
what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
