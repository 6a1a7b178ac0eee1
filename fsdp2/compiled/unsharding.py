"""Unsharding one group inside a graph: an `autograd.Function` over operators that communicate.

If the eager runtime uses torch's own collectives, the operators are torch's functional collectives, which compilers
know; else they are those of `fsdp2.compiled.exchanges`, over the eager runtime's transports. The function's forward
gathers, its backward reduces and scatters; both use the layouts of the eager runtime, so that the same numbers are sent
in the same order. A gather that backward repeats is marked for recomputation, so that the partitioner saves shards for
backward, and no unsharded parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fsdp2 import _torch_compiler
from fsdp2.compiled import exchanges
from fsdp2.compiled.exchanges import members_of
from fsdp2.compiled.specs import GroupSpec, Ranks, operations_of, spec_of
from fsdp2.core.buffers import on_the_wire
from fsdp2.core.plan import ReducePlan
from fsdp2.core.sharding import in_shape, place_rows, scatter_rows


def unshard(
    text: str, handle: torch.Tensor | None, shards: Sequence[torch.Tensor], grad_sinks: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gather the unsharded parameters of the group that ``text`` describes, in its order.

    Dynamo records a call of it as one operation and does not look into it; AOTAutograd traces what it does.

    Args:
        text: the text of a `GroupSpec`.
        handle: identifies the group's exchanges, if the spec is ``by_transport``.
        shards: the shard buffers, one (shard_numel,) for each of the plan's ``gathers``.
        grad_sinks: the inputs at which gradients arrive, two for each of the plan's ``reduces``; see
            `fsdp2.compiled.grad_sinks`.
    """
    outputs: tuple[torch.Tensor, ...] = _Unshard.apply(text, handle, len(shards), *shards, *grad_sinks)
    return outputs


_UNITS = itertools.count()
"""Numbers for calls of `unshard`, which tell the nodes of a graph apart."""


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, text: str, handle: torch.Tensor | None, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        spec = spec_of(text)
        ctx.save_for_backward(handle)
        ctx.spec, ctx.count, ctx.unit = spec, count, next(_UNITS)
        ctx.set_materialize_grads(False)  # a missing gradient must arrive as None, and not as zeros
        policy = CheckpointPolicy.MUST_RECOMPUTE if spec.again else CheckpointPolicy.MUST_SAVE
        with _torch_compiler.tagged(policy, (ctx.unit, spec.budget)):
            outputs = _gather(spec, handle, tensors[:count])
        trained = {index for reduce in spec.plan.reduces for index in reduce.params}
        ctx.mark_non_differentiable(*(each for index, each in enumerate(outputs) if index not in trained))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        spec: GroupSpec = ctx.spec
        (handle,) = ctx.saved_tensors
        arrived: list[torch.Tensor | None] = []
        like = next((gradient for gradient in gradients if gradient is not None), None)
        if like is None:
            return (None, None, None, *[None] * (len(ctx.needs_input_grad) - 3))
        with _torch_compiler.tagged(CheckpointPolicy.MUST_SAVE, (ctx.unit, spec.budget), backward=True):
            for index, reduce in enumerate(spec.plan.reduces):
                # A parameter without a gradient sends zeros, even if no parameter of this dtype has one: other ranks
                # may have gradients, and all must issue the same collectives.
                mine = [gradients[index] for index in reduce.params]
                sent = _packed(spec, reduce, mine, reduce.dtype if handle is None else reduce.sent, like)
                flat = _reduce(spec, reduce, sent) if handle is None else exchanges.reduce(handle, sent, index, reduce)
                arrived += (flat, flat.new_empty(0) if any(each is None for each in mine) else None)
        return (None, None, None, *[None] * ctx.count, *arrived)


# -- gathering


