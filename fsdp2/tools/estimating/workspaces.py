"""What operators allocate and free inside themselves, for CPU operators that are known to need much.

No dispatch mode sees it. Read off torch 2.13's profiler; `tests/fake_pg/test_estimate.py` compares it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _convolution(args: Sequence[Any], out: Any) -> int:
    """oneDNN computes on blocks: it copies input and weight into its format, unless they are channels-last."""
    return _unless_channels_last(args[0]) + _nbytes(args[1])


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """For the weight's gradient oneDNN copies the output's gradient and the input."""
    return max(_unless_channels_last(args[0]) + _unless_channels_last(args[1]), _nbytes(args[2]))


def _chunk_cat(args: Sequence[Any], out: Any) -> int:
    """The engine packs gradients with it: it pads those whose rows do not divide, and copies each to cast it."""
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
    """Operands in another dtype than that of the computation are copied."""
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
    """Bytes that ``func`` takes and frees beside its result; 0 where it is not known. ``out``: what it writes to."""
    known = _KNOWN.get(func._schema.name)
    return 0 if known is None else known(args, out)
