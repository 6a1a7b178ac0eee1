"""Hooks into autograd, and walking trees of tensors.

Owns no state: callers pass what is to be called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


class _PostBackward(torch.autograd.Function):
    """Identity whose backward runs when everything that was computed from its inputs has been differentiated.

    Autograd runs nodes that were created later first, and gradient accumulation before all others; so by then
    the gradients of a module that was called on these inputs have been accumulated.
    """

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.callback()
        return (None, *gradients)


def _differentiable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def collect_tensors(tree: object, keep: Callable[[object], bool] = _differentiable) -> list[torch.Tensor]:
    """All tensors in ``tree`` that ``keep`` accepts, by default those that require a gradient, in order.

    Looks into lists, tuples, mappings and dataclass instances.
    """
    found: list[torch.Tensor] = []
    _collect(tree, keep, found)
    return found


def _collect(tree: object, keep: Callable[[object], bool], found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        if keep(tree):
            found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, keep, found)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            _collect(item, keep, found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for entry in dataclasses.fields(tree):
            _collect(getattr(tree, entry.name), keep, found)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced by ``function`` of it; containers are rebuilt in their own type."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        items = [map_tensors(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, list):
        return type(tree)(map_tensors(function, item) for item in tree)
    if isinstance(tree, dict):
        copy = tree.copy()
        for key, item in tree.items():
            copy[key] = map_tensors(function, item)
        return copy
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {entry.name: map_tensors(function, getattr(tree, entry.name)) for entry in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **{key: value for key, value in changes.items() if _is_init(tree, key)})
    return tree


def _is_init(tree: Any, name: str) -> bool:
    return any(entry.init for entry in dataclasses.fields(tree) if entry.name == name)


def after_backward_of_inputs(
    callback: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arrange that ``callback`` runs in backward once all that is computed from these inputs is differentiated.

    Returns:
        The inputs to use instead, or None if none of them requires a gradient (then nothing was arranged).
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # most modules
        return (_PostBackward.apply(callback, args[0]), kwargs) if args[0].requires_grad else None
    inputs = collect_tensors((args, kwargs))
    if not inputs:
        return None
    outputs = iter(_PostBackward.apply(callback, *inputs))
    return map_tensors(lambda tensor: next(outputs) if tensor.requires_grad else tensor, (args, kwargs))  # type: ignore[no-any-return]


def before_backward_of_outputs(callback: Callable[[torch.Tensor], None], outputs: object) -> None:
    """Arrange that ``callback`` runs in backward as soon as the gradient of any of ``outputs`` arrives."""
    if isinstance(outputs, torch.Tensor):
        if outputs.requires_grad:
            outputs.register_hook(callback)
        return
    for tensor in collect_tensors(outputs):
        tensor.register_hook(callback)
