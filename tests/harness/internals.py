"""What white-box tests look at and replace inside the engine, in one place: groups, their memory, private functions.

Everything else in the tests goes through the public surface, or is a test of one part by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor, nn

import fsdp2.optim.offload
from fsdp2 import _torch
from fsdp2.core.gather import Gather
from fsdp2.core.gradients import GradientBucket
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.reduce import GradientReducer
from fsdp2.core.state import states_below


class Seam(NamedTuple):
    """A private function that tests replace, or count the calls of."""

    owner: Any
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        """What it is now."""
        return getattr(self.owner, self.name)  # type: ignore[no-any-return]

    def replaced_by(self, other: Any) -> AbstractContextManager[Any]:
        """A context in which it is ``other``."""
        return mock.patch.object(self.owner, self.name, other)

    def counted(self) -> AbstractContextManager[mock.Mock]:
        """A context whose value has the calls."""
        return mock.patch.object(self.owner, self.name, wraps=self.function)


ISSUE_GATHER = Seam(FSDPParamGroup, "_issue_all_gather")
COPY_OUT = Seam(FSDPParamGroup, "_copy_out")
ALLOCATE_STAGING = Seam(Gather, "allocate")
ALLOCATE_UNSHARDED = Seam(Gather, "_allocate_unsharded")
WITHOUT_MISSING = Seam(GradientBucket, "_without")
SET_LATE_GRADIENTS = Seam(GradientReducer, "_set_late_grads")
STATE_TO_HOST = Seam(fsdp2.optim.offload, "_on_host")
STATE_TO_DEVICE = Seam(fsdp2.optim.offload, "_on_device")
AS_REAL = Seam(_torch, "_as_real")


def groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """All groups below ``model``, in the order of its modules."""
    return [group for state in states_below(model) for group in state.unit]


def shard_buffers(group: FSDPParamGroup) -> list[Tensor]:
    """The flat buffers that the sharded parameters lie on."""
    return [buffers.shard for buffers in group.storage._buffers]


def gradient_buffers(group: FSDPParamGroup) -> list[Tensor]:
    """The flat buffers that the sharded gradients lie on."""
    found = [one._buffer for one in group.reducer.buckets]
    return [buffer.flat for buffer in found if buffer is not None]


def unsharded_bytes(group: FSDPParamGroup) -> int:
    """What the unsharded parameters take while there are any."""
    return group.storage.unsharded_bytes


def allocated_bytes(group: FSDPParamGroup) -> int:
    """Bytes of unsharded memory, and of what gathers need beside it, that are allocated at this moment."""
    storage = group.storage
    gathers = [storage.gather, storage.post_forward.gather if storage.post_forward is not None else None]
    own = [buffers for buffers in storage._buffers if not buffers.lies_in_place]  # other than the shards themselves
    unsharded = sum(buffers.unsharded.storage.nbytes() for buffers in own)
    return unsharded + sum(gather.allocated_bytes for gather in gathers if gather is not None)


def gathered_first(group: FSDPParamGroup) -> Tensor:
    """The output of the first member of the group's all-gathers: an object that tells them from others'."""
    assert group.storage.gather is not None, "prepared"
    return group.storage.gather.members[0][0]


def unsharded_bytes_now(model: nn.Module) -> int:
    """Bytes of unsharded memory, and of what gathers need beside it, that have been allocated at this moment."""
    return sum(map(allocated_bytes, groups_of(model)))
