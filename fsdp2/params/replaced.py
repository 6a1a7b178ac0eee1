"""Which parameter took the place of which: originals, unsharded and replaced parameters lead to the present ones.

Optimizers that were built on a predecessor find the sharded parameter by it. Knows links between parameters, nothing
of groups.

[Note: copies of predecessors]
    An optimizer holds predecessors until its first step. Copied along with the model it must find the copied
    successors, but `nn.Parameter` forgets its attributes when it is copied. So a predecessor has a ``__deepcopy__`` of
    its own, whose copy leads to the copy of its successor: at once if that was copied before, as by
    ``deepcopy((model, optimizer))``, else when a sharded module has been copied (`link_copies`). If none is, the copy
    has no successor: a plain module that is copied while it is unsharded becomes a plain module. It is marked as
    `is_orphan_copy`, as are pickles of predecessors, for optimizers to find out that they would train nothing.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.common import FSDPRuntimeError
from fsdp2.plan.dtensors import dtensor_over

Target = TypeVar("Target")


class Link(Generic[Target]):
    """A reference kept in a parameter's attributes, which does not travel with copies and pickles of that parameter."""

    __slots__ = ("target",)

    def __init__(self, target: Target) -> None:
        self.target = target

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copied as None."""

    def __reduce__(self) -> Any:
        """Pickled as None."""
        return type(None), ()


class _CopyPredecessor:
    """The ``__deepcopy__`` of one predecessor; see [Note: copies of predecessors]. Does not travel either."""

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
            if getattr(successor, "_fsdp_param", None) is None:  # of a module that is plain by now: nothing will tell
                copy.deepcopy(successor, memo)
        link_copies(memo)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copied as None."""

    def __reduce__(self) -> Any:
        """Pickled as None."""
        return type(None), ()


_WAITING = "fsdp2: copies of predecessors, and the originals of their successors"


def _copied(predecessor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """A copy as its class makes it; on meta if it has lost its memory, as unsharded parameters do."""
    local = predecessor
    if isinstance(predecessor, DTensor):
        local, spec = _torch.local_of(predecessor), _torch.spec_of(predecessor)
        memo[id(spec)], memo[id(spec.mesh)] = spec, spec.mesh  # which copies have in common
    is_plain = type(local) in (torch.Tensor, nn.Parameter) and not local.is_meta
    if is_plain and local.numel() and not local.untyped_storage().nbytes():
        nothing = torch.empty_like(local, device="meta", requires_grad=False)
        copied: torch.Tensor = nn.Parameter(nothing, requires_grad=predecessor.requires_grad)
        memo[id(predecessor)] = copied
        return copied
    if isinstance(predecessor, DTensor) and predecessor.storage_offset():  # as torch cannot copy it
        whole = dtensor_over(local.detach().clone(), _torch.spec_of(predecessor))
        copied = memo[id(predecessor)] = nn.Parameter(whole, requires_grad=predecessor.requires_grad)
        return copied
    copied = type(predecessor).__deepcopy__(predecessor, memo)  # type: ignore[attr-defined]
    copied.__dict__.pop("__deepcopy__", None)
    return copied


def link_copies(memo: dict[Any, Any]) -> None:
    """Lead copied predecessors to those of their successors that have been copied by now. ``memo``: of the copying."""
    waiting = memo.get(_WAITING)
    if waiting:
        memo[_WAITING] = [each for each in waiting if id(each[1]) not in memo]
        for copied, successor in waiting:
            if id(successor) in memo:
                mark_replaced(copied, memo[id(successor)])


def mark_replaced(
    predecessor: torch.Tensor, successor: nn.Parameter, *, find: Callable[[], torch.Tensor | None] | None = None
) -> None:
    """Note on ``predecessor`` that ``successor`` takes its place, for an optimizer that was built on it.

    ``find`` finds it while it comes and goes in modules: there must be no weak reference to it then, or it could not be
    swapped (`torch.utils.swap_tensors`, by which conversions may replace parameters), and no cycle, which would keep
    its memory. By default a weak reference does.
    """
    predecessor._fsdp_successor = Link(successor)  # type: ignore[attr-defined]
    predecessor.__deepcopy__ = _CopyPredecessor(find or weakref.ref(predecessor))  # type: ignore[method-assign]


def replacement_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """The parameter that took the place of ``parameter``: an original, an unsharded or a replaced one."""
    successor: nn.Parameter | None = None
    link: Link[nn.Parameter] | None = getattr(parameter, "_fsdp_successor", None)
    while link is not None:
        successor = link.target
        link = getattr(successor, "_fsdp_successor", None)
    return successor


def is_orphan_copy(parameter: torch.Tensor) -> bool:
    """Whether it is a copy or pickle of a predecessor, of which nothing leads to what took its place."""
    return getattr(parameter, "_fsdp_successor", parameter) is None


def note_former_sharding(parameter: torch.Tensor, former: object) -> None:
    """Note how ``parameter`` was sharded, which belongs to no group any more."""
    parameter._fsdp_former = Link(former)  # type: ignore[attr-defined]


def former_of(parameter: torch.Tensor) -> Any:
    """What `note_former_sharding` noted on ``parameter``, if it did."""
    link: Link[object] | None = getattr(parameter, "_fsdp_former", None)
    return None if link is None else link.target


OWN = ("_is_param", "_fsdp_param", "_fsdp_successor", "_fsdp_former", "share_memory_", "__deepcopy__", "__reduce_ex__")
"""Attributes of parameters that are not the user's."""
