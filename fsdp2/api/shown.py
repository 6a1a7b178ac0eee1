"""How a sharded module shows itself in ``print(model)``: ``[blocks.3, Shard(0)/8, bf16]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Placement

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.state import FSDPState

_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def dtype_name(dtype: torch.dtype | None) -> str:
    """A short name: ``bf16``, ``fp32``, ``int8``, ...; "-" for None."""
    if dtype is None:
        return "-"
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def placement_name(placement: Placement) -> str:
    """A short name: ``Shard(0)``, ``StridedShard(0, 2)``, ``Replicate()``, ``RaggedShard``."""
    if _torch.is_shard(placement):
        dim, factor = placement.dim, getattr(placement, "split_factor", None)  # type: ignore[attr-defined]
        return f"Shard({dim})" if factor is None else f"StridedShard({dim}, {factor})"
    return "Replicate()" if placement.is_replicate() else type(placement).__name__


def on_one_line(state: FSDPState) -> str:
    """How the state's parameters are sharded, in brackets. The module's name is known after a first forward."""
    known = "" if state.root is None else "root" if state.is_root else state.name
    if not state.unit:
        return f"[{known}, no parameters of its own]" if known else "[no parameters of its own]"
    parts = [known] if known else []
    parts += list(dict.fromkeys(f"{_cut(group)}, {_dtypes(group)}" for group in state.unit))
    if any(group.storage.offloading.is_host for group in state.unit):
        parts.append("offloaded")
    return f"[{', '.join(parts)}]"


def _cut(group: FSDPParamGroup) -> str:
    mesh = group.mesh
    if mesh.shard_group is None:
        return f"Replicate()/{mesh.replicate_size}"
    # The last data-parallel dim of the mesh is the one that cuts.
    index = mesh.device_mesh.ndim - 1
    if mesh.spmd_mesh is None:
        names = _distinct([placement_name(param.sharding.spec.placements[index]) for param in group.params])
    else:
        dims = [param.sharding.partition.dim for param in group.params]
        names = _distinct(["Replicate()" if dim is None else f"Shard({dim})" for dim in dims])
    copies = "" if mesh.replicate_group is None else f" x {mesh.replicate_size} replicas"
    return f"{'+'.join(names)}/{mesh.shard_size}{copies}"


def _dtypes(group: FSDPParamGroup) -> str:
    return "+".join(_distinct([dtype_name(param.param_dtype) for param in group.params]))


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
