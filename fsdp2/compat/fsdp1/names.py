"""The names that wrappers put before those of a module, and names without them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

import fsdp2

WRAPPED = "_fsdp_wrapped_module"
"""Under which a wrapper holds its module, as torch's does: programs look for it in names."""

PREFIXES = (f"{WRAPPED}.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean(name: str) -> str:
    """``name`` as it is in the plain module."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def without_wrappers(name: str) -> str:
    """``name`` as ``named_parameters()`` of a wrapper has it: other libraries' prefixes stay."""
    return name.replace(PREFIXES[0], "")


def saved(name: str) -> str:
    """``name`` as it is in state dicts."""
    for prefix in PREFIXES[:2]:
        name = name.replace(prefix, "")
    return name


def cleaned(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """``named`` with names as they are in state dicts."""
    return ((saved(name), each) for name, each in named)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All names of all parameters at and below ``module``, those of ties included, without prefixes.

    The sharded ones, as an optimizer holds them, in the place of unsharded ones that are registered at the moment.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield clean(name), fsdp2.optim.model_parameters.at_rest(parameter)


class Inside:
    """What `torch.distributed.checkpoint.state_dict` asks a module for whose names differ from those of its state dict.

    It skips the names that are among the values, and looks for whatever ``get`` maps in the attribute of that name.
    """

    def get(self, name: str) -> str | None:
        """All of a wrapper's names are the module's."""
        return None if name == WRAPPED else WRAPPED

    def values(self) -> Collection[str]:
        """The wrapper's own."""
        return (WRAPPED,)
