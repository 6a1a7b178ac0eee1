"""What parameters and buffers of a model are called in checkpoints: as in the model that nothing was wrapped around."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names of the only child of what is wrapped around modules: by torch.compile, activation checkpointing, FSDP1."""


@dataclass(frozen=True, slots=True)
class Names:
    """The parameters and buffers of a model by name, tied ones under each of theirs.

    Attributes:
        parameters: in the order of the model.
        buffers: persistent or not.
        transient: names of buffers that are not persistent.
        first: of each name the first name of the same object: itself, if nothing is tied.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    transient: frozenset[str]
    first: Mapping[str, str]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return {**self.parameters, **self.buffers}


def is_wrapped(model: nn.Module) -> bool:
    """Whether something was wrapped around modules, so that its own state dict may have other names."""
    return any(_passes(module, name) for module in model.modules() for name in module._modules)


def names_of(model: nn.Module) -> Names:
    """Those of ``model``."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    transient: set[str] = set()
    for prefix, module in _modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers[prefix + name] = buffer
                if name in module._non_persistent_buffers_set:
                    transient.add(prefix + name)
    firsts: dict[int, str] = {}
    first = {name: firsts.setdefault(id(each), name) for name, each in {**parameters, **buffers}.items()}
    return Names(parameters, buffers, frozenset(transient), first)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with each of its names, and a dot behind them."""
    queue: list[tuple[str, nn.Module]] = [("", model)]
    while queue:
        prefix, module = queue.pop()
        yield prefix, module
        found = []
        for name, child in module._modules.items():
            if child is not None:
                found.append((prefix if _passes(module, name) else f"{prefix}{name}.", child))
        queue += reversed(found)


def _passes(module: nn.Module, name: str) -> bool:
    """Whether ``module`` is wrapped around its child ``name``."""
    return name in _WRAPPERS or (name == "module" and isinstance(module, DistributedDataParallel))
