"""Gradient sinks: inputs of a graph whose gradients are the reduced gradients, so that the eager runtime gets them.

A graph has two such inputs for every dtype in which a group reduces: one of the shape of the flat result, and an empty
one that gets a gradient only if some parameter had none. Neither has memory, and neither is read. Both are outputs of
one `autograd.Function`. Autograd calls its backward once for all graphs of a backward, with the sums of their results:
there the sum is scaled, cast and delivered like the result of an eager reduction.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.compiled.exchanges import raise_gone, refuse_other_plan
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.plan import GroupPlan


@dataclass(slots=True)
class Premises:
    """The conditions that the backward of a group's graph relies on.

    Attributes:
        plan: the plan of the group.
        again: whether the graph's backward gathers again.
        version: the version of the parameters in the last forward.
        may_keep: whether nobody else uses the memory in which gradients arrive.
    """

    plan: GroupPlan
    again: bool
    version: object
    may_keep: bool

    def refuse_changes(self, group: FSDPParamGroup) -> None:
        """Refuse the backward if ``group`` is not as it was in the last forward.

        Raises:
            FSDPRuntimeError: its parameters were written, and the backward gathers them again; or its plan has changed.
        """
        if self.again and self.version != group.written():
            group.refuse_backward()
        refuse_other_plan(group, self.plan)


def grad_sinks_of(group: FSDPParamGroup, premises: Premises) -> tuple[torch.Tensor, ...]:
    """The sinks of ``group``, two for each dtype that it reduces in: (numel,) and (0,), on the gradients' device."""
    reduces = premises.plan.reduces
    if not reduces:
        return ()
    # The outputs of the function require gradients only if one of its inputs does.
    anchor = torch.zeros((), device=group.mesh.device, requires_grad=True)
    shapes = [(each.layout.numel, each.dtype) for each in reduces]
    outputs: tuple[torch.Tensor, ...] = _Arrival.apply(weakref.ref(group), premises, shapes, anchor)
    return outputs


def _without_memory(numel: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    element = torch.zeros(1, dtype=dtype, device=like.device)
    empty = torch.empty(0, dtype=dtype, device=like.device)
    return empty.set_(element.untyped_storage(), 0, (numel,), (0,))  # type: ignore[call-overload,no-any-return]


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: weakref.ref[FSDPParamGroup],
        premises: Premises,
        shapes: list[tuple[int, torch.dtype]],
        anchor: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.premises = group, premises
        ctx.set_materialize_grads(False)
        return tuple(_without_memory(size, anchor, dtype) for numel, dtype in shapes for size in (numel, 0))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        group: FSDPParamGroup | None = ctx.group()
        if group is None:
            raise_gone()
        premises: Premises = ctx.premises
        premises.refuse_changes(group)
        if group.reducer.is_reducing:  # an eager reduction may be on its way to the same buffer
            assert group.comm is not None, "it was reduced there"
            group.comm.finish_reduces()
        with torch.no_grad():
            group.reducer.arrive_from_graph(
                [(flat, flag is not None) for flat, flag in zip(gradients[::2], gradients[1::2], strict=True)],
                premises.plan.reduces,
                may_keep=premises.may_keep,
            )
        return None, None, None, None
