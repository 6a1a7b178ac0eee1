"""Whole tensors and sharded ones: what state dicts hold, and what parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2


def whole(tensor: torch.Tensor, *, offload: bool) -> torch.Tensor:
    """The whole of a DTensor, in memory of its own; on the CPU if ``offload``. Collective over its mesh."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        full = tensor.full_tensor()
        tensor = full.clone() if full.data_ptr() == local.data_ptr() and full.numel() and not offload else full
    return tensor.cpu() if offload else tensor


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``value``, a whole tensor, placed as ``parameter`` is; this rank's rows of it, without communication.

    The dtype stays the value's. A ``value`` of other dims than the parameter's (a step) is left as it is.
    """
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    value = value.detach().to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def from_sharded_tensor(value: Any, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """This rank's part of a ``ShardedTensor`` of FSDP1, whose rows are those of ``parameter``. No communication.

    Raises:
        FSDPRuntimeError: it was written by another number of ranks.
    """
    shards = value.local_shards()
    if not isinstance(parameter, DTensor):
        raise fsdp2.FSDPRuntimeError(
            f"'{name}' is a ShardedTensor, and the parameter is not sharded: load it with DCP."
        )
    local = parameter.to_local()
    found = shards[0].tensor if shards else local.new_empty(local.shape)
    if found.shape != local.shape or tuple(value.size()) != tuple(parameter.shape):
        raise fsdp2.FSDPRuntimeError(
            f"this rank's part of '{name}' has the shape {list(found.shape)}, and the parameter's {list(local.shape)}: "
            "the checkpoint was written by another number of ranks. Load it with torch.distributed.checkpoint, which "
            "reads it on any number."
        )
    return DTensor.from_local(
        found.to(local.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def is_sharded_tensor(value: object) -> bool:
    """Whether ``value`` is torch's ShardedTensor (which a program without it cannot have)."""
    return type(value).__name__ == "ShardedTensor"


def broadcast(tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """What the first rank of ``group`` has, on all: of the shapes and dtypes of ``like``. Collective."""
    source = dist.get_global_rank(group, 0)
    found: list[torch.Tensor] = []
    for tensor, form in zip(tensors, like, strict=True):
        sent = torch.empty_like(form) if tensor is None else tensor.to(form.device).contiguous()
        dist.broadcast(sent, source, group=group)
        found.append(sent)
    return found
