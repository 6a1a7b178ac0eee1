"""Copies of replaced parameters (predecessors), which lead to the copies of the parameters that replaced them.

An optimizer holds predecessors until its first step. Copied along with the model it must find the copied successors,
but `nn.Parameter` forgets its attributes when it is copied. So a predecessor has a ``__deepcopy__`` of its own, whose
copy leads to the copy of its successor: at once if that was copied before, as in ``deepcopy((model, optimizer))``, else
when a sharded module has been copied (`link_copies`). If none is, the copy has no successor: a plain module that is
copied while it is unsharded becomes a plain module. `is_orphan_copy` marks such a copy, and pickles of predecessors,
so that optimizers find out that they would train nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.param import PREDECESSOR_COPIER, mark_replaced, replacement_of
from fsdp2.core.sharding import dtensor_over
from fsdp2.errors import FSDPRuntimeError
from fsdp2.plugs.parameters.whole_tensors import former_of, note_former_sharding

_WAITING = "fsdp2: copies of predecessors, and the originals of their successors"


class CopyPredecessor:
    """The ``__deepcopy__`` of one predecessor. Copies and pickles of the predecessor do not take it along."""

    __slots__ = ("_predecessor",)

    def __init__(self, find: Callable[[], torch.Tensor | None]) -> None:
        self._predecessor = find

    def __call__(self, memo: dict[Any, Any]) -> torch.Tensor:
        predecessor = self._predecessor()
        if predecessor is None:
            raise FSDPRuntimeError(
                "an unsharded parameter cannot be copied once its model is gone; build optimizers on the "
                "sharded parameters: before the first forward, or after reshard()."
            )
        if id(predecessor) in memo:
            return memo[id(predecessor)]  # type: ignore[no-any-return]
        copied = _copied(predecessor, memo)
        former = former_of(predecessor)
        if former is not None:
            note_former_sharding(copied, former)
        copied._fsdp_successor = None  # type: ignore[attr-defined]
        successor = replacement_of(predecessor)
        if successor is not None:
            memo.setdefault(_WAITING, []).append((copied, successor))
            # A successor that was unwrapped since belongs to no group, so no sharded module will link its copy.
            if getattr(successor, "_fsdp_param", None) is None:
                copy.deepcopy(successor, memo)
        link_copies(memo)
        return copied

    def __reduce__(self) -> Any:
        """Become None in copies and pickles."""
        return type(None), ()


def _copied(predecessor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """A copy as its class makes it; on meta if it has no memory, as unsharded parameters after resharding."""
    local = predecessor
    if isinstance(predecessor, DTensor):
        local, spec = _torch.local_of(predecessor), _torch.spec_of(predecessor)
        memo[id(spec)], memo[id(spec.mesh)] = spec, spec.mesh  # copies share the spec and the mesh
    is_plain = type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta
    if is_plain and local.numel() and not local.untyped_storage().nbytes():
        nothing = torch.empty_like(local, device="meta", requires_grad=False)
        copied: torch.Tensor = nn.Parameter(nothing, requires_grad=predecessor.requires_grad)
        memo[id(predecessor)] = copied
        return copied
    if isinstance(predecessor, DTensor) and predecessor.storage_offset():  # torch cannot copy such a DTensor
        whole = dtensor_over(local.detach().clone(), _torch.spec_of(predecessor))
        copied = memo[id(predecessor)] = nn.Parameter(whole, requires_grad=predecessor.requires_grad)
        return copied
    copied = type(predecessor).__deepcopy__(predecessor, memo)  # type: ignore[attr-defined]
    copied.__dict__.pop("__deepcopy__", None)
    return copied


def link_copies(memo: dict[Any, Any]) -> None:
    """Lead copies of predecessors to their successors' copies that exist by now. ``memo``: that of ``deepcopy``."""
    waiting = memo.get(_WAITING)
    if waiting:
        memo[_WAITING] = [each for each in waiting if id(each[1]) not in memo]
        for copied, successor in waiting:
            if id(successor) in memo:
                mark_replaced(copied, memo[id(successor)])


PREDECESSOR_COPIER.fill(CopyPredecessor)
