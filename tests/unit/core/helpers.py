"""Gathers of several ranks that live in one process, and what an all-gather between them does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fsdp2.core.buffers import Resizable
from fsdp2.core.gather import Gather, Source
from fsdp2.core.layout import BufferLayout
from fsdp2.core.options import AllGather
from fsdp2.core.sharding import Partition, in_memory_order

CPU = torch.device("cpu")

Dtypes = tuple[torch.dtype, torch.dtype]


class FreshMemory(AllGather):
    """Allocates, and counts what is borrowed; the exchange is the test's."""

    def __init__(self) -> None:
        self.borrowed = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Filled with garbage."""
        self.borrowed += 1
        return torch.full(tuple(size), 99, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Not called here."""


def exchange(gathers: Sequence[Gather]) -> None:
    """What an all-gather does, member by member."""
    for members in zip(*(gather.members for gather in gathers), strict=True):
        inputs = [input for _, input in members]
        assert all(input.is_contiguous() and input.dim() == 1 for input in inputs)
        assert all(input.dtype == output.dtype for output, input in members)
        everything = torch.cat(inputs)
        for output, _ in members:
            assert output.is_contiguous() and output.shape == everything.shape
            output.copy_(everything)


def cuts_of(whole: Sequence[Sequence[Tensor]]) -> list[list[Partition]]:
    """In dim 0, contiguous."""
    return [[Partition(tuple(param.shape)) for param in params] for params in whole]


def sources_of(
    whole: Sequence[Sequence[Tensor]],
    cuts: Sequence[Sequence[Partition]],
    dtypes: Sequence[Dtypes],
    *,
    world_size: int,
    threshold: float,
) -> list[list[Source]]:
    """For every rank one source for each of ``dtypes`` (of the shard, of the unsharded buffer)."""
    ranks = []
    for rank in range(world_size):
        sources = []
        for params, of_params, (dtype, unsharded_dtype) in zip(whole, cuts, dtypes, strict=True):
            layout = BufferLayout.build(
                of_params,
                world_size=world_size,
                itemsize=min(dtype.itemsize, unsharded_dtype.itemsize),
                direct_threshold_bytes=threshold,
            )
            shard = torch.zeros(layout.shard_numel, dtype=dtype)
            for param, slot in zip(params, layout.slots, strict=True):
                start, stop = slot.partition.part(slot.rows, rank)
                local = param if slot.partition.dim is None else param.narrow(slot.partition.dim, start, stop - start)
                flat = in_memory_order(local, slot.partition).flatten()
                shard[slot.shard_offset : slot.shard_offset + local.numel()] = flat
            unsharded = Resizable(torch.empty(layout.unsharded_numel, dtype=unsharded_dtype))
            sources.append(Source(SimpleNamespace(unsharded=unsharded), shard, layout))  # type: ignore[arg-type]
        ranks.append(sources)
    return ranks


def assert_gathered(sources: Sequence[Source], whole: Sequence[Sequence[Tensor]]) -> None:
    for source, params in zip(sources, whole, strict=True):
        for param, slot in zip(params, source.layout.slots, strict=True):
            found = source.unsharded[slot.unsharded_offset :].as_strided(
                param.shape, slot.partition.stride(param.shape)
            )
            assert torch.equal(found, param.to(found.dtype))


FULL, HALF, WIDE = torch.float32, torch.bfloat16, torch.float64
