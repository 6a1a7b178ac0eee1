"""`GroupSpec`: the constants that a graph is built from for one group: its plan, and the ranks that communicate.

Its text is part of the graph, so that a graph in a cache is never used for another plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.plan import GroupPlan, Scaling
from fsdp2.errors import FSDPNotImplementedError

_OPERATIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}
"""The names of operations in functional collectives, by the operations of process groups."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that communicate: how many they are, and the name of their process group.

    The name is "" if there is one rank, or if the graph must not contain it: see `fsdp2.compiled.exchanges`.
    """

    name: str
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, *, named: bool) -> Ranks:
        """The ranks of ``group``."""
        if group is None or group.size() == 1:
            return cls("", 1)
        return cls(group.group_name if named else "", group.size())


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The constants of one group.

    Attributes:
        plan: what is gathered and reduced, as the eager runtime does it.
        shard: the ranks that parameters are sharded over.
        scatter: these ranks, with the process group of the reduce-scatter.
        replicas: the ranks that parameters are replicated over.
        again: whether backward gathers again what forward has gathered.
        budget: how many bytes may be gathered ahead of the compute; None: one group.
        by_transport: whether the transports of the eager runtime communicate, since they differ from torch's functional
            collectives; else these do.
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
        """The spec of ``group``.

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
        return False  # the operators of `exchanges` would make the host wait
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
    """A text with everything in ``spec``, by which `spec_of` finds it."""
    text = repr(spec)
    _SPECS[text] = spec
    return text


def spec_of(text: str) -> GroupSpec:
    """The spec that `text_of` has made this text of."""
    return _SPECS[text]