def _all_gather(input: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Gather (n,) from every rank, as (size, n)."""
    if not ranks.name:
        return input.clone().unsqueeze(0)
    wire = on_the_wire(input)
    output = _torch_compiler.functional_all_gather(wire, ranks.size, ranks.name)
    return (output if wire is input else output.view(input.dtype)).view(ranks.size, -1)


def _gather(spec: GroupSpec, handle: torch.Tensor | None, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if handle is None or spec.shard.size == 1:
        whole = _gather_functionally(spec, shards)
    else:
        whole = _gather_by_transport(spec, handle, shards)
    return tuple(whole[index] for index in range(len(spec.plan.params)))


def _gather_by_transport(
    spec: GroupSpec, handle: torch.Tensor, shards: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """The unsharded parameters by index, as views of the gathered flat tensors."""
    whole: dict[int, torch.Tensor] = {}
    flats = exchanges.gather(handle, shards, spec.plan.gathers)
    for gather, flat in zip(spec.plan.gathers, flats, strict=True):
        for index, slot in zip(gather.params, gather.layout.slots, strict=True):
            whole[index] = in_shape(flat.narrow(0, slot.unsharded_offset, slot.partition.numel), slot.partition)
    return whole


def _gather_functionally(spec: GroupSpec, shards: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The unsharded parameters by index, through functional collectives."""
    whole: dict[int, torch.Tensor] = {}
    staged = _gather_packed(spec, shards)
    for gather, shard, part in zip(spec.plan.gathers, shards, staged, strict=True):
        for index, slot in zip(gather.params, gather.layout.slots, strict=True):
            if slot.direct and slot.shard_numel:
                mine = shard.narrow(0, slot.shard_offset, slot.shard_numel).to(gather.param_dtype)
                gathered = _all_gather(mine, spec.shard)
                whole[index] = in_shape(gathered.view(-1).narrow(0, 0, slot.partition.numel), slot.partition)
            elif part is None or not slot.shard_numel:
                whole[index] = shard.new_empty(slot.partition.shape, dtype=gather.param_dtype)
            else:
                piece = part[:, slot.shard_offset : slot.shard_offset + slot.shard_numel]
                whole[index] = place_rows(piece, slot.partition, slot.rows)
    return whole


def _gather_packed(spec: GroupSpec, shards: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The packed parts of the shard buffers, (ranks, packed_numel) each, in one gather; None for an empty part."""
    gathers = spec.plan.gathers
    heads = [
        shard[: each.layout.packed_numel].to(each.param_dtype) for each, shard in zip(gathers, shards, strict=True)
    ]
    filled = [head for head in heads if head.numel()]
    if len(filled) < 2:
        return [_all_gather(head, spec.shard) if head.numel() else None for head in heads]
    joined = _all_gather(torch.cat([head.view(torch.uint8) for head in filled]), spec.shard)
    parts: list[torch.Tensor | None] = []
    start = 0
    for head in heads:
        nbytes = head.numel() * head.element_size()
        part = joined[:, start : start + nbytes]
        # The bytes of a rank must be contiguous to be viewed in another dtype.
        parts.append(part.contiguous().view(head.dtype) if nbytes else None)
        start += nbytes
    return parts


# -- reducing


def _packed(
    spec: GroupSpec,
    reduce: ReducePlan,
    gradients: list[torch.Tensor | None],
    alone: torch.dtype,
    like: torch.Tensor,
) -> list[torch.Tensor]:
    """The tensors to send, (ranks * n,) each: the packed row of ``reduce.layout``, then gradients that are not packed.

    ``alone``: the dtype of the latter. ``like``: some gradient, on whose device zeros are made.
    """
    layout, world_size = reduce.layout, spec.shard.size
    dtypes = {gradient.dtype for gradient in gradients if gradient is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else reduce.dtype
    packed: list[torch.Tensor] = []
    direct: list[torch.Tensor] = []
    end = 0
    for slot, gradient in sorted(zip(layout.slots, gradients, strict=True), key=lambda each: each[0].offset):
        if not slot.shard_numel:
            continue
        if gradient is None:
            gradient = like.new_zeros(slot.partition.shape, dtype=dtype)
        if slot.partition.order:
            gradient = gradient.permute(slot.partition.order)
        if slot.direct:
            direct.append(gradient.to(alone).contiguous().view(-1))
            continue
        if slot.offset > end:
            packed.append(like.new_zeros((world_size, slot.offset - end), dtype=dtype))
        packed.append(scatter_rows(gradient.to(dtype), slot.partition, slot.rows, world_size).reshape(world_size, -1))
        end = slot.offset + slot.shard_numel
    if layout.presence_offset > end:
        packed.append(like.new_zeros((world_size, layout.presence_offset - end), dtype=dtype))
    for is_missing, run in itertools.groupby(gradient is None for gradient in gradients):
        packed.append(like.new_full((world_size, len(list(run))), 0.0 if is_missing else reduce.presence, dtype=dtype))
    if pad_numel := layout.packed_numel - layout.presence_offset - len(gradients):
        packed.append(like.new_zeros((world_size, pad_numel), dtype=dtype))
    sent = [torch.cat(packed, 1).to(reduce.dtype).view(-1), *direct]
    before = reduce.scaling.before
    return sent if before == 1.0 else [each / before for each in sent]


def _reduce(spec: GroupSpec, reduce: ReducePlan, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """The flat result in ``reduce.layout``, by functional collectives."""
    layout = reduce.layout
    parts, end = [], 0
    for (offset, _), each in zip(members_of(layout), sent, strict=True):
        part = _reduce_scatter(each, spec, reduce)
        if offset > end:
            parts.append(part.new_zeros(offset - end))
        parts.append(part)
        end = offset + part.numel()
    if end < layout.numel:
        parts.append(parts[0].new_zeros(layout.numel - end))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _reduce_scatter(flat: torch.Tensor, spec: GroupSpec, reduce: ReducePlan) -> torch.Tensor:
    """Reduce-scatter ``flat`` (ranks * n,) over the ranks to (n,), and all-reduce that over replicas."""
    scatter_op, replicate_op = operations_of(reduce.scaling)
    if spec.scatter.name:
        flat = _torch_compiler.functional_reduce_scatter(flat, scatter_op, spec.scatter.size, spec.scatter.name)
    if spec.replicas.name:
        flat = _torch_compiler.functional_all_reduce(flat, replicate_op, spec.replicas.name)
    return flat
