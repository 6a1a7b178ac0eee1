"""Where the gradients of a graph arrive: sinks, the inputs by which backward hands them to the eager runtime.

A graph has two inputs for every dtype in which a group reduces: one of the shape of the flat result, and an empty one
that gets a gradient only if some parameter had none. Neither has memory, and neither is read. Both are outputs of one
`autograd.Function`, whose backward autograd calls once for all graphs of a backward, with the sums: there the result
is scaled, cast and delivered like that of an eager reduction.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fsdp2.compiled.exchanges import raise_gone
from fsdp2.core.group import FSDPParamGroup


def grad_sinks_of(group: FSDPParamGroup) -> tuple[torch.Tensor, ...]:
    """Two for each dtype of reduction: (numel,) and (0,), on the device of the gradients."""
    if not group.plan.reduces:
        return ()
    # A leaf that requires a gradient, so that the outputs do.
    anchor = torch.zeros((), device=group.mesh.device, requires_grad=True)
    shapes = [(each.layout.numel, each.dtype) for each in group.plan.reduces]
    outputs: tuple[torch.Tensor, ...] = _Arrival.apply(weakref.ref(group), shapes, anchor)
    return outputs


def _without_memory(numel: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    element = torch.zeros(1, dtype=dtype, device=like.device)
    empty = torch.empty(0, dtype=dtype, device=like.device)
    return empty.set_(element.untyped_storage(), 0, (numel,), (0,))  # type: ignore[call-overload,no-any-return]


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: weakref.ref[FSDPParamGroup], shapes: list[tuple[int, torch.dtype]], anchor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(_without_memory(size, anchor, dtype) for numel, dtype in shapes for size in (numel, 0))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        group: FSDPParamGroup | None = ctx.group()
        if group is None:
            raise_gone()
        if group.graph_inputs.is_stale(group):
            group.refuse_backward()
        with torch.no_grad():
            group.reducer.arrive_from_graph(
                [(flat, flag is not None) for flat, flag in zip(gradients[::2], gradients[1::2], strict=True)],
                may_keep=group.graph_inputs.group.handle is not None,  # else compilers know more of it: CUDA graphs
            )
        return None, None, None
