"""`StepStateCache`: the state inside, kept from one step of a `fsdp2.optim.local` optimizer to the next.

Building it anew hashes every tensor, which is a sixth of what a step costs beyond the plain optimizer's own. But its
keys are local tensors, and an optimizer must not keep memory alive that its model has given up. So it is forgotten as
soon as a shard buffer is, and never kept for parameters that lie elsewhere.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2.core.buffers import DtypeBuffers
from fsdp2.core.param import fsdp_param_of
from fsdp2.core.spans import spans
from fsdp2.optim.step_targets import State


class StepStateCache:
    """Keeps one state, or none."""

    def __init__(self) -> None:
        self._kept: list[State] = []
        self._can_keep = True
        self._watched: list[weakref.ref[DtypeBuffers]] | None = None

    def take(self, tensors: Sequence[torch.Tensor]) -> State | None:
        """Take the kept state out, if its keys are ``tensors`` in this order; else None."""
        kept = self._kept.pop() if self._kept else None
        if kept is None or len(kept) != len(tensors) or not all(map(operator.is_, kept, tensors)):
            return None
        return kept

    def keep(self, state: State, param_groups: Sequence[dict[str, Any]]) -> None:
        """Keep ``state`` until it is taken, or a shard buffer below ``param_groups`` is dropped."""
        if self._watched is None or any(watched() is None for watched in self._watched):
            self._watch(parameter for group in param_groups for parameter in group["params"])
        if self._can_keep:
            self._kept[:] = [state]

    def _watch(self, params: Iterable[torch.Tensor]) -> None:
        # A weak reference calls its function when the buffer is dropped. The function holds the list, not this object.
        kept, buffers = self._kept, _buffers_below(params)
        self._can_keep = buffers is not None
        self._watched = [weakref.ref(each, lambda _: kept.clear()) for each in buffers or ()]


def _buffers_below(params: Iterable[torch.Tensor]) -> set[DtypeBuffers] | None:
    """The shard buffers that the sharded ones among ``params`` lie on; None if one of them lies elsewhere."""
    below: dict[Any, DtypeBuffers] = {}
    groups = set()
    for parameter in params:
        if not isinstance(parameter, DTensor):
            continue
        owner = fsdp_param_of(parameter)
        if owner is None or owner.group is None:
            return None
        if owner.group not in groups:
            groups.add(owner.group)
            below.update((span.param, span.buffers) for span in spans(owner.group))
        if owner not in below:
            return None
    return set(below.values())
