"""What operators allocate and free inside themselves, where it is known: on CPUs, of the operators that need much.

No dispatch mode sees that. Read off the profiler's record of torch 2.13; `tests/fake_pg/test_estimate.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _convolution(args: Sequence[Any], out: Any) -> int:
    """oneDNN computes in blocks: copies of input and weight, unless they lie channels-last."""
    return _unless_channels_last(args[0]) + _nbytes(args[1])


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """Of the weight's gradient: copies of the output's gradient and of the input."""
    return max(_unless_channels_last(args[0]) + _unless_channels_last(args[1]), _nbytes(args[2]))


def _chunk_cat(args: Sequence[Any], out: Any) -> int:
    """What the engine packs gradients with: padded copies of those whose rows do not divide; a copy of each to cast."""
    tensors, dim, chunks = args[:3]
    padded, largest = 0, 0
    for tensor in tensors:
        rows = tensor.shape[dim]
        nbytes = _nbytes(tensor) // max(rows, 1) * (-(-rows // chunks) * chunks)
        padded += nbytes if rows % chunks else 0
        largest = max(largest, nbytes)
    casts = out is not None and out.dtype != tensors[0].dtype
    return padded + (largest if casts else 0)


def _promoted(args: Sequence[Any], out: Any) -> int:
    """Copies of operands in the dtype that is computed in, of those of another."""
    tensors = [arg for arg in args[:2] if isinstance(arg, torch.Tensor) and arg.dim()]
    if len({tensor.dtype for tensor in tensors}) < 2:
        return 0
    common = torch.result_type(tensors[0], tensors[1])
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _unless_channels_last(tensor: torch.Tensor) -> int:
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return 0 if is_last else _nbytes(tensor)


_KNOWN: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_chunk_cat": _chunk_cat,
    **{f"aten::{name}{suffix}": _promoted for name in ("add", "sub", "mul", "div") for suffix in ("", "_")},
}


def workspace_bytes(func: Any, args: Sequence[Any], out: Any) -> int:
    """What ``func``, which may write to ``out``, takes beside its result, and gives back; 0 where it is not known."""
    known = _KNOWN.get(func._schema.name)
    return 0 if known is None else known(args, out)
