"""`Run`: sharded parameters that follow each other in memory, as their gradients do, so that one tensor holds them all.

The flat form of `fsdp2.optim.local` steps on runs. A run reads the buffers of groups but holds none of them, so an
optimizer keeps no memory alive that its model has given up.

[Note: padding that is stepped on]
Between the parameters of a run, and behind the last row of an uneven one, the shard buffer has elements that belong to
no parameter. They start as zeros, and their gradients are zeros (packed gradients bring zeros there; gradients that
travel alone form a run only if there is no gap between them). Whatever an optimizer makes of these elements, nothing
reads it: the all-gather brings them behind the last row of the unsharded parameter, or nowhere.
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
        offsets: for each, how many elements it lies behind the first.
        start: where the first begins in the shard buffer.
        gradient_start: where the first begins in the gradient buffer.
        numel: how many elements there are up to the end of the last.
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
        """The run of these parameters, for each of which `Span.is_followed_by` the next holds."""
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
        """(numel,) of the shard buffer, and of the gradients, which are None if no parameter has one.

        None: it is a run no longer, as parameters have moved, or some gradients are missing or lie elsewhere.
        """
        memory = self._memory.now()
        if memory is None:
            return None
        buffers, delivered = memory
        try:
            moved = not all(map(operator.is_, map(_torch.local_of, self.params), map(_known_local_of, self.params)))
        except AttributeError:  # a parameter was unwrapped
            return None
        if moved:
            return None
        shard = buffers.shard_slice(self.start, self.numel)
        found = list(map(_gradient_of, self.params))
        # Compared by identity: a gradient that the user has replaced or cleared does not lie on the buffer any more.
        if delivered is not None and all(map(operator.is_, found, self._pick(delivered.gradients))):
            return shard, delivered.flat[self.gradient_start : self.gradient_start + self.numel]
        if all(gradient is None for gradient in found):
            return shard, None
        return None


def _spans_of(parameters: Iterable[tuple[torch.Tensor, int]]) -> Iterator[tuple[Span, int]]:
    """The spans of those ``parameters`` that lie on shard buffers, and whose gradients are delivered to match."""
    known: dict[Any, dict[FSDPParam, Span]] = {}
    for parameter, unit in parameters:
        owner = fsdp_param_of(parameter)
        # Somebody may have put another local tensor into the parameter, which lies on no buffer.
        if owner is None or owner.group is None or owner.local is not _torch.local_of(parameter):
            continue
        if owner.group not in known:
            known[owner.group] = {span.param: span for span in spans(owner.group)}
        span = known[owner.group].get(owner)
        if span is not None and span.is_here and span.has_gradient_alike():
            yield span, unit


def runs_of(parameters: Iterable[tuple[torch.Tensor, int]], agreement: Callable[[torch.Tensor], object]) -> list[Run]:
    """The longest runs among ``parameters`` whose gradients lie on the gradient buffers now.

    Args:
        parameters: the parameters of one parameter group of an optimizer. The number beside each is an alignment: the
            bytes from the first parameter of its run to it must be a multiple of that.
        agreement: a function whose results are equal for parameters that may be stepped on as one.
    """
    found: dict[object, list[tuple[Span, int]]] = {}
    for span, unit in _spans_of(parameters):
        found.setdefault(span.buffers, []).append((span, unit))
    runs: list[list[Span]] = []
    before: object = None
    # Buffer by buffer, in memory order: a run ends before a parameter that is missing or does not agree.
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
