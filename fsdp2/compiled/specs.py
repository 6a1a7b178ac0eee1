"""What a graph needs to know of one group: its plan, and who communicates, all of them constants.

Its text is part of the graph, so that whatever is cached for one plan is never taken for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.plan import GroupPlan, Scaling
from fsdp2.errors import FSDPNotImplementedError

_OPERATIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}
"""Of functional collectives, by those of the process group."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that communicate: how many they are, and the name of their process group.

    "" if there is nobody else, or if the graph is not to know: see `fsdp2.compiled.exchanges`.
    """

    name: str
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, *, named: bool) -> Ranks:
        """Those of ``group``."""
        if group is None or group.size() == 1:
            return cls("", 1)
        return cls(group.group_name if named else "", group.size())


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group.

    Attributes:
        plan: what is gathered and reduced, as the eager runtime does it.
        shard: the ranks that parameters are sharded over.
        scatter: the same, over the process group that reduces.
        replicas: the ranks that they are replicated over.
        again: whether backward gathers again what forward has gathered.
        budget: how many bytes may be gathered ahead of what computes; None: one group.
        by_transport: whether it is exchanged over the transports of the eager runtime, and not by torch's functional
            collectives, for the two differ.
    """

    plan: GroupPlan
    shard: Ranks
    scatter: Ranks
    replicas: Ranks
    again: bool
    budget: int | None
    by_transport: bool

    @classmethod
    def of(cls, group: FSDPParamGroup, again: bool, budget: int | None) -> GroupSpec:
        """That of ``group``.

        Raises:
            FSDPNotImplementedError: functional collectives lack an operation that it needs.
        """
        mesh, plan = group.mesh, group.plan
        for reduce in plan.reduces:
            operations_of(reduce.scaling, group.name)
        by_transport = _is_by_transport(group)
        communicating = (mesh.shard_group, group.reducer.group, mesh.replicate_group)
        shard, scatter, replicas = [Ranks.of(each, named=not by_transport) for each in communicating]
        return cls(plan, shard, scatter, replicas, again, budget, by_transport)


def _is_by_transport(group: FSDPParamGroup) -> bool:
    if group.comm is None or group.comm.device.has_streams:
        return False  # operators of ours make the host wait
    reduces = group.reducer.transport
    return any(each is not None and each.way for each in (group.transport, reduces, reduces.among_replicas))


def operations_of(scaling: Scaling, where: str = "a group") -> tuple[str, str]:
    """The names of the reduce-scatter's and the all-reduce's operation.

    Raises:
        FSDPNotImplementedError: functional collectives have no such operation.
    """
    names = [_OPERATIONS.get(op) for op in (scaling.scatter_op, scaling.replicate_op)]
    if names[0] is None or names[1] is None:
        raise FSDPNotImplementedError(f"'{where}' reduces with an operation that functional collectives do not have.")
    return names[0], names[1]


_SPECS: dict[str, GroupSpec] = {}


def text_of(spec: GroupSpec) -> str:
    """``spec`` as a text that says everything in it, by which `spec_of` finds it."""
    text = repr(spec)
    _SPECS[text] = spec
    return text


def spec_of(text: str) -> GroupSpec:
    """The spec that has this text."""
    return _SPECS[text]
