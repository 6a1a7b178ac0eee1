"""Running tests with the memory pool on, whatever they set up: ``FSDP2_TEST_POOL=1``, for ``make test-pool``."""

from __future__ import annotations

import functools
import os

import pytest

from fsdp2 import _torch
from fsdp2.core.streams import Device, FSDPCommContext

needs_pool = pytest.mark.skipif(not _torch.can_swap_memory, reason="torch moves memory between storages from 2.13 on")


def pool_if_asked() -> None:
    """Have every root of this process keep memory of communication from the beginning, if the variable is set."""
    if os.environ.get("FSDP2_TEST_POOL") != "1":
        return
    if not _torch.can_swap_memory:
        raise RuntimeError("FSDP2_TEST_POOL needs a torch whose storages can exchange memory: 2.13 or newer.")
    initialize = FSDPCommContext.__init__

    @functools.wraps(initialize)
    def initialize_pooled(self: FSDPCommContext, device: Device) -> None:
        initialize(self, device)
        self.pool_memory(True)

    FSDPCommContext.__init__ = initialize_pooled  # type: ignore[method-assign]
