"""Gradients as Dynamo sees them while it makes a graph.

It makes fake tensors of all parameters that it comes by, and of their gradients. Up to torch 2.14 it cannot make one of
a DTensor whose own storage offset is not that of its local tensor: ours lie at an offset in the buffer that they share,
below wrappers that lie at none, so that they can be saved. While a graph is made, wrappers with the offset of their
local tensor stand in for them, as ``.grad`` of the same parameters. Graphs run on the gradients themselves.
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

_groups: tuple[weakref.ref[FSDPParamGroup], ...] = ()
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_replaced: list[tuple[torch.Tensor, torch.Tensor]] = []


def trace_gradients_of_groups(groups: Iterable[FSDPParamGroup]) -> None:
    """From now on, let Dynamo come by those of ``groups``: of the compiled module whose call begins."""
    global _groups
    _groups = tuple(map(weakref.ref, groups))
    _torch_compiler.around_compilations(_stand_in, _give_back)


def trace_gradients_of_optimizer(optimizer: Optimizer) -> None:
    """From now on, let Dynamo come by those of the parameters of ``optimizer``, whose compiled step begins."""
    _optimizers.add(optimizer)
    _torch_compiler.around_compilations(_stand_in, _give_back)


def _parameters() -> Iterator[torch.Tensor]:
    for reference in _groups:
        group = reference()
        for param in () if group is None else group.params:
            yield param.sharded
    for optimizer in _optimizers:
        for param_group in optimizer.param_groups:
            yield from param_group["params"]


def _stand_in(_: Any) -> None:
    for parameter in _parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            local = _torch.local_of(gradient)
            if gradient.storage_offset() != local.storage_offset():
                _replaced.append((parameter, gradient))
                parameter.grad = dtensor_over(local, _torch.spec_of(gradient))


def _give_back(_: Any) -> None:
    while _replaced:
        parameter, gradient = _replaced.pop()
        parameter.grad = gradient
