"""Whole tensors and sharded ones: what state dicts hold, and what parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2


def whole(tensor: torch.Tensor, *, offload: bool) -> torch.Tensor:
    """The whole of a tensor, in memory of its own; on the CPU if ``offload``. Collective over a DTensor's mesh."""
    tensor = tensor.detach()
    found = _full(tensor) if isinstance(tensor, DTensor) else tensor
    found = found.cpu() if offload else found
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_alias = found.numel() and found.data_ptr() == local.data_ptr()
    return found.clone() if is_alias else found  # else the next step would change what was saved


def _full(tensor: DTensor) -> torch.Tensor:
    """The whole of it where it is, also in host memory, from which groups of accelerators do not communicate."""
    there = tensor.device_mesh.device_type
    if tensor.device.type == there:
        return tensor.full_tensor()
    moved: DTensor = tensor.to(there)  # type: ignore[assignment]
    return moved.full_tensor().to(tensor.device)


_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""From torch 2.13 on the older name warns."""
_TOGETHER_BYTES = 64 * 2**10
"""Of whole tensors that are gathered by one collective, and are in memory twice for a moment."""


def wholes(tensors: Sequence[torch.Tensor], *, offload: bool, keep: bool = True) -> list[torch.Tensor]:
    """`whole` of each. Small tensors that are cut alike along dim 0 travel together, large ones alone. Collective.

    Not ``keep``: this rank takes part in the collectives, and drops what arrives at once; nothing is returned.
    """
    found: dict[int, torch.Tensor] = {}
    together: dict[int, DTensor] = {}
    nbytes, offload = 0, offload and keep
    for index, tensor in enumerate(tensors):
        if not keep:
            found.clear()
        if not isinstance(tensor, DTensor):
            if keep:
                found[index] = whole(tensor, offload=offload)
            continue
        if not _is_cut_in_rows(tensor):
            found[index] = whole(tensor, offload=offload)
            continue
        size = tensor.numel() * tensor.element_size()
        if size > _TOGETHER_BYTES and tensor.shape[0] % tensor.device_mesh.size(-1) == 0:
            found[index] = _gathered_in_place(tensor, offload)
            continue
        first = next(iter(together.values()), tensor)
        if nbytes + size > _TOGETHER_BYTES or not _lie_alike(first, tensor):
            found |= _gathered_together(together, offload)
            together, nbytes = {}, 0
        together[index] = tensor
        nbytes += size
    found |= _gathered_together(together, offload)
    return [found[index] for index in range(len(tensors))] if keep else []


def _is_cut_in_rows(tensor: DTensor) -> bool:
    """By its last mesh dim along dim 0, as `torch.chunk` cuts, and whole along the others; contiguous."""
    *rest, last = tensor.placements
    return (
        type(last) is Shard
        and last.dim == 0
        and all(type(each) is Replicate for each in rest)
        and tensor.is_contiguous()
        and type(tensor.to_local()) is torch.Tensor
    )


def _lie_alike(first: DTensor, other: DTensor) -> bool:
    mine, theirs = ((each.device_mesh, each.placements, each.dtype) for each in (first, other))
    return mine == theirs


def _gathered_in_place(tensor: DTensor, offload: bool) -> torch.Tensor:
    """The whole of a tensor of which all ranks have as many rows: it arrives where it stays. Collective."""
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    found = local.new_empty(tensor.shape, device=torch.device(mesh.device_type))
    all_gather(found.view(-1), local.to(found.device).view(-1), mesh.get_group(mesh.ndim - 1))
    return found.to(torch.device("cpu") if offload else local.device)


def _gathered_together(together: dict[int, DTensor], offload: bool) -> dict[int, torch.Tensor]:
    """The wholes of tensors that are cut alike, under their keys, by one all-gather. Collective."""
    tensors = list(together.values())
    ranks = tensors[0].device_mesh.size(-1) if tensors else 1
    if len(tensors) == 1 or ranks == 1:
        return {key: whole(tensor, offload=offload) for key, tensor in together.items()}
    mesh = tensors[0].device_mesh
    rooms = [-(-each.shape[0] // ranks) * (each.numel() // max(each.shape[0], 1)) for each in tensors]
    locals_ = [each.to_local().detach() for each in tensors]
    sent = locals_[0].new_zeros(sum(rooms), device=torch.device(mesh.device_type))
    for part, local in zip(sent.split(rooms), locals_, strict=True):
        part[: local.numel()] = local.reshape(-1)
    received = sent.new_empty(ranks * sent.numel())
    all_gather(received, sent, mesh.get_group(mesh.ndim - 1))
    of_ranks = received.view(ranks, -1).split(rooms, dim=1)
    found = {}
    for (key, tensor), local, parts in zip(together.items(), locals_, of_ranks, strict=True):
        flat = parts.reshape(-1)[: tensor.numel()]  # a copy, as they are several
        found[key] = flat.to(torch.device("cpu") if offload else local.device).view(tensor.shape)
    return found


def all_gather(output: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """``output`` (W * n,) is ``sent`` (n,) of all ranks. Collective."""
    getattr(dist, _ALL_GATHER)(output, sent, group=group)


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
    placed = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return placed if placed.device == local.device else placed.to(local.device)  # it was moved to the mesh's device


def is_sharded_tensor(value: object) -> bool:
    """Whether ``value`` is torch's ShardedTensor (which a program without it cannot have)."""
    return type(value).__name__ == "ShardedTensor"


class Ranks:
    """The ranks that a model is on, of which the first holds what ``rank0_only`` asks for.

    Args:
        groups: process groups in turn, from the first rank of the last to all: those of a mesh's dims, innermost first.
        device_type: on which they communicate; None: wherever tensors are.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device_type: str | None = None) -> None:
        self._groups = tuple(groups)
        self._device_type = device_type

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Ranks:
        """Those of ``mesh``."""
        return cls([mesh.get_group(dim) for dim in reversed(range(mesh.ndim))], mesh.device_type)

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
        if self._device_type not in (None, sent.device.type):  # it rests in host memory
            sent = sent.to(self._device_type)
        for group in self._groups:
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        return sent.to(form.device)
