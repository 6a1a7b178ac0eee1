"""Turns what a model's forward raises because of the batch into a sentence that says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from fsdp2.errors import FSDPError, FSDPValueError

_OF_BATCHES = (RuntimeError, TypeError, IndexError, ValueError)
_WANTS_INDICES = re.compile(r"\bindices\b|\bLong\b|\bint64\b")


def refused_batch(error: Exception, model: str, batch: Any) -> FSDPValueError | None:
    """The error to raise for ``error``, which the forward of ``model`` raised; None if the batch is not the cause."""
    if not isinstance(error, _OF_BATCHES) or isinstance(error, FSDPError):
        return None
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else [batch]
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    remedy = "Give a batch of the shapes and dtypes that it takes, or try the forward without an estimate"
    floats = [each for each in tensors if each.is_floating_point()]
    if floats and _WANTS_INDICES.search(str(error)):
        integers = _written(floats[0], torch.int64)
        remedy = f"If its numbers are indices, write {integers} on the command line, or dtype=torch.int64 in a program"
    said = ", ".join(_written(each, each.dtype) for each in tensors)
    return FSDPValueError(f"the forward of {model} refused the batch ({said}): {first}. {remedy}.")


def _written(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """``tensor`` as it is written on a command line, with this dtype: ``8x16:int64``."""
    return f"{'x'.join(map(str, tensor.shape))}:{str(dtype).removeprefix('torch.')}"
