"""What modules hold of parameters beside registering them: in lists, dicts and attributes, as views, as shared memory.

Unless they are registered, or refused, a forward would compute with values of before, and gradients would go nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.core.param import Registration
from fsdp2.errors import FSDPValueError

_LONGEST = 1_000
"""Longer lists and dicts are data."""


class _Place:
    """A place in a list, a dict or a module's attributes, as a mapping in which one parameter is registered.

    The program may write something else there, or take it out: that is left to it.
    """

    __slots__ = ("_holder", "_key", "_parameter")

    def __init__(self, holder: Any, key: Any, parameter: nn.Parameter) -> None:
        self._holder, self._key, self._parameter = holder, key, parameter

    def __setitem__(self, name: str, parameter: nn.Parameter) -> None:
        before, self._parameter = self._parameter, parameter
        with contextlib.suppress(LookupError):  # the list is shorter by now, the dict has no such key
            if self._holder[self._key] is before:
                self._holder[self._key] = parameter

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._parameter

    def get(self, name: str) -> nn.Parameter:
        """What was registered last."""
        return self._parameter


def registered_outside(
    modules: Iterable[nn.Module], names: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, list[Registration]]:
    """Where ``modules`` keep parameters of these ``names`` in a plain attribute, or in a list or dict that is one.

    Raises:
        FSDPValueError: one keeps a view of a parameter; or two parameters lie in the same memory.
    """
    _refuse_shared_memory(names)
    found: dict[nn.Parameter, list[Registration]] = {}
    for module in modules:
        own = (module._parameters, module._buffers, module._modules)
        holder: Any
        kept: Iterable[tuple[Any, Any]]
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                holder, kept = vars(module), [(name, value)]
            elif type(value) is list and len(value) <= _LONGEST:
                holder, kept = value, enumerate(value)
            elif type(value) is dict and len(value) <= _LONGEST and not any(value is each for each in own):
                holder, kept = value, value.items()
            else:
                continue
            for key, each in kept:
                if not isinstance(each, torch.Tensor):
                    continue
                if isinstance(each._base, nn.Parameter) and each._base in names:
                    raise FSDPValueError(
                        f"{type(module).__name__} keeps a view of parameter '{names[each._base]}' in its attribute "
                        f"'{name}', which would have the values of before for ever: make the view in forward."
                    )
                if isinstance(each, nn.Parameter) and each in names:
                    found.setdefault(each, []).append((_Place(holder, key, each), name))
    return found


def _refuse_shared_memory(names: Mapping[nn.Parameter, str]) -> None:
    """Refuse two parameters that are trained and lie in the same memory, which shards would not."""
    lying: dict[tuple[int, int], str] = {}
    for parameter, name in names.items():
        storage = _torch.storage_of(parameter)
        if not storage or not parameter.numel() or not parameter.requires_grad:
            continue
        other = lying.setdefault((storage, int(_torch.plain_of(parameter).storage_offset())), name)
        if other != name:
            raise FSDPValueError(
                f"parameters '{other}' and '{name}' are two, and share their memory, which their shards will not: tie "
                "them by registering one of them in both places (module.weight = other.weight) before fully_shard."
            )
