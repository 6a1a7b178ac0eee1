"""Where the gradients of a graph arrive: sinks, the inputs by which backward hands them to the eager runtime.

A graph has two inputs for every dtype in which a group reduces: one of the shape of the flat result, and an empty one
that gets a gradient only if some parameter had none. Neither has memory, and neither is read. Both are outputs of one
`autograd.Function`, whose backward autograd calls once for all graphs of a backward, with the sums: there the result
is scaled, cast and delivered like that of an eager reduction.
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
    """What a graph of one group was made for, as its backward finds it.

    Attributes:
        plan: of the group.
        again: whether its backward gathers again.
        version: of the parameters, in the last forward.
        may_keep: whether nobody else knows the memory in which gradients arrive.
    """

    plan: GroupPlan
    again: bool
    version: object
    may_keep: bool

    def refuse_changes(self, group: FSDPParamGroup) -> None:
        """Refuse the backward if ``group`` is not as it was in the last forward.

        Raises:
            FSDPRuntimeError: its parameters were written, and are gathered again; or its plan is another.
        """
        if self.again and self.version != group.written():
            group.refuse_backward()
        refuse_other_plan(group, self.plan)


def grad_sinks_of(group: FSDPParamGroup, premises: Premises) -> tuple[torch.Tensor, ...]:
    """Two for each dtype of reduction: (numel,) and (0,), on the device of the gradients."""
    reduces = premises.plan.reduces
    if not reduces:
        return ()
    # A leaf that requires a gradient, so that the outputs do.
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
        if group.reducer.is_reducing:  # an eager one, which may be on its way to the same buffer
            assert group.comm is not None, "it was reduced there"
            group.comm.finish_reduces()
        with torch.no_grad():
            group.reducer.arrive_from_graph(
                [(flat, flag is not None) for flat, flag in zip(gradients[::2], gradients[1::2], strict=True)],
                premises.plan.reduces,
                may_keep=premises.may_keep,
            )
        return None, None, None, None
