"""All-gather and reduce-scatter as sends and receives between all pairs of ranks, without a thread or a copy between.

For backends whose own collectives do more than that: gloo's reduce-scatter sends twice what it must (it is an
all-reduce) and clones its input, its all-gather goes through an output of its own. Messages of one kind between two
ranks are matched in the order in which they are issued, as collectives are; the tags keep the kinds apart, and apart
from what users send.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch

_GATHER_TAG = 0x46534447
_SCATTER_TAG = 0x46534453


def all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, works: list[Any]) -> None:
    """Begin to gather ``input`` (n,) of every rank into ``output`` (world_size * n,): done when ``works`` are."""
    rank, world_size, numel = group.rank(), group.size(), input.numel()
    if numel == 0:
        return
    parts = output.split(numel)
    for step in range(1, world_size):
        source = (rank - step) % world_size
        works.append(_torch.receive(parts[source], source, group, _GATHER_TAG))
    for step in range(1, world_size):
        works.append(_torch.send(input, (rank + step) % world_size, group, _GATHER_TAG))
    if parts[rank].data_ptr() != input.data_ptr():
        parts[rank].copy_(input)


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup, works: list[Any]
) -> None:
    """Begin to sum (or average) ``input`` (world_size * n,) over the ranks, its part of this rank into ``output`` (n,).

    Terms are added in the order of the ranks, one after the other, in the dtype of ``input``, which is only read.
    ``works`` are to be waited for: the last of them adds. Until then n elements for each other rank are kept.
    """
    rank, world_size, numel = group.rank(), group.size(), output.numel()
    if numel == 0:
        return
    parts = input.split(numel)
    arrived = list(input.new_empty((world_size - 1) * numel).split(numel))
    terms = [*arrived[:rank], parts[rank], *arrived[rank:]]
    exchange: list[dist.Work] = []
    for step in range(1, world_size):
        source = (rank - step) % world_size
        exchange.append(_torch.receive(terms[source], source, group, _SCATTER_TAG))
    for step in range(1, world_size):
        target = (rank + step) % world_size
        exchange.append(_torch.send(parts[target], target, group, _SCATTER_TAG))
    works.append(_Sum(exchange, terms, output, is_mean=op == dist.ReduceOp.AVG))


def can_reduce(op: Any) -> bool:
    """Whether `reduce_scatter` knows ``op``."""
    return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)  # type: ignore[comparison-overlap]


class _Sum:
    """The end of a reduce-scatter: waits for what the others send, and adds it up."""

    __slots__ = ("_exchange", "_is_mean", "_output", "_terms")

    def __init__(
        self, exchange: list[dist.Work], terms: list[torch.Tensor], output: torch.Tensor, *, is_mean: bool
    ) -> None:
        self._exchange, self._terms, self._output, self._is_mean = exchange, terms, output, is_mean

    def wait(self) -> bool:
        """Block the host until ``output`` holds the result; nothing to do the second time."""
        for work in self._exchange:
            work.wait()
        if self._terms:
            with _torch.without_grad():
                torch.add(self._terms[0], self._terms[1], out=self._output)
                for term in self._terms[2:]:
                    self._output.add_(term)
                if self._is_mean:
                    self._output.div_(len(self._terms))
        self._exchange, self._terms = [], []
        return True
