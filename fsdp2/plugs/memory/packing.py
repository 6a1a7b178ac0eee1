"""How gradients are packed for a reduce-scatter: torch's `_chunk_cat` is slow for some shapes, dtypes and devices.

The packed buffer has a row for each rank, with what that rank reduces. `packing_for` chooses when a group is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2 import _torch
from fsdp2.core.buffers import can_be_one, view_as_wider_dtype
from fsdp2.core.gradients import PACKING, Pack
from fsdp2.core.layout import DIRECT_THRESHOLD_BYTES, GradientLayout

COLUMNS_FROM = 1024
"""The number of ranks at which pieces of a few bytes are packed faster as columns than as chunks."""


def packing_for(layout: GradientLayout, world_size: int, device: torch.device, dtype: torch.dtype, casts: bool) -> Pack:
    """The fastest way to pack what ``layout`` packs in ``dtype``. ``casts``: gradients arrive in another dtype."""
    if device.type != "cpu":
        return chunks_on_device
    if world_size >= COLUMNS_FROM and _are_columns(layout, world_size, dtype, casts=casts):
        return _columns
    return _cast_chunks if casts else _torch.chunk_cat


def _are_columns(layout: GradientLayout, world_size: int, dtype: torch.dtype, *, casts: bool) -> bool:
    """Whether all packed slots are alike, and a rank's piece of each is, or can be viewed as, one element."""
    packed = [slot for slot in layout.carried if slot.shard_numel and not slot.direct]
    if not packed or len({slot.partition for slot in packed}) > 1:
        return False
    numel = packed[0].shard_numel
    if any(slot.is_dealt_out or slot.pad_numel or slot.partition.size != slot.rows * world_size for slot in packed):
        return False
    if numel == 1:
        return True
    # A view in a wider dtype needs pieces that lie at multiples of its size, and no cast in between.
    return not casts and can_be_one(numel * dtype.itemsize) and layout.packed_numel % numel == 0


def _cast_chunks(tensors: Sequence[torch.Tensor], world_size: int, packed: torch.Tensor) -> None:
    """Pack, then cast: an operator that casts as it packs takes three to five times as long."""
    dtype = tensors[-1].dtype
    if dtype is packed.dtype or packed.nbytes > DIRECT_THRESHOLD_BYTES:
        # A large buffer is cast while it is packed: an uncast copy of it would take as much memory again.
        _torch.chunk_cat(tensors, world_size, packed)
        return
    uncast = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    _torch.chunk_cat(tensors, world_size, uncast)
    packed.copy_(uncast)


def chunks_on_device(tensors: Sequence[torch.Tensor], world_size: int, packed: torch.Tensor) -> None:
    """Pack in one kernel; other casts than bf16 to fp32 and non-contiguous tensors take one more kernel each.

    CUDA's `_chunk_cat` is one kernel only if all tensors are contiguous, and of the packed dtype or bf16 packed as
    fp32. Otherwise it pads, concatenates and copies everything.
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
    """Pack equal small tensors column by column; the last tensor, (world_size, n), is the grad mask."""
    *parts, last = tensors
    width = packed.shape[1] - last.shape[1]
    # (params, world_size, piece) -> (world_size, params, piece): a row for each rank.
    whole = torch.cat(parts).view(len(parts), world_size, width // len(parts)).transpose(0, 1)
    columns = packed[:, :width].view(whole.shape)
    if whole.dtype is packed.dtype:
        whole, columns = view_as_wider_dtype((whole, columns))
    columns.copy_(whole)
    packed[:, width:].copy_(last)


PACKING.fill(packing_for)
