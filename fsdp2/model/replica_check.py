"""Replicas compare checksums of what they hold: when training begins, and before sharding if a program asks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import _torch
from fsdp2.arguments import checked
from fsdp2.core.agreement import disagreement
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import is_subclass
from fsdp2.core.root import ON_TRAINING, FSDPRoot
from fsdp2.errors import FSDPRuntimeError
from fsdp2.model.broadcast_parameters import GROUP, device_that_travels, group_of, plain_tensors

_CHUNK = 1 << 22
"""Bytes that are looked at in one piece, which takes four times as much memory."""

_MODULUS = 2_147_483_647
_FACTOR = 48_271


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-D int64 of the bytes of ``tensor``, in their order: equal for equal ones. On its device."""
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 4:  # a part of a tensor of narrow elements
        data = data.clone()
    for piece in data.split(_CHUNK):
        numbers = piece[: piece.numel() // 4 * 4].view(torch.int32).to(torch.int64).remainder_(_MODULUS)
        rest = piece[numbers.numel() * 4 :].to(torch.int64)
        for part in (numbers, rest):
            at = torch.arange(1, part.numel() + 1, device=part.device)
            found.mul_(_FACTOR).add_((part.mul_(at).remainder_(_MODULUS)).sum()).remainder_(_MODULUS)
    return found


def _described(tensors: Mapping[str, torch.Tensor]) -> str:
    """A line for each: its name, shape, dtype and checksum. Waits for the device, once for each of these."""
    lines = []
    with _torch.unobserved(), torch.no_grad():
        sums = {name: _checksum(each) for name, each in tensors.items()}
    for device in {each.device for each in sums.values()}:
        here = [name for name, each in sums.items() if each.device == device]
        values = torch.stack([sums[name] for name in here]).tolist()
        for name, value in zip(here, values, strict=True):
            lines.append(f"{name} {list(tensors[name].shape)} {tensors[name].dtype}: checksum {value:08x}")
    return "\n".join(sorted(lines))


def _can_be_compared(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or _torch.is_fake(tensor) or is_subclass(tensor)) and tensor.layout is torch.strided


def _names(difference: str) -> str:
    """Those that a `disagreement` tells of."""
    lines = [line[1:] for line in difference.splitlines() if line[:1] in "+-" and line[1:2] not in "+-"]
    return ", ".join(dict.fromkeys(f"'{line.partition(' ')[0]}'" for line in lines))


def _differing(tensors: Mapping[str, torch.Tensor], mesh: DataParallelMesh, what: str) -> str:
    """The names of those that replicas hold differently, on all ranks of the mesh; "" if none. Collective."""
    difference = disagreement(_described(tensors), mesh.replicate_group, mesh.device, f"the replicas of {what}")
    mine = "" if difference is None else _names(difference)
    others = disagreement(mine, mesh.shard_group, mesh.device, f"what was found of the replicas of {what}")
    return mine or ("" if others is None else _names(others.replace("'", "")) or "of other rows")


def _told(names: str, mesh: DataParallelMesh, what: str) -> str:
    """``names``, or else those that other ranks of ``mesh`` have found. Collective."""
    for group in (mesh.shard_group, mesh.replicate_group):  # the second learn what the first have been told
        others = disagreement(names, group, mesh.device, f"what was found of the replicas of {what}")
        names = names or ("" if others is None else _names(others.replace("'", "")) or "other ranks")
    return names


def _compare_replicas(root: FSDPRoot) -> None:
    """Compare what the replicas of all groups of ``root`` hold.

    Raises:
        FSDPRuntimeError: parameters differ.
    """
    settings = root.settings
    owner: Any = root.owner
    by_mesh: dict[Any, tuple[DataParallelMesh, dict[str, torch.Tensor]]] = {}
    for group in root.groups:
        if group.mesh.replicate_group is not None and settings.compares_parameters:
            _, tensors = by_mesh.setdefault(group.mesh.key, (group.mesh, {}))
            tensors |= {param.path: param.local for param in group.params if _can_be_compared(param.local)}
    what = f"the parameters of {root.name}"
    names = ", ".join(filter(None, [_differing(tensors, mesh, what) for mesh, tensors in by_mesh.values()]))
    if settings.compares_parameters:  # only ranks of a part may know, and no others need have replicas
        names = _told(names, owner.mesh, what)
    if names:
        raise FSDPRuntimeError(
            f"replicas of {root.name} hold different values of {names}, and would for ever. Let all ranks begin with "
            "the same: seed alike before the model is built, load the same checkpoint on all, or call "
            "fsdp2.broadcast_parameters(model) after loading. If they are to differ, set_replica_check("
            "parameters=False) on the root."
        )
    if owner.mesh.replicate_group is None or not settings.compares_buffers:
        return
    buffers = {name: _torch.plain_of(each) for module in owner.modules for name, each in module.named_buffers()}
    buffers = {name: each for name, each in buffers.items() if _can_be_compared(each)}
    names = _differing(buffers, owner.mesh, f"the buffers of {root.name}")
    if names:
        warnings.warn(
            f"replicas of {root.name} hold different values of the buffers {names}. Call fsdp2.broadcast_parameters("
            "model) if they are to be the same, or set_replica_check(buffers=False) on the root.",
            stacklevel=2,
        )


@checked(process_group=GROUP)
def compare_parameters(
    module: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    buffers: bool = True,
    ignored_params: Iterable[torch.Tensor] = (),
) -> None:
    """Raise, on all ranks, if they do not have the same parameters and buffers in ``module``: before it is sharded.

    Afterwards every rank has other rows, and nobody can tell. Parameters that are sharded already are not compared:
    replicas of them are when training begins, see `FSDPModule.set_replica_check`.

    Collective: all ranks of ``process_group`` must call it. Checksums travel, no values. Waits for the device.

    Args:
        module: on CPU or a device.
        process_group: by default that of all ranks. With tensor parallelism the ranks of the data-parallel mesh.
        buffers: whether those are compared, too.
        ignored_params: parameters, and buffers, that may differ, as those of experts do.

    Raises:
        FSDPTypeError: not a module, or not a process group.
        FSDPRuntimeError: no process group, or some differ; the message names them.
    """
    group = group_of(process_group, "compare_parameters()")
    named = plain_tensors(module, frozenset(ignored_params), buffers=buffers)
    tensors = {name: each for name, each in named.items() if _can_be_compared(each)}
    description = _described(tensors)
    device = device_that_travels(torch.device("cpu"), group)
    difference = disagreement(description, group, device, f"the parameters of {type(module).__name__}")
    if difference is not None:
        raise FSDPRuntimeError(
            f"the ranks have different values of {_names(difference)} in {type(module).__name__}: seed alike before "
            "the model is built, or call fsdp2.broadcast_parameters(model)."
        )


ON_TRAINING.append(_compare_replicas)
