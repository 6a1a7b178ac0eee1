"""The frozen result of lazy initialization: what every group holds, and how each parameter and gradient is sent.

Buffers and buckets are built from their parts of a plan. Ranks compare plans, since ranks that would issue different
collectives have different plans. Graphs of `torch.compile` are built from it, and identified by its text. Nothing in a
plan depends on the rank, nor on the name of the group's module: equal blocks have equal plans.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.layout import BufferLayout, GradientLayout


@dataclass(frozen=True, slots=True)
class Scaling:
    """How gradients are averaged: by the collectives' own operations, and by divisions before and after them.

    Attributes:
        before: divides the input of the reduce-scatter.
        scatter_op: the operation of the reduce-scatter.
        replicate_op: the operation of the all-reduce over replicas.
        after: divides the result.
        factor: ``scatter_op`` itself divides by it.
    """

    before: float
    scatter_op: Any
    replicate_op: Any
    after: float
    factor: float = 1.0

    @classmethod
    def choose(
        cls,
        dtype: torch.dtype,
        world_size: int,
        replicate_size: int,
        *,
        factor: float | None = None,
        only_sums: bool = False,
        premultiplies: bool = False,
    ) -> Scaling:
        """The mean over all ranks, or the sum divided by ``factor``.

        In dtypes of small range a part of the division comes before the sum and the rest after it, so that neither
        overflows nor underflows. ``premultiplies``: the backend has an operation that scales and sums.
        """
        total, mean = dist.ReduceOp.SUM, dist.ReduceOp.AVG
        is_narrow = dtype not in (torch.float64, torch.float32, torch.bfloat16)
        if not is_narrow and not only_sums:
            if factor is None:
                op = total if world_size * replicate_size == 1 else mean
                return cls(1.0, op, op, 1.0)
            if factor == world_size and world_size > 1:
                return cls(1.0, mean, total, 1.0)
            # (torch passes NCCL the factor as a float; with bfloat16 data, NCCL would read two of its four bytes.)
            if premultiplies and world_size > 1 and factor != 1 and dtype is not torch.bfloat16:
                return cls(1.0, _torch.premultiplied_sum(1 / factor), total, 1.0, factor)
        divisor = float(world_size * replicate_size) if factor is None else float(factor)
        before = 2.0 ** math.ceil(math.log2(divisor) / 2) if is_narrow and divisor > 1 else 1.0
        return cls(before, total, total, divisor / before)

    def rest_after(self, done: Scaling, world_size: int, replicate_size: int) -> Scaling:
        """The scaling that is left to apply if the collectives have scaled by ``done``, which may be another one."""
        if done == self:
            return self
        sums = dist.ReduceOp.SUM
        before, wanted = (each._divided_by_collectives(world_size, replicate_size) for each in (done, self))
        return Scaling(before, sums, sums, wanted * self.after / before)

    def _divided_by_collectives(self, world_size: int, replicate_size: int) -> float:
        """The number by which the sum is divided when it arrives, before `after` divides it."""
        divisor = self.before * self.factor
        for op, size in ((self.scatter_op, world_size), (self.replicate_op, replicate_size)):
            divisor *= size if op == dist.ReduceOp.AVG else 1
        return divisor

    def of_any_backend(self) -> Scaling:
        """A scaling to the same mean by sums and averages alone, which every backend has."""
        plain = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if self.scatter_op in plain:
            return self
        return Scaling(1.0, dist.ReduceOp.SUM, self.replicate_op, self.factor)


@dataclass(frozen=True, slots=True)
class ParamPlan:
    """One parameter: its name below the group's module, its shape, and whether it is trained."""

    fqn: str
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The parameters of one original and one unsharded dtype in a group, and where they lie.

    Attributes:
        dtype: the dtype of the shards.
        param_dtype: the dtype of the unsharded parameters.
        params: the indices of the parameters in the group.
        layout: where they lie in the shard buffer and in the unsharded buffer.
    """

    dtype: torch.dtype
    param_dtype: torch.dtype
    params: tuple[int, ...]
    layout: BufferLayout


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """The gradients of a group that are reduced in one dtype, and how they are sent.

    Attributes:
        dtype: the dtype that they are reduced in.
        sent: the dtype in which gradients are sent that are not packed, unless they were accumulated before; ``dtype``
            represents its values exactly.
        params: the indices of the parameters in the group.
        layout: the layout of the reduce-scatter.
        scaling: how they are averaged, by operations that every backend has.
        presence: the value in the grad mask of a parameter that has a gradient on this rank; without one it is zero.
    """

    dtype: torch.dtype
    sent: torch.dtype
    params: tuple[int, ...]
    layout: GradientLayout
    scaling: Scaling
    presence: float


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of one group.

    Attributes:
        ranks: a text: how many ranks it is sharded and replicated over, and how they communicate.
        params: its parameters, in the order of the group.
        gathers: one plan for each shard buffer.
        reduces: one plan for each dtype that gradients are reduced in.
        extended: the indices of the parameters that gather themselves.
    """

    ranks: str
    params: tuple[ParamPlan, ...]
    gathers: tuple[GatherPlan, ...]
    reduces: tuple[ReducePlan, ...]
    extended: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = [f"over {self.ranks}"]
        for gather in self.gathers:
            cast = "" if gather.param_dtype == gather.dtype else f", gathered as {gather.param_dtype}"
            lines.append(f"  {gather.dtype}{cast}: {gather.layout.shard_numel} elements per rank")
            region = gather.layout.region
            if region is not None:
                numel = sum(slot.partition.numel for slot in gather.layout.slots if slot.partition.owner is not None)
                lines.append(f"    owned: {numel} elements in {region.partition.numel}, {region.rows} for each rank")
            for index, slot in zip(gather.params, gather.layout.slots, strict=True):
                param, way = self.params[index], "direct" if slot.direct else "packed"
                training = "" if param.requires_grad else ", frozen"
                lines.append(f"    {param.fqn} {list(param.shape)}: {slot.partition.text(slot.rows)}, {way}{training}")
        for param in [self.params[index] for index in self.extended]:
            lines.append(f"    {param.fqn} {list(param.shape)}: gathered by its own extension")
        for reduce in self.reduces:
            ways = ["direct" if slot.direct else "packed" for slot in reduce.layout.slots]
            sent = "" if reduce.sent == reduce.dtype else f", sent as {reduce.sent}"
            lines.append(f"  gradients in {reduce.dtype}{sent}: {reduce.layout.numel} elements, {', '.join(ways)}")
        return "\n".join(lines)


def indices_of(params: Sequence[object], chosen: Sequence[object]) -> tuple[int, ...]:
    """The indices of ``chosen`` in ``params``."""
    index = {id(param): position for position, param in enumerate(params)}
    return tuple(index[id(param)] for param in chosen)


def fingerprint(description: str) -> int:
    """A 63-bit hash of ``description``. Different texts practically never have the same one."""
    return int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], "big") >> 1


class Waiting:
    """Where gradients wait that were computed and are in no ``.grad`` yet. It is set when a backward issues the work.

    These are bits of an int, of which several may be set. (`enum.Flag` would call Python functions on each use.)

    Attributes:
        NOWHERE: there are none.
        UNREDUCED: on the unsharded parameters, added up without communication.
        REDUCE_SCATTERED: reduced over shards, and not over replicas.
        ON_HOST: reduced, and added up in host memory until the last backward of the step.
    """

    NOWHERE = 0
    UNREDUCED = 1
    REDUCE_SCATTERED = 2
    ON_HOST = 4
