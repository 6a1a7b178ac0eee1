"""Module trees: names below a root, which modules have a forward, and `Structure`, which cheaply notices changes.

This file knows modules, and nothing of sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp2.errors import FSDPValueError


def module_paths(roots: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """All modules below ``roots``, in order, with their names there. The name of a root itself is ""."""
    paths: dict[nn.Module, str] = {}
    for root in roots:
        for path, module in root.named_modules():
            paths.setdefault(module, path)
    return paths


class Structure:
    """The submodules below some modules, and how many parameters each of them has, as they were at construction.

    `has_changed` runs once per iteration. It makes some list operations in C, and does not walk the module tree.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        every = dict.fromkeys(module for root in roots for module in root.modules())
        modules = [module for module in every if not isinstance(module, torch.jit.ScriptModule)]  # those cannot change
        parameter_slots: list[dict[str, Any]] = [module._parameters for module in modules]
        self._vacant = [(slots, name) for slots in parameter_slots for name in slots if slots[name] is None]
        # Most modules have no submodules: there it is enough to count them. Others may get a module replaced.
        self._parent_slots: list[dict[str, Any]] = [module._modules for module in modules if module._modules]
        self._children = self._current_children()
        leaf_slots: list[dict[str, Any]] = [module._modules for module in modules if not module._modules]
        self._counted = parameter_slots + leaf_slots
        self._count = sum(map(len, self._counted))

    def _current_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._parent_slots)))

    def has_changed(self) -> bool:
        """Whether a submodule was added, removed or replaced, or a parameter added or removed."""
        return (
            sum(map(len, self._counted)) != self._count
            or self._current_children() != self._children
            or any(slots.get(name) is not None for slots, name in self._vacant)
        )


NO_FORWARD = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
"""The ``forward`` functions of classes whose modules are not called."""


def has_forward(module: nn.Module) -> bool:
    """Whether calling ``module`` computes something, so that parameters can be gathered before."""
    return type(module).forward not in NO_FORWARD or "forward" in vars(module)


def refuse_container(module: nn.Module, caller: str) -> None:
    """Refuse a ``ModuleList`` or ``ModuleDict`` without forward.

    Raises:
        FSDPValueError: it is one.
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward in NO_FORWARD:
        raise FSDPValueError(
            f"{caller} cannot shard a {type(module).__name__}: it has no forward to gather parameters before. "
            "Call it on the modules inside, or on the module that contains it."
        )
