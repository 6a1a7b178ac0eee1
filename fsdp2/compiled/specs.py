"""What a graph needs to know of one group: names, sizes, layouts and dtypes, all of them constants.

Made from the same plan that the eager runtime uses, before anything is traced. Its text is part of the graph, so that
whatever is cached for one plan is never taken for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp2.core.layout import BufferLayout, GradientLayout
from fsdp2.core.reduce import Scaling
from fsdp2.errors import FSDPNotImplementedError

_OPERATIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}
"""Of functional collectives, by those of the process group."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that communicate: the name of their process group and how many they are; "" if there is nobody else."""

    name: str
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """Those of ``group``."""
        if group is None or group.size() == 1:
            return cls("", 1)
        return cls(group.group_name, group.size())


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """The parameters of one group that lie in one shard buffer.

    Attributes:
        layout: of the shard buffer.
        dtype: of the unsharded parameters.
        params: their indices in the group.
    """

    layout: BufferLayout
    dtype: torch.dtype
    params: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReduceSpec:
    """The gradients of one group that are reduced in one dtype.

    Attributes:
        layout: of the reduce-scatter.
        dtype: in which they are reduced.
        params: indices of the parameters in the group.
        before: gradients are divided by it before they are summed.
        scatter_op: of the reduce-scatter: "sum" or "avg".
        replicate_op: of the all-reduce over replicas.
        presence: what says, instead of zero, that a parameter has a gradient on this rank.
    """

    layout: GradientLayout
    dtype: torch.dtype
    params: tuple[int, ...]
    before: float
    scatter_op: str
    replicate_op: str
    presence: float


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group: its ranks, what is gathered, what is reduced.

    Attributes:
        shard: the ranks that parameters are sharded over.
        scatter: the same, over the process group that reduces.
        replicas: the ranks that they are replicated over.
        gathers: one for each shard buffer.
        reduces: one for each dtype of reduction.
        params: how many parameters the group has.
        again: whether backward gathers again what forward has gathered.
        budget: how many bytes may be gathered ahead of what computes; None: one group.
    """

    shard: Ranks
    scatter: Ranks
    replicas: Ranks
    gathers: tuple[GatherSpec, ...]
    reduces: tuple[ReduceSpec, ...]
    params: int
    again: bool
    budget: int | None


def operations_of(scaling: Scaling, where: str) -> tuple[str, str]:
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


def rows_of(params: Sequence[object], chosen: Sequence[object]) -> tuple[int, ...]:
    """The indices of ``chosen`` in ``params``."""
    index = {id(param): position for position, param in enumerate(params)}
    return tuple(index[id(param)] for param in chosen)
