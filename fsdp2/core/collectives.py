"""Collectives that a user, or a feature, puts in the place of torch.distributed's: the protocols.

A custom collective also decides where its buffers lie, so a group that uses one sends everything packed, through the
buffer that ``allocate`` returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.errors import FSDPTypeError


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


def check_comm(comm: object, method: str) -> None:
    """Refuse what is no custom collective. (Any class with the two methods will do, torch's base classes as well.)

    Raises:
        FSDPTypeError: it cannot be called, or has no ``allocate``.
    """
    if isinstance(comm, type) or not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise FSDPTypeError(
            f"{method} takes an object that can be called and has allocate(size, *, dtype, device), got {comm!r}."
        )
