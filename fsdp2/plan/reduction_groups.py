"""Over which process groups the data of a DTensor is spread: the one place that reads this off its placements.

Knows nothing of what is then reduced over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.common import FSDPValueError
from fsdp2.plan.mesh import device_of


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group to reduce over; equal to any other of the same ranks.

    Attributes:
        ranks: of the default group, ascending.
        group: the process group.
        device: what it communicates from.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup = field(compare=False)
    device: torch.device = field(compare=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, axis: int) -> RankGroup:
        """That of dim ``axis`` of ``mesh``."""
        group = mesh.get_group(axis)
        return cls(tuple(sorted(dist.get_process_group_ranks(group))), group, device_of(mesh))


ReductionGroups = tuple[RankGroup, ...]
"""The process groups over which the elements of a tensor are shared out; () if every rank has the whole."""


def reduction_groups_of(mesh: DeviceMesh, placements: Sequence[Any], name: str) -> ReductionGroups:
    """Over which process groups the data of a DTensor is spread, mesh dims left to right.

    Any placement but Replicate says that the ranks of its mesh dim together hold the tensor once: what a new kind of
    placement must mean, too, to be clipped rightly. (Padding, if there is any, must not lie in the local tensor.)

    Raises:
        FSDPValueError: a Partial placement, whose norm nobody knows before it is reduced; a mesh without this rank.
    """
    if mesh.get_coordinate() is None:
        raise FSDPValueError(
            f"{name} lies on {mesh}, which rank {dist.get_rank()} is not part of. Pass the parameters of this rank "
            "only, and to mesh= a mesh that joins it with the ranks of the others."
        )
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise FSDPValueError(
                f"{name} has placement {placement!r} in mesh dim {axis} of {mesh}: it is still to be summed over the "
                "ranks there, and the norm of the sum cannot be had from the parts. Reduce it first: parameter.grad = "
                "parameter.grad.redistribute(placements=parameter.placements)."
            )
    return tuple(
        RankGroup.of(mesh, axis)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )
