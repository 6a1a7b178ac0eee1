"""The frozen result of lazy initialization: what every group holds and how each parameter travels. Pure data.

Two ranks that would issue different collectives have different plans; `fingerprint` lets them find out before they
hang. Nothing in a plan depends on the rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from fsdp2.core.layout import BufferLayout, GradientLayout, Slot


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """One parameter: its name below the group's module, and what is fixed about it."""

    fqn: str
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class BuffersPlan:
    """The parameters of one original and one unsharded dtype in a group, and where they lie."""

    dtype: torch.dtype
    param_dtype: torch.dtype
    params: tuple[ParamPlan, ...]
    values: BufferLayout


def _part(slot: Slot) -> str:
    partition = slot.partition
    memory = f" (in memory {list(partition.order)})" if partition.order else ""
    if partition.owner is not None:
        return f"the whole on rank {partition.owner}{memory}"
    if partition.dim is None:
        return f"the whole{memory}"
    blocks = f" in blocks of {partition.block_rows}" if partition.block_rows > 1 else ""
    return f"{slot.rows} rows{f' of dim {partition.dim}' if partition.dim else ''}{blocks}{memory}"


@dataclass(frozen=True, slots=True)
class GradientsPlan:
    """The gradients of a group that are reduced in one dtype, and how they travel."""

    dtype: torch.dtype
    layout: GradientLayout


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group: the module it belongs to, its ranks and how they exchange, its buffers and its reductions."""

    name: str
    mesh: str
    buffers: tuple[BuffersPlan, ...]
    gradients: tuple[GradientsPlan, ...]
    extended: tuple[ParamPlan, ...] = ()

    def __str__(self) -> str:
        lines = [f"group '{self.name}' over {self.mesh}"]
        for buffers in self.buffers:
            cast = "" if buffers.param_dtype == buffers.dtype else f", gathered as {buffers.param_dtype}"
            lines.append(f"  {buffers.dtype}{cast}: {buffers.values.shard_numel} elements per rank")
            region = buffers.values.region
            if region is not None:
                numel = sum(slot.partition.numel for slot in buffers.values.slots if slot.partition.owner is not None)
                lines.append(f"    owned: {numel} elements in {region.partition.numel}, {region.rows} for each rank")
            for param, slot in zip(buffers.params, buffers.values.slots, strict=True):
                way = "direct" if slot.direct else "packed"
                training = "" if param.requires_grad else ", frozen"
                each = "" if slot.partition.owner is not None else " per rank"
                lines.append(f"    {param.fqn} {list(param.shape)}: {_part(slot)}{each}, {way}{training}")
        for param in self.extended:
            lines.append(f"    {param.fqn} {list(param.shape)}: gathered by its own extension")
        for gradients in self.gradients:
            ways = ["direct" if slot.direct else "packed" for slot in gradients.layout.slots]
            lines.append(f"  gradients in {gradients.dtype}: {gradients.layout.numel} elements, {', '.join(ways)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """All groups below one root, in the order of ``root.modules()``, and what was set on them."""

    groups: tuple[GroupPlan, ...]
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*map(str, self.groups), *self.settings])

    def fingerprint(self) -> int:
        """63 bits that agree on all ranks exactly if the plans do."""
        return fingerprint(str(self))


def fingerprint(description: str) -> int:
    """63 bits that agree exactly if the descriptions do."""
    return int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], "big") >> 1
