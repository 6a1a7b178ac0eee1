"""What white-box tests look at inside the engine, in one place: groups, their memory, their gathers.

Everything else in the tests goes through the public surface, or is a test of one part by itself.
"""

from __future__ import annotations

from torch import Tensor, nn

from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.state import states_below


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
