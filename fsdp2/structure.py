"""Module trees: what modules are called below a root, and `Structure`, which notices at next to no cost what was added.

Knows modules, nothing of sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn


def module_paths(roots: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """All modules below ``roots``, in order, with their names there: "" of the roots themselves."""
    paths: dict[nn.Module, str] = {}
    for root in roots:
        for path, module in root.named_modules():
            paths.setdefault(module, path)
    return paths


class Structure:
    """The submodules below some modules, and how many parameters each of them has, as they were at construction.

    `has_changed` runs once per iteration: some list operations in C, no walk of the module tree.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        parameter_slots: list[dict[str, Any]] = [module._parameters for module in modules]
        self._vacant = [(slots, name) for slots in parameter_slots for name in slots if slots[name] is None]
        # Modules without submodules are many, and only counted.
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
