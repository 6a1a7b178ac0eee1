"""The frozen result of lazy initialization: what every group holds and how each parameter travels. Pure data.

Two ranks that would issue different collectives have different plans; `fingerprint` lets them find out before they
hang. Nothing in a plan depends on the rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from fsdp2.layout import BufferLayout, GradientLayout


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """One parameter: its name below the group's module, and what is fixed about it."""

    fqn: str
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class BuffersPlan:
    """The parameters of one dtype in a group, with the layouts of their values and of their gradients.

    ``gradients`` is None when none of them is trainable.
    """

    dtype: torch.dtype
    params: tuple[ParamPlan, ...]
    values: BufferLayout
    gradients: GradientLayout | None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group: the module it belongs to and its buffers, one per dtype."""

    name: str
    world_size: int
    buffers: tuple[BuffersPlan, ...]

    def __str__(self) -> str:
        lines = [f"group '{self.name}' over {self.world_size} ranks"]
        for buffers in self.buffers:
            lines.append(f"  {buffers.dtype}: {buffers.values.shard_numel} elements per rank")
            for param, slot in zip(buffers.params, buffers.values.slots, strict=True):
                way = "direct" if slot.direct else "packed"
                training = "" if param.requires_grad else ", frozen"
                lines.append(f"    {param.fqn} {list(param.shape)}: {slot.rows} rows per rank, {way}{training}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """All groups below one root, in the order of ``root.modules()``."""

    groups: tuple[GroupPlan, ...]

    def __str__(self) -> str:
        return "\n".join(str(group) for group in self.groups)

    def fingerprint(self) -> int:
        """63 bits that agree on all ranks exactly if the plans do."""
        return int.from_bytes(hashlib.sha256(str(self).encode()).digest()[:8], "big") >> 1
