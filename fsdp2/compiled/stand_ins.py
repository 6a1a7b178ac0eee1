"""Parameters and gradients as Dynamo sees them while it makes a graph.

It makes fake tensors of all parameters that it comes by, and of their gradients. Up to torch 2.14 it cannot make one of
a DTensor whose own storage offset is not that of its local tensor: ours lie at an offset in the buffer that they share,
below wrappers that lie at none, so that they can be saved. While a graph is made, wrappers with the offset of their
local tensor stand in for them: as ``.grad`` of the same parameters, and, of unsharded parameters under tensor
parallelism whose hooks are outside of the graph, in the modules. Graphs run on the gradients and parameters themselves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch, _torch_compiler
from fsdp2.params.param import FSDPParam
from fsdp2.plan.ragged import dtensor_over
from fsdp2.runtime.param_group import FSDPParamGroup

_groups: tuple[weakref.ref[FSDPParamGroup], ...] = ()
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_replaced: list[Callable[[], None]] = []


def stand_in_for_groups(groups: Iterable[FSDPParamGroup]) -> None:
    """In graphs made from now on, for tensors of ``groups``: of the compiled module whose call begins."""
    global _groups
    _groups = tuple(map(weakref.ref, groups))
    _torch_compiler.around_compilations(_stand_in, _give_back)


def stand_in_for_optimizer(optimizer: Optimizer) -> None:
    """In graphs made from now on, for gradients of the parameters of ``optimizer``, whose compiled step begins."""
    _optimizers.add(optimizer)
    _torch_compiler.around_compilations(_stand_in, _give_back)


def _stand_in(_: Any) -> None:
    groups = [group for reference in _groups if (group := reference()) is not None]
    for param in (param for group in groups for param in group.params):
        _stand_in_for_gradient(param.sharded)
        _stand_in_for_unsharded(param)
    for optimizer in _optimizers:
        for param_group in optimizer.param_groups:
            for parameter in param_group["params"]:
                _stand_in_for_gradient(parameter)


def _stand_in_for_gradient(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and _lies_elsewhere(gradient):
        _replaced.append(functools.partial(setattr, parameter, "grad", gradient))
        parameter.grad = _at_offset(gradient)


def _stand_in_for_unsharded(param: FSDPParam) -> None:
    unsharded = param.unsharded
    if unsharded is None or not _lies_elsewhere(unsharded):
        return
    stand_in = nn.Parameter(_at_offset(unsharded), requires_grad=unsharded.requires_grad)
    for module, name in param.uses:
        registered = module._parameters
        if registered.get(name) is unsharded:
            _replaced.append(functools.partial(registered.__setitem__, name, unsharded))
            registered[name] = stand_in


def _lies_elsewhere(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and bool(tensor.storage_offset() != _torch.local_of(tensor).storage_offset())


def _at_offset(tensor: Any) -> DTensor:
    return dtensor_over(_torch.local_of(tensor), _torch.spec_of(tensor))


def _give_back(_: Any) -> None:
    while _replaced:
        _replaced.pop()()
