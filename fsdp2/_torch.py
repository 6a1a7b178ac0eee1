"""Every private or version-dependent name of torch that fsdp2 relies on, and nothing else.

Each entry says why it is needed and on which versions (2.11 to 2.15) it was seen to work. A new torch version
that breaks one of them breaks here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.autograd import profiler
from torch.distributed.tensor import DTensor

# `all_gather_single` / `reduce_scatter_single` are the names from 2.13 on, where the older ones warn. Looked
# up at every call, so that a program which patches or wraps the function sees the traffic.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Gather ``input`` (n,) of every rank into ``output`` (world_size * n,) in rank order."""
    work: dist.Work | None = getattr(dist, _ALL_GATHER)(output, input, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Reduce ``input`` (world_size * n,) over the ranks; ``output`` (n,) is this rank's part."""
    work: dist.Work | None = getattr(dist, _REDUCE_SCATTER)(output, input, op=op, group=group, async_op=async_op)
    return work


def coalescing(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """Batch the all-gathers, or the reduce-scatters, issued inside into one launch (there is no public form)."""
    return dist.distributed_c10d._coalescing_manager(group=group)


def make_dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor over ``local`` with a ready ``DTensorSpec``: 1.6 us, where `DTensor.from_local` takes 16."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


# What lies under a DTensor, without the autograd edge that `to_local()` adds. (A C-level attribute getter.)
local_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")
# The DTensorSpec object; `p`, `p.grad` and the plan share one, or every foreach call compares specs slowly.
spec_of: Callable[[torch.Tensor], Any] = operator.attrgetter("_spec")


# Counts in-place writes, in most ways: DTensor's operators, but neither foreach and fused ones nor those on `.data`.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def set_local(dtensor: torch.Tensor, local: torch.Tensor) -> None:
    """Let ``dtensor`` lie on ``local`` (same shape, dtype and device): the one way that keeps its identity."""
    dtensor._local_tensor = local  # type: ignore[attr-defined]


def chunk_cat(tensors: Sequence[torch.Tensor], num_chunks: int, out: torch.Tensor) -> None:
    """Pack ``tensors`` rank-major into ``out`` (num_chunks, n): dim 0 of each is cut into ``num_chunks`` chunks
    of ceil(size0 / num_chunks) rows, short ones padded with zeros. One kernel for any number of tensors."""
    torch._chunk_cat(tensors, 0, num_chunks, out=out)  # type: ignore[arg-type]


def foreach_copy(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its destination, one kernel on accelerators."""
    torch._foreach_copy_(destinations, sources)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects share ``storage``."""
    return torch._C._storage_Use_Count(storage._cdata)


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has ended without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


current_backward: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
"""The number of the backward pass that the calling thread is inside of, -1 if of none."""


def backward_is_running() -> bool:
    """Whether the calling thread is inside a backward pass (as under activation checkpointing's recompute)."""
    return current_backward() != -1


def backward_will_execute(node: Any) -> bool:
    """Whether ``node`` belongs to the graph of the running backward. (It may have been executed already.)"""
    return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined,no-any-return]


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of the storage that ``tensor`` lies on, 0 if it has none (sparse tensors)."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0  # type: ignore[attr-defined]


_NOTHING: AbstractContextManager[None] = nullcontext()


def without_grad() -> AbstractContextManager[Any]:
    """`torch.no_grad()`, at no cost where grad mode is off already, as in a backward without ``create_graph``."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def profiler_is_running() -> bool:
    """Whether a profiler records, so that named ranges are worth 4 us each."""
    return profiler._is_profiler_enabled


def tensor_hooks(parameter: torch.Tensor) -> dict[int, Callable[[torch.Tensor], torch.Tensor | None]] | None:
    """The hooks of `Tensor.register_hook`; autograd calls them only for what is in its graph."""
    hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]] | None = parameter._backward_hooks
    return hooks


def post_accumulate_grad_hooks(parameter: torch.Tensor) -> dict[int, Callable[[torch.Tensor], None]] | None:
    """The hooks of `Tensor.register_post_accumulate_grad_hook`; autograd calls them only for its own leaves."""
    hooks: dict[int, Callable[[torch.Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    return hooks
