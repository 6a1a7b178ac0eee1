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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2 import _torch
from fsdp2.core.param import FSDPParam, fsdp_param_of
from fsdp2.core.spans import Span, SpanMemory, spans

_gradient_of = operator.attrgetter("grad")
_known_local_of = operator.attrgetter("_fsdp_param.target.local")


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
    _memory: SpanMemory
    _pick: Callable[[Sequence[Any]], tuple[Any, ...]]

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Run:
        """Of parameters each of which `Span.is_followed_by` the next."""
        first, last = spans[0], spans[-1]
        gradients = [span.gradient for span in spans if span.gradient is not None]
        return cls(
            params=tuple(span.param.sharded for span in spans),
            offsets=tuple(span.start - first.start for span in spans),
            start=first.start,
            gradient_start=gradients[0].start,
            numel=last.start + last.numel - first.start,
            _memory=SpanMemory(first),
            _pick=operator.itemgetter(*(each.position for each in gradients)),
        )

    def is_laid_out_anew(self) -> bool:
        """Whether the parameters lie on other memory now."""
        return self._memory.now() is None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(numel,) of the shard buffer, and of the gradients (None if there is none at all); None: no longer a run.

        The latter if the parameters have moved, or some of their gradients are missing or lie elsewhere.
        """
        memory = self._memory.now()
        if memory is None:
            return None
        buffers, delivered = memory
        try:
            moved = not all(map(operator.is_, map(_torch.local_of, self.params), map(_known_local_of, self.params)))
        except AttributeError:  # unwrapped
            return None
        if moved:
            return None
        shard = buffers.shard_slice(self.start, self.numel)
        found = list(map(_gradient_of, self.params))
        if delivered is not None and all(map(operator.is_, found, self._pick(delivered.gradients))):
            return shard, delivered.flat[self.gradient_start : self.gradient_start + self.numel]
        if all(gradient is None for gradient in found):
            return shard, None
        return None


def _spans_of(parameters: Iterable[tuple[torch.Tensor, int]]) -> Iterator[tuple[Span, int]]:
    """Of those of ``parameters`` that lie in buffers and have a gradient there."""
    known: dict[Any, dict[FSDPParam, Span]] = {}
    for parameter, unit in parameters:
        owner = fsdp_param_of(parameter)
        if owner is None or owner.group is None or owner.local is not _torch.local_of(parameter):
            continue
        if owner.group not in known:
            known[owner.group] = {span.param: span for span in spans(owner.group)}
        span = known[owner.group].get(owner)
        if span is not None and span.is_here and span.has_gradient_alike():
            yield span, unit


def runs_of(parameters: Iterable[tuple[torch.Tensor, int]], agreement: Callable[[torch.Tensor], object]) -> list[Run]:
    """The longest runs among ``parameters`` whose gradients lie on the buffers now.

    Args:
        parameters: of one parameter group of an optimizer. With each, of what the bytes from the first of its run to it
            must be a multiple.
        agreement: equal for those that may be stepped as one.
    """
    found: dict[object, list[tuple[Span, int]]] = {}
    for span, unit in _spans_of(parameters):
        found.setdefault(span.buffers, []).append((span, unit))
    runs: list[list[Span]] = []
    before: object = None
    for each in found.values():
        for span, unit in sorted(each, key=lambda pair: pair[0].start):
            agrees = agreement(span.param.sharded)
            if runs and _goes_on(runs[-1], span, unit) and agrees == before:
                runs[-1].append(span)
            else:
                runs.append([span])
            before = agrees
    return [Run.of(each) for each in runs if len(each) > 1]


def _goes_on(run: Sequence[Span], span: Span, unit: int) -> bool:
    distance = (span.start - run[0].start) * span.buffers.shard.itemsize
    return run[-1].is_followed_by(span) and distance % unit == 0
