"""`Run`: sharded parameters that follow each other in memory, as their gradients do, so that one tensor is all of them.

What the flat form of `fsdp2.optim.local` steps on. Reads the buffers of groups and holds none of them, so that an
optimizer keeps no memory alive that its model has given up.

[Note: padding that is stepped on]
Between the parameters of a run, and behind the last row of an uneven one, lie elements of the shard buffer that are no
parameter's. They start as zeros, and those of the gradients are zeros (gradients that travel packed bring zeros for
them; of those that travel alone, only such are taken together as leave no gap). Whatever an optimizer makes of them,
nothing reads it: the gather brings them behind the last row of the unsharded parameter, or nowhere.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp2 import _torch
from fsdp2.core.buffers import DtypeBuffers
from fsdp2.core.gradients import GradientBucket
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.layout import GradientSlot, Slot
from fsdp2.core.param import FSDPParam, fsdp_param_of

_gradient_of = operator.attrgetter("grad")
_known_local_of = operator.attrgetter("_fsdp_param.target.local")


class _Place(NamedTuple):
    """Where one parameter lies in the buffers of its group, and where its gradient does."""

    owner: FSDPParam
    buffers: DtypeBuffers
    slot: Slot
    numel_before: int  # of all parameters ahead in the shard buffer
    gradients: GradientBucket
    gradient_slot: GradientSlot
    position: int  # among the parameters of ``gradients``

    @property
    def can_be_flat(self) -> bool:
        """Whether its gradient lies on the buffer now, and is like the parameter.

        An owned parameter only on its owner: on other ranks its place is that of others, which are owned there.
        """
        if self.slot.partition.owner is not None and self.owner.local.numel() == 0:
            return False
        delivered = self.gradients.delivered
        if delivered is None or self.owner.sharded.grad is not delivered.gradients[self.position]:
            return False
        flat, shard = delivered.flat, self.buffers.shard
        return flat.dtype == shard.dtype and flat.device == shard.device

    def is_followed_by(self, other: _Place) -> bool:
        """Whether ``other`` comes next in both buffers, with nothing but zeros between them."""
        if other.buffers is not self.buffers or other.gradients is not self.gradients:
            return False
        slot, gradient = self.slot, self.gradient_slot
        distance = other.slot.shard_offset - slot.shard_offset
        if distance != other.gradient_slot.offset - gradient.offset:
            return False
        if other.numel_before - self.numel_before != slot.shard_numel:
            return False  # another one, frozen perhaps, is small enough to lie in the alignment of the gradients
        gap = distance - slot.shard_numel
        if gradient.direct or other.gradient_slot.direct:
            return gap == 0
        return gap == other.gradient_slot.pad_numel


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters of one dtype and one group that follow each other in memory; at least two.

    Attributes:
        params: the sharded parameters.
        offsets: of each, in elements from the first.
        start: of the first, in the shard buffer.
        gradient_start: of the first, in the gradient buffer.
        numel: up to the end of the last.
    """

    params: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    start: int
    gradient_start: int
    numel: int
    _group: weakref.ref[FSDPParamGroup]
    _buffers: weakref.ref[DtypeBuffers]
    _gradients: weakref.ref[GradientBucket]
    _pick: Callable[[Sequence[Any]], tuple[Any, ...]]

    @classmethod
    def of(cls, places: Sequence[_Place]) -> Run:
        """Of parameters each of which `is_followed_by` the next."""
        first, last = places[0], places[-1]
        return cls(
            params=tuple(place.owner.sharded for place in places),
            offsets=tuple(place.slot.shard_offset - first.slot.shard_offset for place in places),
            start=first.slot.shard_offset,
            gradient_start=first.gradient_slot.offset,
            numel=last.slot.shard_offset + last.slot.shard_numel - first.slot.shard_offset,
            _group=weakref.ref(first.owner.group),
            _buffers=weakref.ref(first.buffers),
            _gradients=weakref.ref(first.gradients),
            _pick=operator.itemgetter(*(place.position for place in places)),
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(numel,) of the shard buffer, and of the gradients (None if there is none at all); None: no longer a run.

        The latter if the parameters have moved, or some of their gradients are missing or lie elsewhere.
        """
        group, buffers, gradients = self._group(), self._buffers(), self._gradients()
        if group is None or buffers not in group.storage.buffers or gradients not in group.reducer.buckets:
            return None
        assert buffers is not None and gradients is not None, "the group has them"
        try:
            moved = not all(map(operator.is_, map(_torch.local_of, self.params), map(_known_local_of, self.params)))
        except AttributeError:  # unwrapped
            return None
        if moved:
            return None
        shard = buffers.shard_slice(self.start, self.numel)
        found = list(map(_gradient_of, self.params))
        delivered = gradients.delivered
        if delivered is not None and all(map(operator.is_, found, self._pick(delivered.gradients))):
            return shard, delivered.flat[self.gradient_start : self.gradient_start + self.numel]
        if all(gradient is None for gradient in found):
            return shard, None
        return None


def _places_of(parameters: Iterable[torch.Tensor]) -> Iterator[_Place]:
    """Of those of ``parameters`` that lie in buffers and have a gradient there."""
    known: dict[FSDPParamGroup, dict[FSDPParam, _Place]] = {}
    for parameter in parameters:
        owner = fsdp_param_of(parameter)
        if owner is None or owner.group is None or owner.local is not _torch.local_of(parameter):
            continue
        if owner.group not in known:
            known[owner.group] = _places_in(owner.group)
        place = known[owner.group].get(owner)
        if place is not None and place.can_be_flat:
            yield place


def _places_in(group: FSDPParamGroup) -> dict[FSDPParam, _Place]:
    lies = {
        param: (buffers, slot, numel_before)
        for buffers in group.storage.buffers
        for param, slot, numel_before in _lying_on(buffers)
    }
    return {
        param: _Place(param, *lies[param], gradients, slot, index)
        for gradients in group.reducer.buckets
        for index, (param, slot) in enumerate(zip(gradients.params, gradients.layout.slots, strict=True))
        if param in lies
    }


def _lying_on(buffers: DtypeBuffers) -> Iterator[tuple[FSDPParam, Slot, int]]:
    """The parameters that this rank has a place for, as they follow each other; with the elements of those ahead."""
    numel_before = 0
    pairs = zip(buffers.params, buffers.layout.slots, strict=True)
    for param, slot in sorted(pairs, key=lambda pair: pair[1].shard_offset):
        if slot.partition.owner is None or param.local.numel():
            yield param, slot, numel_before
            numel_before += slot.shard_numel


def runs_of(parameters: Iterable[torch.Tensor], agreement: Callable[[torch.Tensor], object]) -> list[Run]:
    """The longest runs among ``parameters`` whose gradients lie on the buffers now.

    Args:
        parameters: of one parameter group of an optimizer.
        agreement: equal for those that may be stepped as one.
    """
    found: dict[DtypeBuffers, list[_Place]] = {}
    for place in _places_of(parameters):
        found.setdefault(place.buffers, []).append(place)
    places = [place for each in found.values() for place in sorted(each, key=lambda place: place.slot.shard_offset)]
    runs: list[list[_Place]] = []
    before: object = None
    for place in places:
        agrees = agreement(place.owner.sharded)
        if runs and runs[-1][-1].is_followed_by(place) and agrees == before:
            runs[-1].append(place)
        else:
            runs.append([place])
        before = agrees
    return [Run.of(each) for each in runs if len(each) > 1]
