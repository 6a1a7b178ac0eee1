"""`spans`: where a group's parameters lie in memory, and where their gradients do. What optimizers know of buffers.

Knows nothing of optimizers. A span holds memory, which the group may give up: what is kept is a `SpanMemory`.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from fsdp2.core.buffers import DtypeBuffers
from fsdp2.core.gradients import GradientBucket, GradientBuffer
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.param import FSDPParam


class GradientSpan(NamedTuple):
    """Where a parameter's gradient is delivered.

    Attributes:
        bucket: with which others.
        position: among the parameters of ``bucket``.
        start: in the memory that they are delivered on.
        pad_numel: zeros before it; None if the reduction of what is before it says nothing of that.
    """

    bucket: GradientBucket
    position: int
    start: int
    pad_numel: int | None


class Span(NamedTuple):
    """Where a parameter lies, on this rank.

    Attributes:
        param: whose ``local`` it is.
        buffers: in whose shard buffer.
        start: there.
        numel: with the padding behind its last row.
        numel_before: of all parameters ahead of it.
        is_here: whether this is its own place. Of a parameter that another rank owns it is one of others.
        gradient: None if it is frozen.
    """

    param: FSDPParam
    buffers: DtypeBuffers
    start: int
    numel: int
    numel_before: int
    is_here: bool
    gradient: GradientSpan | None

    def has_gradient_alike(self) -> bool:
        """Whether its ``.grad`` is the one that was delivered there, of the dtype and on the device of the shard."""
        delivered = None if self.gradient is None else self.gradient.bucket.delivered
        if self.gradient is None or delivered is None:
            return False
        if self.param.sharded.grad is not delivered.gradients[self.gradient.position]:
            return False
        return delivered.flat.dtype == self.buffers.shard.dtype and delivered.flat.device == self.buffers.shard.device

    def is_followed_by(self, other: Span) -> bool:
        """Whether ``other`` comes next in both memories, with nothing but zeros between them."""
        mine, theirs = self.gradient, other.gradient
        if mine is None or theirs is None or other.buffers is not self.buffers or mine.bucket is not theirs.bucket:
            return False
        distance = other.start - self.start
        if distance != theirs.start - mine.start:
            return False
        if other.numel_before - self.numel_before != self.numel:
            return False  # another one, frozen perhaps, is small enough to lie in the alignment of the gradients
        gap = 0 if mine.pad_numel is None or theirs.pad_numel is None else theirs.pad_numel
        return distance - self.numel == gap


def spans(group: FSDPParamGroup) -> list[Span]:
    """Where the parameters of ``group`` lie now, if in buffers: buffer by buffer, in their order.

    Before lazy initialization none has a gradient.
    """
    gradients = {
        param: GradientSpan(bucket, position, slot.offset, None if slot.direct else slot.pad_numel)
        for bucket in group.reducer.buckets
        for position, (param, slot) in enumerate(zip(bucket.params, bucket.layout.slots, strict=True))
    }
    found = []
    for buffers in group.storage.buffers:
        numel_before = 0
        pairs = zip(buffers.params, buffers.layout.slots, strict=True)
        for param, slot in sorted(pairs, key=lambda pair: pair[1].shard_offset):
            is_here = slot.partition.owner is None or param.local.numel() > 0
            gradient = gradients.get(param)
            found.append(Span(param, buffers, slot.shard_offset, slot.shard_numel, numel_before, is_here, gradient))
            numel_before += slot.shard_numel if is_here else 0
    return found


class SpanMemory:
    """The memory of spans of one group, one shard buffer and one bucket, held weakly."""

    __slots__ = ("_bucket", "_buffers", "_group")

    def __init__(self, span: Span) -> None:
        assert span.gradient is not None, "a frozen parameter is not stepped on"
        self._group = weakref.ref(span.param.group)
        self._buffers = weakref.ref(span.buffers)
        self._bucket = weakref.ref(span.gradient.bucket)

    def now(self) -> tuple[DtypeBuffers, GradientBuffer | None] | None:
        """The buffers, and what gradients were delivered on last, if on any; None: they are laid out anew."""
        group, buffers, bucket = self._group(), self._buffers(), self._bucket()
        if group is None or buffers not in group.storage.buffers or bucket not in group.reducer.buckets:
            return None
        assert buffers is not None and bucket is not None, "the group has them"
        return buffers, bucket.delivered
