"""Casts around a unit's forward, of buffers, and around modules that compute in their own dtype."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``, in tuples, lists, sets, dicts and dataclasses too.

    What holds tensors is replaced only if a tensor in it is cast: else what a module writes into it is not lost.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_fields(value, dtype)
    if isinstance(value, (set, frozenset)):
        members = [(each, cast_inputs(each, dtype)) for each in value]
        return value if all(new is old for old, new in members) else type(value)(new for _, new in members)
    if isinstance(value, (tuple, list)):
        items = [cast_inputs(each, dtype) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        made = {key: cast_inputs(each, dtype) for key, each in value.items()}
        if all(made[key] is value[key] for key in value):
            return value
        copied = value.copy()
        for key, each in made.items():
            copied[key] = each  # some that are derived from dict, as transformers' outputs, refuse `update`
        return copied
    return value


def _cast_fields(value: Any, dtype: torch.dtype) -> Any:
    """A copy of a dataclass with the fields cast; itself, if nothing is. Fields may be no arguments, or frozen."""
    held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)}
    made = {name: cast_inputs(each, dtype) for name, each in held.items()}
    if all(made[name] is held[name] for name in held):
        return value
    copied = copy.copy(value)
    if isinstance(copied, dict):  # its items are its fields
        for name in copied.keys() & made.keys():
            copied[name] = made[name]
    for name, each in made.items():
        if each is not held[name]:
            object.__setattr__(copied, name, each)
    return copied


def _first_dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, torch.Tensor):
        return value.dtype if value.is_floating_point() else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    elif isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list, set, frozenset)):
        return None
    return next((dtype for dtype in map(_first_dtype, value) if dtype is not None), None)


def _widen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    module._fsdp1_came_in = _first_dtype((args, kwargs))  # type: ignore[assignment]
    return cast_inputs(args, torch.float32), cast_inputs(kwargs, torch.float32)


def _narrow(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    dtype: Any = module._fsdp1_came_in
    return output if dtype is None else cast_inputs(output, dtype)


def compute_in_own_dtype(modules: Iterable[nn.Module]) -> None:
    """Let ``modules`` compute in float32, and return what they would have: what comes in decides."""
    for module in modules:
        if not computes_in_own_dtype(module):
            module._fsdp1_came_in = None  # type: ignore[assignment]
            module.register_forward_pre_hook(_widen, prepend=False, with_kwargs=True)
            module.register_forward_hook(_narrow, prepend=False)


def computes_in_own_dtype(module: nn.Module) -> bool:
    """Whether `compute_in_own_dtype` was called with it."""
    return hasattr(module, "_fsdp1_came_in")


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype) -> dict[tuple[nn.Module, str], torch.dtype]:
    """Let the floating-point buffers of ``modules`` be of ``dtype`` from now on; the dtypes of before, by place.

    Not of modules that compute in their own dtype.
    """
    before: dict[tuple[nn.Module, str], torch.dtype] = {}
    for module in modules:
        if computes_in_own_dtype(module):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                # Of one that several modules share, and another unit has cast, the dtype of before that.
                before[module, name] = vars(buffer).setdefault("_fsdp1_dtype", buffer.dtype)
                set_buffer(module, name, buffer.to(dtype))
    return before


def set_buffer(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Let a buffer have ``value``, of another dtype or on another device, and stay the object that others share."""
    buffer = module._buffers[name]
    if type(buffer) is torch.Tensor and type(value) is torch.Tensor:
        buffer.data = value
    else:
        module._buffers[name] = value
