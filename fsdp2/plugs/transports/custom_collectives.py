"""Custom collectives in memory of the process group's, or in symmetric memory: torch.distributed's otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.options import AllGather, ReduceScatter
from fsdp2.errors import FSDPRuntimeError


class GroupMemory:
    """Buffers from the process group's own allocator, which it may have registered with the network."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From the process group's backend if it has an allocator, else from torch's."""
        return _torch.allocate_from_group(self._group, math.prod(size), dtype, device)

    def prepare(self, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Nothing to do before a collective."""


class SymmetricMemory:
    """Buffers in symmetric memory, through which ranks reach into each other's memory, and NCCL has faster ways."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        _torch.use_symmetric_memory(backend, group)

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From the pool of symmetric memory."""
        return _torch.symmetric_empty(size, dtype, device)

    def prepare(self, buffers: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Let the ranks reach into ``buffers``. Collective the first time."""
        for buffer in buffers:
            _torch.symmetric_rendezvous(buffer, group)


class AllGatherInMemory(AllGather):
    """torch.distributed's all-gather, in buffers of a certain memory."""

    def __init__(self, memory: GroupMemory | SymmetricMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From that memory."""
        return self._memory.allocate(size, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """torch.distributed's; the input is a part of the output."""
        self._memory.prepare([output_tensor], group)
        return _torch.all_gather_single(output_tensor, input_tensor, group, async_op)


class ReduceScatterInMemory(ReduceScatter):
    """torch.distributed's reduce-scatter, in buffers of a certain memory. (NCCL's symmetric one can only sum.)"""

    def __init__(self, memory: GroupMemory | SymmetricMemory) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From that memory."""
        return self._memory.allocate(size, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """torch.distributed's."""
        self._memory.prepare([input_tensor, output_tensor], group)
        return _torch.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


_OURS = (AllGatherInMemory, ReduceScatterInMemory)


def _refuse_custom(groups: Iterable[FSDPParamGroup], method: str) -> None:
    """Refuse to bring memory for collectives where the user's own collectives do.

    Raises:
        FSDPRuntimeError: one of ``groups`` has such a collective.
    """
    for group in groups:
        for comm in (group.settings.custom_all_gather, group.settings.custom_reduce_scatter):
            if comm is not None and not isinstance(comm, _OURS):
                raise FSDPRuntimeError(
                    f"{method} and a custom collective exclude each other: {type(comm).__name__} allocates its "
                    "buffers itself."
                )


def set_in_memory(groups: Iterable[FSDPParamGroup], method: str, backend: str | None, enable: bool) -> None:
    """Let ``groups`` communicate in symmetric memory of ``backend``; None: in memory of their process groups.

    Raises:
        FSDPRuntimeError: one of ``groups`` has a collective of the user's.
    """
    _refuse_custom(groups, method)
    for group in groups:
        process_group = group.mesh.shard_group
        if process_group is None:
            continue
        changes: dict[str, Any] = {"custom_all_gather": None}
        if enable:
            changes["custom_all_gather"] = AllGatherInMemory(_memory(process_group, backend))
        if backend is None or group.settings.only_sums:
            scatter = group.reducer.scatter_group or process_group
            reduce = ReduceScatterInMemory(_memory(scatter, backend)) if enable else None
            changes["custom_reduce_scatter"] = reduce
        group.configure(dataclasses.replace(group.settings, **changes))


def _memory(group: dist.ProcessGroup, backend: str | None) -> GroupMemory | SymmetricMemory:
    return GroupMemory(group) if backend is None else SymmetricMemory(group, backend)
