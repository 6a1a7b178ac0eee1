"""One process as one of many simulated ranks, on torch's `fake` process-group backend.

Collectives return at once and move no data: right for layouts, shapes, metadata, order and counts of
collectives, never for values. Owns the life of the simulated world.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.state import forget_meshes


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Makes this process rank `rank` of `world_size`; destroys every process group afterwards.

    Also a decorator of test functions.

    Raises:
        RuntimeError: A process group exists already.

    Example:
        >>> with fake_world(8, rank=3):
        ...     mesh = init_device_mesh("cpu", (2, 4))
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"cannot simulate rank {rank} of {world_size}: this process is already rank {dist.get_rank()} of "
            f"{dist.get_world_size()}; leave that world first"
        )
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    sys.excepthook = hook  # torch puts one around it for every group, and a process here has hundreds
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()


@dataclass(frozen=True, slots=True)
class FakeWorlds:
    """What the `simulate` fixture gives: enters simulated worlds, one at a time."""

    stack: contextlib.ExitStack

    def __call__(self, world_size: int, rank: int = 0) -> None:
        """Leaves the present world, if any, and enters the next; see `fake_world`."""
        self.stack.close()
        self.stack.enter_context(fake_world(world_size, rank))
