"""Gradients as Dynamo sees them while it makes a graph.

It makes fake tensors of all parameters that it comes by, and of their gradients. Up to torch 2.14 it cannot make one of
a DTensor whose own storage offset is not that of its local tensor: ours lie at an offset in the buffer that they share,
below wrappers that lie at none, so that they can be saved. The graph of a model reads no gradient: while it is made they
are out of sight. That of an optimizer's step reads them: while it is made, wrappers with the offset stand in for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch, _torch_compiler
from fsdp2.plan.ragged import dtensor_over
from fsdp2.runtime.param_group import FSDPParamGroup

_called: tuple[weakref.ref[FSDPParamGroup], ...] = ()
_stepping: weakref.ref[Optimizer] | None = None
_hidden: list[tuple[torch.Tensor, torch.Tensor]] = []


def hide_gradients_of(groups: Iterable[FSDPParamGroup]) -> None:
    """From now on, of ``groups``: those of the compiled module whose call begins."""
    global _called
    _called = tuple(map(weakref.ref, groups))
    _torch_compiler.around_compilations(_hide, _show)


def show_gradients_of(optimizer: Optimizer) -> None:
    """Until `step_has_ended`: a compiled step of ``optimizer`` begins."""
    global _stepping
    _stepping = weakref.ref(optimizer)
    _torch_compiler.around_compilations(_hide, _show)


def step_has_ended() -> None:
    """Graphs that are made from now on are no optimizer's."""
    global _stepping
    _stepping = None


def _hide(_: Any) -> None:
    optimizer = None if _stepping is None else _stepping()
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _stand_in(parameter)
    for parameter in _called_parameters():
        if optimizer is None:
            _replace(parameter, None)
        else:
            _stand_in(parameter)


def _called_parameters() -> Iterator[torch.Tensor]:
    for reference in _called:
        group = reference()
        for param in () if group is None else group.params:
            yield param.sharded


def _stand_in(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        local = _torch.local_of(gradient)
        if gradient.storage_offset() != local.storage_offset():
            _replace(parameter, dtensor_over(local, _torch.spec_of(gradient)))


def _replace(parameter: torch.Tensor, by: torch.Tensor | None) -> None:
    if parameter.grad is not None:
        _hidden.append((parameter, parameter.grad))
        parameter.grad = by


def _show(_: Any) -> None:
    while _hidden:
        parameter, gradient = _hidden.pop()
        parameter.grad = gradient
