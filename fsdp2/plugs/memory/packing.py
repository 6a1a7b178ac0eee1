"""How gradients are put side by side for a reduce-scatter, where one operator for all is slow for some.

One row for each rank, of what that rank reduces. Which way is taken is decided when a group is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2 import _torch
from fsdp2.core.buffers import can_be_one, view_as_wider_dtype
from fsdp2.core.gradients import PACKING, Pack
from fsdp2.core.layout import DIRECT_THRESHOLD_BYTES, GradientLayout

COLUMNS_FROM = 1024
"""From so many ranks on, pieces of a few bytes take longer to pack as chunks than as columns."""


def packing_for(layout: GradientLayout, world_size: int, device: torch.device, dtype: torch.dtype, casts: bool) -> Pack:
    """The way of packing that is fastest for what ``layout`` packs as ``dtype``. ``casts``: from another."""
    if device.type != "cpu":
        return chunks_on_device
    if world_size >= COLUMNS_FROM and _are_columns(layout, world_size, dtype, casts=casts):
        return _columns
    return _cast_chunks if casts else _torch.chunk_cat


def _are_columns(layout: GradientLayout, world_size: int, dtype: torch.dtype, *, casts: bool) -> bool:
    """Whether what is packed is alike, and a rank's piece of each one element, or (uncast) can be seen as one."""
    packed = [slot for slot in layout.carried if slot.shard_numel and not slot.direct]
    if not packed or len({slot.partition for slot in packed}) > 1:
        return False
    numel = packed[0].shard_numel
    if any(slot.is_dealt_out or slot.pad_numel or slot.partition.size != slot.rows * world_size for slot in packed):
        return False
    if numel == 1:
        return True
    return not casts and can_be_one(numel * dtype.itemsize) and layout.packed_numel % numel == 0


def _cast_chunks(tensors: Sequence[torch.Tensor], world_size: int, packed: torch.Tensor) -> None:
    """Cast, unless that takes much memory, after packing: the operator itself takes three to five times as long."""
    dtype = tensors[-1].dtype
    if dtype is packed.dtype or packed.nbytes > DIRECT_THRESHOLD_BYTES:
        _torch.chunk_cat(tensors, world_size, packed)
        return
    uncast = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    _torch.chunk_cat(tensors, world_size, uncast)
    packed.copy_(uncast)


def chunks_on_device(tensors: Sequence[torch.Tensor], world_size: int, packed: torch.Tensor) -> None:
    """One kernel, and another for other casts than from bf16 to fp32; one more for each tensor that is not contiguous.

    What CUDA's `_chunk_cat` does in one kernel: all contiguous, and of the dtype that is packed or these two. Otherwise
    it pads, concatenates and copies everything.
    """
    dtype = tensors[-1].dtype
    dense = [each if each.is_contiguous() else each.contiguous() for each in tensors]
    if dtype is packed.dtype or (dtype, packed.dtype) == (torch.bfloat16, torch.float32):
        _torch.chunk_cat(dense, world_size, packed)
        return
    uncast = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    _torch.chunk_cat(dense, world_size, uncast)
    packed.copy_(uncast)


def _columns(tensors: Sequence[torch.Tensor], world_size: int, packed: torch.Tensor) -> None:
    """Of tensors of which each rank gets a few bytes, all alike, and a last one (world_size, ...)."""
    *parts, last = tensors
    width = packed.shape[1] - last.shape[1]
    whole = torch.cat(parts).view(len(parts), world_size, width // len(parts)).transpose(0, 1)
    columns = packed[:, :width].view(whole.shape)
    if whole.dtype is packed.dtype:
        whole, columns = view_as_wider_dtype((whole, columns))
    columns.copy_(whole)
    packed[:, width:].copy_(last)


PACKING.fill(packing_for)
