"""What a model's forward raises because of the batch, as one sentence that says what to write instead.

Knows exceptions and batches, nothing of a simulation. What the engine raises is not the batch's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import fsdp2
from fsdp2.errors import FSDPError, FSDPValueError

_ENGINE = str(Path(fsdp2.__file__).parent)
_TOOLS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_LAYERS = str(Path(_TORCH) / "nn")
_OF_BATCHES = (RuntimeError, TypeError, IndexError, ValueError)
_WANTS_INDICES = re.compile(r"\bindices\b|\bLong\b|\bint64\b")


def refused_batch(error: Exception, model: str, batch: Any) -> FSDPValueError | None:
    """The sentence to raise for ``error``, which the forward of ``model`` has raised; None if it is of another kind."""
    if not isinstance(error, _OF_BATCHES) or isinstance(error, FSDPError):
        return None
    where = _where(error.__traceback__)
    if where is None:
        return None
    tensors = [each for each in _values(batch) if isinstance(each, torch.Tensor)]
    said = ", ".join(written(each) for each in tensors)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    remedy = "Give a batch of the shapes and dtypes that it takes, or try the forward without an estimate"
    floats = [each for each in tensors if each.is_floating_point()]
    if floats and _WANTS_INDICES.search(str(error)):
        integers = written(floats[0], torch.int64)
        remedy = f"If its numbers are indices, write {integers} on the command line, or dtype=torch.int64 in a program"
    return FSDPValueError(f"the forward of {model} refused the batch ({said}): {first}{where}. {remedy}.")


def written(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """As a command line says it: ``8x16:int64``."""
    return f"{'x'.join(map(str, tensor.shape))}:{str(dtype or tensor.dtype).removeprefix('torch.')}"


def _values(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]


def _where(trace: TracebackType | None) -> str | None:
    """Where the program was, "" if only in layers of torch; None if the innermost frame of interest is the engine's."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    found: str | None = None
    for name, line in reversed(frames):
        if name.startswith(_LAYERS):
            found = ""  # which the program, or a model of layers alone, has called
        elif name.startswith(_ENGINE):
            if not name.startswith(_TOOLS) and found is None:
                return None
        elif not name.startswith(_TORCH):
            return f" ({Path(name).name}, line {line})"
    return found
