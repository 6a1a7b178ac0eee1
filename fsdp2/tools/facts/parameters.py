"""Makes `ParamFacts` of an `FSDPParam` and the plans of its group: where it lies, how it travels, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2.api.shown import dtype_name, placement_name
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.layout import BufferLayout, Slot, direct_threshold_bytes
from fsdp2.core.param import FSDPParam
from fsdp2.core.plan import GatherPlan, ReducePlan
from fsdp2.tools.facts.data import MeshAxis, ParamFacts, Way
from fsdp2.tools.quantities import shown_bytes


def axes_of(mesh: Any) -> tuple[MeshAxis, ...]:
    """The axes of a `DeviceMesh`."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return tuple(MeshAxis(name, mesh.size(index)) for index, name in enumerate(names))


@dataclass(frozen=True, slots=True)
class PlansOfGroup:
    """How a group is laid out.

    Attributes:
        group: the group.
        gathers: one plan for each pair of dtypes; all packed, if a custom all-gather asks for that.
        reduces: one plan for each dtype of reduction, with the parameters that are trainable now.
    """

    group: FSDPParamGroup
    gathers: tuple[GatherPlan, ...]
    reduces: tuple[ReducePlan, ...]

    @classmethod
    def of(cls, group: FSDPParamGroup) -> PlansOfGroup:
        """The plans of ``group``, whether it is prepared or not."""
        return cls(group, group.storage.plans, group.reducer.plans_of(group.params))

    def layout(self, plan: GatherPlan) -> BufferLayout:
        """The layout in which ``plan`` is gathered."""
        return plan.layout.all_packed() if self.group.settings.packs_gathers else plan.layout

    def gather_of(self, index: int) -> tuple[int, GatherPlan, Slot] | None:
        """The buffer, the plan and the slot of the parameter with this index; None if it gathers itself."""
        for number, plan in enumerate(self.gathers):
            if index in plan.params:
                return number, plan, self.layout(plan).slots[plan.params.index(index)]
        return None

    def reduce_of(self, index: int) -> tuple[ReducePlan, Any] | None:
        """The plan of the reduction and the slot of the gradient; None if the parameter is frozen."""
        for plan in self.reduces:
            if index in plan.params:
                return plan, plan.layout.slots[plan.params.index(index)]
        return None


def names_of(param: FSDPParam, paths: Mapping[nn.Module, str]) -> tuple[str, ...]:
    """The names under which ``param`` is registered below the model; its own path if it is not."""
    names = [f"{paths[module]}.{name}" if paths[module] else name for module, name in param.uses if module in paths]
    return tuple(names) or (param.path,)


def param_facts(plans: PlansOfGroup, index: int, paths: Mapping[nn.Module, str]) -> ParamFacts:
    """The facts of the parameter with this index in the group."""
    param = plans.group.params[index]
    sharding = param.sharding
    partition, world_size = sharding.partition, sharding.mesh.shard_size
    first, *others = names_of(param, paths)
    reduction = plans.reduce_of(index)
    dtype = None if reduction is None else reduction[0].dtype
    gather, gather_reason = _gather_way(plans, index)
    reduce, reduce_reason = _reduce_way(plans, index)
    found = plans.gather_of(index)
    return ParamFacts(
        name=first,
        other_names=tuple(others),
        shape=tuple(param.sharded.shape),
        local_shape=tuple(param.local.shape),
        rests=param.dtype,
        computes=param.param_dtype,
        reduces=dtype,
        placements=tuple(map(placement_name, sharding.spec.placements)),
        mesh=axes_of(sharding.spec.mesh),
        dealt_out=partition.text(partition.rows(world_size)),
        owner=partition.owner,
        is_trainable=param.sharded.requires_grad,
        local_bytes=param.local.numel() * param.dtype.itemsize,
        unsharded_bytes=param.local_numel * param.param_dtype.itemsize,
        gather=gather,
        gather_reason=gather_reason,
        reduce=reduce,
        reduce_reason=reduce_reason,
        buffer=None if found is None else found[0],
    )


def _gather_way(plans: PlansOfGroup, index: int) -> tuple[Way, str]:
    found, mesh = plans.gather_of(index), plans.group.mesh
    if mesh.shard_size == 1:
        return "stays", "every rank has the whole"
    if found is None:
        return "by itself", "a tensor that says itself how it is gathered"
    _, plan, slot = found
    if plans.group.settings.packs_gathers:
        return "packed", "a custom all-gather takes everything packed"
    threshold = direct_threshold_bytes(fuses=mesh.fuses)
    if slot.partition.owner is not None:
        region = plan.layout.region
        whole = 0 if region is None else region.partition.numel * plan.param_dtype.itemsize
        return ("direct" if slot.direct else "packed"), f"owned parameters share a slot of {shown_bytes(whole)}"
    refused = _out_of_order(slot.partition)
    if refused:
        return "packed", refused
    return _by_size(slot.direct, threshold)


def _by_size(direct: bool, threshold: int) -> tuple[Way, str]:
    if direct:
        return "direct", f"{shown_bytes(threshold)} or larger"
    return "packed", f"smaller than {shown_bytes(threshold)}"


def _out_of_order(partition: Any) -> str:
    if partition.dim is None:
        return "no dims"
    return "" if partition.arrives_in_order else f"dim {partition.dim}, which is cut, is not the outermost in memory"


def _reduce_way(plans: PlansOfGroup, index: int) -> tuple[Way, str]:
    found, group = plans.reduce_of(index), plans.group
    if found is None:
        return "stays", "frozen"
    (plan, slot), param, mesh = found, group.params[index], group.mesh
    if mesh.shard_size == 1:
        has_replicas = mesh.replicate_size > 1
        return ("packed", "one all-reduce takes all") if has_replicas else ("stays", "there is one rank")
    settings, dtype = group.settings, plan.dtype
    if settings.packs_reductions:
        return "packed", "a custom reduction takes everything packed"
    if slot.partition.owner is not None:
        return ("direct" if slot.direct else "packed"), "owned parameters share a slot"
    refused = _out_of_order(slot.partition) or _refused_alone(param, plan, mesh.device)
    threshold, nbytes = direct_threshold_bytes(fuses=mesh.fuses), param.local_numel * dtype.itemsize
    if not refused and not slot.direct and nbytes >= threshold:
        refused = f"{slot.partition.size} rows are no multiple of {mesh.shard_size} ranks"
    return ("packed", refused) if refused else _by_size(slot.direct, threshold)


def _refused_alone(param: FSDPParam, plan: ReducePlan, device: torch.device) -> str:
    if plan.scaling.before != 1.0:
        return f"sums in {dtype_name(plan.dtype)} are scaled before, lest they overflow"
    if param.param_dtype != plan.dtype and device.type != "cpu":
        return f"cast from {dtype_name(param.param_dtype)} to {dtype_name(plan.dtype)} as it is packed"
    return ""


def extended_row_bytes(group: FSDPParamGroup, indices: Sequence[int]) -> int:
    """About how many bytes a rank sends of parameters that gather themselves: as many as their values take."""
    total = 0
    for param in [group.params[index] for index in indices]:
        partition = param.sharding.partition
        rows = partition.rows(group.mesh.shard_size)
        total += partition.outer * rows * partition.row_numel * param.param_dtype.itemsize
    return total
