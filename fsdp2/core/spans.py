"""`spans`: where a group's parameters and their gradients lie in memory. This is all that optimizers know of buffers.

This file knows nothing of optimizers. A span keeps memory alive that the group may want to free, so optimizers keep a
`SpanMemory`, which refers to it weakly.
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
        bucket: the bucket that it is reduced in.
        position: its index among the parameters of ``bucket``.
        start: its first element in the flat buffer of the bucket's gradients.
        pad_numel: how many zeros lie right before it; None if it is not packed, so that this is not known.
    """

    bucket: GradientBucket
    position: int
    start: int
    pad_numel: int | None


class Span(NamedTuple):
    """Where a sharded parameter lies on this rank.

    Attributes:
        param: the parameter, whose ``local`` lies here.
        buffers: the owner of the shard buffer.
        start: its first element in the shard buffer.
        numel: its elements, with the padding behind its last row.
        numel_before: the elements of all parameters before it in the buffer.
        is_here: whether it lies here. If another rank owns it, its place here belongs to other parameters.
        gradient: where its gradient is delivered; None if it is frozen.
    """

    param: FSDPParam
    buffers: DtypeBuffers
    start: int
    numel: int
    numel_before: int
    is_here: bool
    gradient: GradientSpan | None

    def has_gradient_alike(self) -> bool:
        """Whether its ``.grad`` is the one that was delivered there, with the dtype and the device of the shard."""
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
            # A parameter between the two, perhaps frozen, is so small that it lies in the alignment of the gradients.
            return False
        gap = 0 if mine.pad_numel is None or theirs.pad_numel is None else theirs.pad_numel
        return distance - self.numel == gap


def spans(group: FSDPParamGroup) -> list[Span]:
    """The spans of those parameters of ``group`` that lie in buffers, buffer by buffer, in their order there.

    Before lazy initialization no span has a `GradientSpan`.
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
    """The memory of spans that have their group, shard buffer and bucket in common. It is referred to weakly."""

    __slots__ = ("_bucket", "_buffers", "_group")

    def __init__(self, span: Span) -> None:
        assert span.gradient is not None, "a frozen parameter is not stepped on"
        self._group = weakref.ref(span.param.group)
        self._buffers = weakref.ref(span.buffers)
        self._bucket = weakref.ref(span.gradient.bucket)

    def now(self) -> tuple[DtypeBuffers, GradientBuffer | None] | None:
        """The buffers, and the buffer that gradients were last delivered on, if any. None: all were laid out anew."""
        group, buffers, bucket = self._group(), self._buffers(), self._bucket()
        if group is None or buffers not in group.storage.buffers or bucket not in group.reducer.buckets:
            return None
        assert buffers is not None and bucket is not None, "the group has them"
        return buffers, bucket.delivered
