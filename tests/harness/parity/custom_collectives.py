"""Collectives that keep a log and allocate their own memory, as `set_custom_all_gather` and its sibling take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.harness.parity.implementation import API

# The older names, which warn where the newer ones are, are all that torch 2.11 has.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class _Memory:
    """Allocates, and knows its own again; keeps nothing alive."""

    def __init__(self) -> None:
        self.own: set[StorageWeakRef] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.full(tuple(size), 7, dtype=dtype, device=device)
        self.own.add(reference(tensor))
        return tensor


def reference(tensor: Tensor) -> StorageWeakRef:
    """Tells whether the memory of ``tensor`` is still in use."""
    return StorageWeakRef(tensor.untyped_storage())


def custom_all_gather(log: list[dict[str, Any]]) -> Any:
    """An all-gather with an entry in ``log`` for every call."""

    class Logged(_Memory, API.AllGather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> dist.Work | None:
            log.append(
                {
                    "numel": output_tensor.numel(),
                    "input": input_tensor.numel(),
                    "dtype": output_tensor.dtype,
                    "async_op": async_op,
                    "ranks": dist.get_process_group_ranks(group),
                    "own_memory": reference(output_tensor) in self.own,
                }
            )
            return getattr(dist, _GATHER)(output_tensor, input_tensor, group=group, async_op=async_op)

    return Logged()


def custom_reduce_scatter(log: list[dict[str, Any]]) -> Any:
    """A reduce-scatter with an entry in ``log`` for every call."""

    class Logged(_Memory, API.ReduceScatter):
        def __init__(self) -> None:
            super().__init__()
            self.inputs: list[StorageWeakRef] = []

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
        ) -> dist.Work | None:
            log.append(
                {
                    "numel": input_tensor.numel(),
                    "output": output_tensor.numel(),
                    "op": op,
                    "ranks": dist.get_process_group_ranks(group),
                    "own_memory": reference(input_tensor) in self.own,
                    "earlier_inputs_alive": sum(not each.expired() for each in self.inputs),
                }
            )
            self.inputs.append(reference(input_tensor))
            return getattr(dist, _SCATTER)(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    return Logged()


class Arena:
    """Hands out one and the same memory again and again, as persistent buffers do; a mixin in front of a collective."""

    def __init__(self) -> None:
        super().__init__()
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._turn = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        half = 1 << 20  # input and output of one call, in turns
        if not self._arena.numel():
            self._arena = torch.empty(2 * half, dtype=torch.uint8, device=device)
        self._turn = 1 - self._turn
        start = self._turn * half
        return self._arena[start : start + numel * dtype.itemsize].view(dtype)


def persistent_collectives() -> tuple[Any, Any]:
    """An all-gather and a reduce-scatter, each in persistent buffers of its own."""
    gather, scatter = custom_all_gather([]), custom_reduce_scatter([])
    kinds = [type(f"Persistent{type(each).__name__}", (Arena, type(each)), {}) for each in (gather, scatter)]
    return kinds[0](), kinds[1]()
