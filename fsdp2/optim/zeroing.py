"""Lets ``zero_grad`` of models and optimizers drop gradients that are not in ``.grad`` yet, too.

In plain PyTorch everything that backwards have computed is in ``.grad``. Here gradients of microbatches without
communication wait on unsharded parameters, those that stopped before their all-reduce wait in a buffer, and others are
on their way or add up on the host. A program that gives an accumulation up (its loss or its loader raised) calls
``zero_grad`` and begins again: what waits must be gone then.

The memory of delivered gradients goes, too, if nobody has one any more. It is used again step by step, and would
otherwise stay until the next forward frees it.

``torch.optim.Optimizer.zero_grad`` and ``torch.nn.Module.zero_grad`` have no hooks, so the first `fully_shard` wraps
both: optimizers know nothing of groups, and a model may be a plain module around sharded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup, free_cleared_gradients
from fsdp2.core.param import FSDPParam, fsdp_param_of, replacement_of
from fsdp2.core.reduce import GradientReducer


def install() -> list[_torch.Undo]:
    """Wrap ``zero_grad`` of optimizers and modules so that it drops gradients that wait."""
    return [_torch.around_zero_grad(Optimizer, _of_optimizers), _torch.around_zero_grad(nn.Module, _of_modules)]


def clear_waiting(parameters: Iterable[torch.Tensor], set_to_none: bool) -> Callable[[], None]:
    """Drop the gradients of ``parameters`` that wait anywhere but in their ``.grad``; or make them zeros.

    Args:
        parameters: sharded ones. Predecessors and unsharded ones stand for the sharded ones that replaced them, whose
            ``.grad`` is cleared too. Others are passed over.
        set_to_none: the argument of ``zero_grad``.

    No communication; reductions in flight are waited for.

    Returns:
        A function to call once ``.grad`` is cleared: it frees the memory of gradients, unless somebody holds one.
    """
    groups: dict[FSDPParamGroup, set[FSDPParam] | None] = {}  # by group, its parameters; None: nothing of it waits
    unseen: list[torch.Tensor] = []  # sharded parameters whose ``.grad`` the caller does not clear itself
    for parameter in parameters:
        owner = fsdp_param_of(parameter)
        if owner is None:
            successor = replacement_of(parameter)
            owner = None if successor is None else fsdp_param_of(successor)
            if owner is None:
                continue
            unseen.append(owner.sharded)
        group = owner.group
        if group in groups:
            waiting = groups[group]
        elif group is None:
            continue
        else:
            waiting = groups[group] = set() if group.reducer in GradientReducer.owing else None
        if waiting is not None:
            waiting.add(owner)
    for group, waiting in groups.items():
        if waiting is not None:
            group.clear_waiting(waiting, set_to_none)
    for sharded in unseen:
        if sharded.grad is not None and set_to_none:
            sharded.grad = None
        elif sharded.grad is not None:
            sharded.grad.zero_()

    return partial(free_cleared_gradients, groups) if set_to_none else _nothing


def _nothing() -> None:
    pass


def _of_optimizers(optimizer: Any, set_to_none: bool) -> Callable[[], None]:
    return clear_waiting((each for group in optimizer.param_groups for each in group["params"]), set_to_none)


def _of_modules(module: Any, set_to_none: bool) -> Callable[[], None]:
    return clear_waiting(module.parameters(), set_to_none)
