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
"""Bytes that are looked at in one piece; the check takes four times as much memory."""

_MODULUS = 2_147_483_647
_FACTOR = 48_271


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-D int64 checksum of the bytes of ``tensor`` in their order, on its device. Equal tensors have equal ones."""
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 4:  # a view into a tensor of narrow elements: int32 needs aligned memory
        data = data.clone()
    for piece in data.split(_CHUNK):
        numbers = piece[: piece.numel() // 4 * 4].view(torch.int32).to(torch.int64).remainder_(_MODULUS)
        rest = piece[numbers.numel() * 4 :].to(torch.int64)
        for part in (numbers, rest):
            # Each number is weighted by its position, so that an exchange of two is seen. Products stay below 2^63.
            at = torch.arange(1, part.numel() + 1, device=part.device)
            found.mul_(_FACTOR).add_((part.mul_(at).remainder_(_MODULUS)).sum()).remainder_(_MODULUS)
    return found


def _described(tensors: Mapping[str, torch.Tensor]) -> str:
    """A line for each tensor: its name, shape, dtype and checksum. Waits for each device once."""
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
    """The names of the lines that a `disagreement`, a diff, shows."""
    lines = [line[1:] for line in difference.splitlines() if line[:1] in "+-" and line[1:2] not in "+-"]
    return ", ".join(dict.fromkeys(f"'{line.partition(' ')[0]}'" for line in lines))


def _differing(tensors: Mapping[str, torch.Tensor], mesh: DataParallelMesh, what: str) -> str:
    """The names of tensors that replicas hold differently, the same on all of the mesh; "" if none. Collective."""
    difference = disagreement(_described(tensors), mesh.replicate_group, mesh.device, f"the replicas of {what}")
    # Replicas of one shard compare it; then the ranks of each replica tell each other what they have found.
    mine = "" if difference is None else _names(difference)
    others = disagreement(mine, mesh.shard_group, mesh.device, f"what was found of the replicas of {what}")
    return mine or ("" if others is None else _names(others.replace("'", "")) or "of other rows")


def _told(names: str, mesh: DataParallelMesh, what: str) -> str:
    """``names``; or, if this rank has found none, the names that other ranks of ``mesh`` have found. Collective."""
    for group in (mesh.shard_group, mesh.replicate_group):  # the second round passes on what the first has told
        others = disagreement(names, group, mesh.device, f"what was found of the replicas of {what}")
        names = names or ("" if others is None else _names(others.replace("'", "")) or "other ranks")
    return names


def _compare_replicas(root: FSDPRoot) -> None:
    """Compare what the replicas of all groups of ``root`` hold: parameters, and the root's buffers. Collective.

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
    if settings.compares_parameters:  # a group's mesh may be a part of the root's: the other ranks learn it here
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
    """Raise, on all ranks, if ranks have different parameters or buffers in ``module``. Call it before sharding.

    After sharding every rank has other rows, and nobody can tell. Parameters that are sharded already are not compared:
    their replicas are compared when training begins, see `FSDPModule.set_replica_check`.

    Collective: all ranks of ``process_group`` must call it. Only checksums travel. The call waits for the device.

    Args:
        module: on CPU or a device.
        process_group: by default all ranks. With tensor parallelism pass the ranks of the data-parallel mesh.
        buffers: whether buffers are compared too.
        ignored_params: parameters and buffers that may differ, such as those of experts.

    Raises:
        FSDPTypeError: ``module`` or ``process_group`` is of another kind.
        FSDPRuntimeError: there is no process group, or some tensors differ; the message names them.
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
