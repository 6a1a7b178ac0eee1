"""Where parameters are registered in modules, and how to put another one there."""

from __future__ import annotations

from typing import Any

from torch import nn


class _SetattrSlots:
    """Stands in for ``module._parameters`` where the module's class has a ``__setattr__`` of its own.

    `nn.RNNBase` for one keeps a second list of its parameters, which only its ``__setattr__`` updates.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __setitem__(self, name: str, parameter: nn.Parameter) -> None:
        setattr(self._module, name, parameter)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._module._parameters[name]

    def get(self, name: str) -> nn.Parameter | None:
        """The registered parameter, or None."""
        return self._module._parameters.get(name)


Registration = tuple[Any, str]
"""A mapping of registered parameters (``module._parameters`` or its stand-in) and the name in it."""


def registration(module: nn.Module, name: str) -> Registration:
    """Where to write a parameter so that ``module`` uses it under ``name``."""
    plain = type(module).__setattr__ is nn.Module.__setattr__
    return (module._parameters if plain else _SetattrSlots(module), name)
