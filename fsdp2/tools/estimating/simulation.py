"""`simulated_world`: a world of many ranks in one process, of which only one exists, made and left again.

The process group is torch's ``fake`` one, whose collectives return at once. Tensors have shapes and no memory, so a
model of any size takes none. Nothing of it stays: the process group is destroyed, and so are the meshes that DTensor
remembers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.api import fully_shard as shard
from fsdp2.core import mesh as meshes
from fsdp2.errors import FSDPRuntimeError


@contextmanager
def simulated_world(ranks: int, caller: str) -> Iterator[None]:
    """Inside, this process is rank 0 of ``ranks``.

    Args:
        ranks: how many ranks there are.
        caller: the function that the user has called, for messages.

    Raises:
        FSDPRuntimeError: a process group exists. It is left as it is: two worlds in one process would mix up DTensor's
            meshes, and a simulation beside real ranks would hold them up.
    """
    if dist.is_initialized():
        raise FSDPRuntimeError(
            f"{caller} simulates {ranks} ranks with a process group of its own, and this process is already rank "
            f"{dist.get_rank()} of {dist.get_world_size()}. Call it before torch.distributed.init_process_group(), or "
            "in a process of its own, which needs no launcher."
        )
    _torch.begin_simulated_world(0, ranks)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _torch.forget_meshes()


@contextmanager
def laid_out_for(device_type: str) -> Iterator[None]:
    """Inside, meshes are of a device type that need not exist here: it decides what is packed, and who casts."""
    before = meshes.device_of, shard._move_to_device
    meshes.device_of, shard._move_to_device = lambda mesh: torch.device(device_type), lambda *_: None
    try:
        yield
    finally:
        meshes.device_of, shard._move_to_device = before


class SimulatedDevice:
    """The engine's `Device` protocol for a device with streams. Everything happens as soon as it is issued."""

    has_streams = True

    def __init__(self) -> None:
        self._streams, self._current = 1, 0

    def new_stream(self) -> int:
        """The number of a new stream."""
        self._streams += 1
        return self._streams - 1

    def current_stream(self) -> int:
        """The number of the stream that operators are issued to."""
        return self._current

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Issue operators inside to ``stream``."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: int) -> object:
        """An event. It holds nothing, as it has happened already."""
        return object()

    def wait(self, stream: int, event: Any, why: Any) -> None:
        """Do nothing: the event has happened."""

    def block_host(self, event: Any) -> None:
        """Do nothing: the event has happened."""

    def is_capturing(self) -> bool:
        """False: the simulation records no graphs."""
        return False
