"""Collectives that a user (or a setting) puts in the place of torch.distributed's: the protocols, and those we bring.

A custom collective also decides where its buffers lie, so a group that uses one sends everything packed, through the
buffer that ``allocate`` returned.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.errors import FSDPRuntimeError, FSDPTypeError


class Comm(ABC):
    """What every custom collective provides: memory for its buffers."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous buffer of ``size`` (one dim) to communicate with, fresh or used again."""


class AllGather(Comm):
    """In the place of the all-gather of parameters; see `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (n,) of every rank into ``output_tensor`` (world_size * n,).

        ``output_tensor`` came from ``allocate``; ``input_tensor`` is this rank's part of it. With ``async_op`` return
        the work to wait for.
        """


class ReduceScatter(Comm):
    """In the place of the reduce-scatter of gradients; see `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (world_size * n,) with ``op``; this rank's part goes to ``output_tensor`` (n,).

        Both came from ``allocate``. With ``async_op`` return the work to wait for.
        """


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


OURS = (AllGatherInMemory, ReduceScatterInMemory)


def check_comm(comm: object, method: str) -> None:
    """Refuse what is no custom collective. (Any class with the two methods will do, torch's base classes as well.)

    Raises:
        FSDPTypeError: it cannot be called, or has no ``allocate``.
    """
    if isinstance(comm, type) or not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise FSDPTypeError(
            f"{method} takes an object that can be called and has allocate(size, *, dtype, device), got {comm!r}."
        )


def refuse_custom(groups: Iterable[Any], method: str) -> None:
    """Refuse to bring memory for collectives where the user's own collectives do.

    Raises:
        FSDPRuntimeError: one of ``groups`` has such a collective.
    """
    for group in groups:
        for comm in (group.settings.custom_all_gather, group.settings.custom_reduce_scatter):
            if comm is not None and not isinstance(comm, OURS):
                raise FSDPRuntimeError(
                    f"{method} and a custom collective exclude each other: {type(comm).__name__} allocates its "
                    "buffers itself."
                )
