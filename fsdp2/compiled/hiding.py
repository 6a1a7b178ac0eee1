"""Gradients are out of Dynamo's sight while it makes a graph, which reads none of them.

It would make fake tensors of all parameters it comes by, and of their gradients: of DTensors that lie at an offset in
the buffer that they share it cannot.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fsdp2 import _torch_compiler
from fsdp2.runtime.param_group import FSDPParamGroup

_called: tuple[weakref.ref[FSDPParamGroup], ...] = ()
_hidden: list[tuple[torch.Tensor, torch.Tensor]] = []


def hide_gradients_of(groups: Iterable[FSDPParamGroup]) -> None:
    """From now on, of ``groups``: those of the compiled module whose call begins."""
    global _called
    _called = tuple(map(weakref.ref, groups))
    _torch_compiler.around_compilations(_hide, _show)


def _hide(_: Any) -> None:
    for reference in _called:
        group = reference()
        for param in () if group is None else group.params:
            gradient = param.sharded.grad
            if gradient is not None:
                _hidden.append((param.sharded, gradient))
                param.sharded.grad = None


def _show(_: Any) -> None:
    while _hidden:
        parameter, gradient = _hidden.pop()
        parameter.grad = gradient
