"""Whole tensors and sharded ones: what state dicts hold, and what parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2


def whole(tensor: torch.Tensor, *, offload: bool) -> torch.Tensor:
    """The whole of a tensor, in memory of its own; on the CPU if ``offload``. Collective over a DTensor's mesh."""
    tensor = tensor.detach()
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    found = found.cpu() if offload else found
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_alias = found.numel() and found.data_ptr() == local.data_ptr()
    return found.clone() if is_alias else found  # else the next step would change what was saved


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
    return placed_as(parameter, found.to(local.device))


def placed_as(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is placed as ``parameter`` is, of which ``local`` is this rank's part. No communication."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def is_sharded_tensor(value: object) -> bool:
    """Whether ``value`` is torch's ShardedTensor (which a program without it cannot have)."""
    return type(value).__name__ == "ShardedTensor"


class Ranks:
    """The ranks that a model is on, of which the first holds what ``rank0_only`` asks for.

    Args:
        groups: process groups in turn, from the first rank of the last to all: those of a mesh's dims, innermost first.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = tuple(groups)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Ranks:
        """Those of ``mesh``."""
        return cls([mesh.get_group(dim) for dim in reversed(range(mesh.ndim))])

    @property
    def is_first(self) -> bool:
        """Whether this one is."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def objects(self, value: Any) -> Any:
        """What the first has, on all. Collective."""
        box = [value]
        for group in self._groups:
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        return box[0]

    def tensor(self, tensor: torch.Tensor | None, form: torch.Tensor) -> torch.Tensor:
        """What the first has, on all: of the shape, dtype and device of ``form``. Collective."""
        sent = torch.empty_like(form) if tensor is None else tensor.detach().to(form.device, form.dtype).contiguous()
        for group in self._groups:
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        return sent
