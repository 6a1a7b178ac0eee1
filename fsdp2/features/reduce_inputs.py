"""A function of the user's that puts gradients side by side: `FSDPModule.set_reduce_scatter_input_fn`.

torch adds this after 2.15, as ``torch.distributed.fsdp.experimental``; the names are those of it. The function fills a
buffer of its own, in which nothing but gradients lies; from there one copy takes them to where the engine also sends
which parameters had a gradient.

Owns the bucket of such groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp2.arguments import shown
from fsdp2.core.gradients import BUCKET_BY_FUNCTION, GradientBucket
from fsdp2.core.layout import GradientSlot
from fsdp2.core.module import INPUT_FUNCTION
from fsdp2.core.options import InputFunction
from fsdp2.core.param import FSDPParam
from fsdp2.core.plan import ReducePlan
from fsdp2.core.sharding import in_memory_order, in_rows, scatter_rows
from fsdp2.errors import FSDPTypeError, named

_NATIVE = "reduce_scatter_input_fn_with_native_copy"
_NOTHING_TO_DO = (_NATIVE, "_default_reduce_scatter_input_fn")
"""Names of functions of torch's, and of the one here, that do what the engine does anyhow."""


def reduce_scatter_input_fn_with_native_copy(
    unsharded_grads: list[torch.Tensor], shard_dims: list[int], world_size: int
) -> Callable[[torch.Tensor], None]:
    """Make what copies gradients side by side, each by one copy: torch's opt-in for fewer copies.

    fsdp2 needs no such function, for large gradients are reduced where they lie: ``set_reduce_scatter_input_fn`` takes
    it, and goes on as without one. It can be called all the same, as by a function of the user's.

    Args:
        unsharded_grads: of this rank, whole.
        shard_dims: of each, the dim that is cut.
        world_size: of the ranks that it is cut for.

    Returns:
        A function that fills a flat buffer with each rank's shards, one rank after the other: padded with zeros to
        ``ceil(size / world_size)`` along the dim, and cast to the buffer's dtype.
    """

    def copy_in(buffer: torch.Tensor) -> None:
        rows, start = buffer.view(world_size, -1), 0
        for gradient, dim in zip(unsharded_grads, shard_dims, strict=True):
            size = gradient.shape[dim]
            width = -(-size // world_size)
            shape = [*gradient.shape[:dim], width, *gradient.shape[dim + 1 :]]
            numel = gradient.numel() // size * width if size else 0
            for rank, row in enumerate(rows[:, start : start + numel]):
                first = min(rank * width, size)
                part = gradient.narrow(dim, first, min(width, size - first))
                shard = row.view(shape)
                shard.narrow(dim, 0, part.shape[dim]).copy_(part)
                shard.narrow(dim, part.shape[dim], width - part.shape[dim]).zero_()
            start += numel

    return copy_in


def input_function(function: Any) -> InputFunction | None:
    """``function``; None if it asks for what the engine does anyhow.

    Raises:
        FSDPTypeError: it cannot be called.
    """
    if function is None:
        return None
    if not callable(function):
        raise FSDPTypeError(
            "set_reduce_scatter_input_fn takes a function (unsharded_grads, shard_dims, world_size) or None, got "
            f"{shown(function)}."
        )
    is_known = getattr(function, "__name__", "") in _NOTHING_TO_DO
    is_ours_or_torchs = str(getattr(function, "__module__", "")).startswith(("fsdp2.", "torch."))
    return None if is_known and is_ours_or_torchs else function


class BucketByFunction(GradientBucket):
    """Packs what the function has put side by side; nothing travels alone."""

    def __init__(
        self, function: InputFunction, params: Sequence[FSDPParam], plan: ReducePlan, **arguments: Any
    ) -> None:
        super().__init__(params, plan, **arguments)
        self._function = function
        self._others = []  # `_place` does all of them

    def _common_dtype(self, gradients: Sequence[torch.Tensor | None], missing: Sequence[int]) -> torch.dtype:
        """That in which they are reduced: the function casts."""
        return self.dtype

    def _place(self, carried: list[torch.Tensor | None], packing: list[torch.Tensor], dtype: torch.dtype) -> None:
        """Call the function, and put each rank's shards, as columns, where they are packed from."""
        cut = [each for each in self._carriages if each[2].partition.dim is not None]
        for index, hole, slot in self._carriages:
            if slot.partition.dim is None:  # of no dims: every rank has the whole
                whole = self._dense(index, carried[index], dtype).to(dtype)
                packing[hole] = scatter_rows(whole, slot.partition, slot.rows, self._world_size)
        if not cut:
            return
        gradients = [self._in_memory_order(index, carried[index], slot) for index, _, slot in cut]
        dims = [slot.partition.memory_dim for _, _, slot in cut]
        with torch.no_grad(), named(f"the function of set_reduce_scatter_input_fn(), around '{self.params[0].path}'"):
            copy_in = self._function(gradients, dims, self._world_size)
            if not callable(copy_in):
                raise FSDPTypeError(
                    "the function of set_reduce_scatter_input_fn() must return one that fills a flat buffer, got "
                    f"{shown(copy_in)}."
                )
            numels = [slot.shard_numel for _, _, slot in cut]
            buffer = torch.empty(self._world_size * sum(numels), dtype=dtype, device=self._device)
            copy_in(buffer)
        columns = buffer.view(self._world_size, -1).split(numels, dim=1)
        for (_, hole, slot), column in zip(cut, columns, strict=True):
            packing[hole] = self._as_dealt_out(column, slot)

    def _in_memory_order(self, index: int, gradient: torch.Tensor | None, slot: GradientSlot) -> torch.Tensor:
        whole = self._dense(index, gradient, self.params[index].param_dtype)
        return in_rows(in_memory_order(whole, slot.partition), slot.partition)

    def _as_dealt_out(self, column: torch.Tensor, slot: GradientSlot) -> torch.Tensor:
        """(world_size, n) padded along the dim that is cut, as the ranks lay it out: padded at the end."""
        partition, world_size = slot.partition, self._world_size
        if partition.outer == 1 or slot.rows * world_size == partition.size:
            return column
        of_ranks = column.reshape(world_size, partition.outer, slot.rows * partition.row_numel).transpose(0, 1)
        whole = of_ranks.reshape(partition.outer, -1)[:, : partition.size * partition.row_numel]
        return scatter_rows(whole, partition, slot.rows, world_size)


INPUT_FUNCTION.fill(input_function)
BUCKET_BY_FUNCTION.fill(BucketByFunction)
