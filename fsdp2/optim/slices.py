"""Which parameters lie on a part of the ranks of their root alone, as each expert does on the ranks that train it.

Their gradients are never reduced over the other ranks, where parameters of the same place hold other values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.param import fsdp_param_of
from fsdp2.core.root import ON_ROOT


class Slices:
    """The groups of which some parameters are slices, each with the mesh of the root that it was below last.

    Attributes:
        changes: how often that has changed.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._groups: WeakKeyDictionary[FSDPParamGroup, DeviceMesh] = WeakKeyDictionary()

    def note(self, states: Sequence[Any], groups: Sequence[FSDPParamGroup]) -> None:
        """A root forms, of ``states``, its owner's first. No communication."""
        for group in groups:
            # Nested calls on smaller meshes may hold what other ranks have, too, as beside tensor parallelism.
            whole: DeviceMesh = group.sharers[0].mesh.device_mesh
            wider = whole if _is_part_of(group.mesh.device_mesh, whole) else None
            if wider is not self._groups.pop(group, None):
                self.changes += 1
            if wider is not None:
                self._groups[group] = wider

    def roots_of(self, params: Iterable[torch.Tensor]) -> list[DeviceMesh]:
        """The meshes of the roots of those of ``params`` that are slices, each once."""
        if not self._groups:
            return []
        owners = [owner for param in params if (owner := fsdp_param_of(param)) is not None]
        groups = dict.fromkeys(owner.group for owner in owners if owner.group is not None)
        found = [whole for group in groups if (whole := self._groups.get(group)) is not None]
        return list({id(whole): whole for whole in found}.values())

    def meshes(self) -> dict[int, DeviceMesh]:
        """The root's mesh by the `id` of each parameter that is a slice, and by that of its gradient."""
        found: dict[int, DeviceMesh] = {}
        for group, whole in self._groups.items():
            for param in group.params:
                sharded = param.sharded
                if _is_part_of(_torch.spec_of(sharded).mesh, whole):  # else tensor or expert parallelism has the rest
                    found[id(sharded)] = whole
                    if sharded.grad is not None:
                        found[id(sharded.grad)] = whole
        return found


def _is_part_of(mesh: DeviceMesh, whole: DeviceMesh) -> bool:
    """Whether the ranks of ``mesh`` are some of those of ``whole``, and not all."""
    if mesh is whole or mesh.size() >= whole.size():
        return False
    with _torch.unobserved():  # the ranks are real numbers, also while tensors are fake
        return set(mesh.mesh.flatten().tolist()).issubset(whole.mesh.flatten().tolist())


SLICES = Slices()

ON_ROOT.append(SLICES.note)
