"""Slices: parameters that ``shard_placement_fn`` has put on a part of their module's ranks, such as experts.

See `FSDPParamGroup.placed_within`. Nested calls of `fully_shard` on smaller meshes make no slices: other ranks may hold
the same parameters then, as with tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.mesh import is_part_of
from fsdp2.core.param import fsdp_param_of
from fsdp2.core.root import ON_ROOT


class Slices:
    """The groups whose parameters are slices, each with the mesh of its module, as the last root was formed.

    Attributes:
        changes: how often this has changed.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._groups: WeakKeyDictionary[FSDPParamGroup, DeviceMesh] = WeakKeyDictionary()

    def note(self, states: Sequence[Any], groups: Sequence[FSDPParamGroup]) -> None:
        """Note the slices among ``groups``, of which a root is formed. No communication."""
        for group in groups:
            wider = group.placed_within
            if wider is not self._groups.pop(group, None):
                self.changes += 1
            if wider is not None:
                self._groups[group] = wider

    def wholes_of(self, params: Iterable[torch.Tensor]) -> list[DeviceMesh]:
        """The meshes of the modules that own slices among ``params``, each mesh once."""
        if not self._groups:
            return []
        owners = [owner for param in params if (owner := fsdp_param_of(param)) is not None]
        groups = dict.fromkeys(owner.group for owner in owners if owner.group is not None)
        found = [whole for group in groups if (whole := self._groups.get(group)) is not None]
        return list({id(whole): whole for whole in found}.values())

    def meshes(self) -> dict[int, DeviceMesh]:
        """The module's mesh for each parameter that is a slice, and for its gradient, by their `id`."""
        found: dict[int, DeviceMesh] = {}
        for group, whole in self._groups.items():
            for param in group.params:
                sharded = param.sharded
                if is_part_of(_torch.spec_of(sharded).mesh, whole):  # else tensor or expert parallelism has the others
                    found[id(sharded)] = whole
                    if sharded.grad is not None:
                        found[id(sharded.grad)] = whole
        return found


SLICES = Slices()

ON_ROOT.append(SLICES.note)
