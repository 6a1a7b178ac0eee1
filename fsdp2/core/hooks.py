"""What a state hangs on its modules beside the hooks around forward: hooks for state dicts, and marks.

This file knows nothing of what states do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch


def on_real_parameters(action: Callable[..., None], *args: Any) -> None:
    """Run ``action`` outside of functorch's transforms, which may be wrapping the tensors of the forward around it."""
    if not _torch.functorch_is_active():
        action(*args)
    else:
        with _torch.without_functorch():
            action(*args)


STATE = "_fsdp_state"
"""The attribute of a module that holds its state."""


class Settling(Protocol):
    """What the hooks call."""

    def quiesce(self, *, frees: bool) -> None:
        """Reshard, before the user's code looks at the parameters. Not ``frees``: values that a graph reads stay."""

    def adopt_replaced(self) -> None:
        """Take over parameters that the user has replaced in the modules."""


class StateDictHook:
    """A hook around state dicts: it reshards before saving and loading, or adopts replaced parameters after loading.

    Attributes:
        state: the state whose parameters the module holds; None in a copy of a part of a sharded model.
        adopts: it runs after loading, and adopts. Else it runs before saving and loading, and reshards.
    """

    __slots__ = ("adopts", "state")

    def __init__(self, state: Settling | None, adopts: bool) -> None:
        self.state = state
        self.adopts = adopts

    def __call__(self, *args: object) -> None:
        """Tell the state. Arguments differ between kinds of hooks, and are ignored."""
        if self.state is not None:
            if self.adopts:
                self.state.adopt_replaced()
            else:
                self.state.quiesce(frees=False)


class ModuleHooks:
    """The hooks of one state on modules.

    Attributes:
        handles: removes all of them.
        hooks: the hooks for state dicts.
        managed: the modules that are marked as managed.
        methods: by module and name, what a method that gathers like forward has replaced in the module's ``__dict__``;
            None if there was nothing.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.hooks: tuple[StateDictHook, ...] = ()
        self.managed: tuple[nn.Module, ...] = ()
        self.methods: dict[tuple[nn.Module, str], Any] = {}

    def handle_state_dicts(
        self,
        state: Settling,
        modules: Iterable[nn.Module],
        managed: Iterable[nn.Module],
        take_rows: Callable[..., None],
    ) -> None:
        """Call ``state`` around saving and loading of ``managed`` modules, which are ``modules`` or lie below them.

        ``take_rows``: a hook that cuts full values of a state dict to this rank's rows before they are loaded.
        """
        quiesce, adopt = StateDictHook(state, adopts=False), StateDictHook(state, adopts=True)
        self.hooks = (quiesce, adopt)
        for module in managed:
            if module._parameters and not isinstance(module, torch.jit.ScriptModule):  # it has no parameter of ours
                self.handles.append(module.register_state_dict_pre_hook(quiesce))
                self.handles.append(module.register_load_state_dict_pre_hook(quiesce))
                self.handles.append(module.register_load_state_dict_pre_hook(take_rows))
        for module in modules:
            self.handles.append(module.register_load_state_dict_post_hook(adopt))
            self.handles.append(module.register_load_state_dict_pre_hook(take_rows))

    def mark(self, managed: Iterable[nn.Module]) -> None:
        """Set the attributes by which torch.compile and programs recognize a sharded module."""
        self.managed = tuple(managed)
        for module in self.managed:
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
            module._fsdp_use_orig_params = True  # type: ignore[assignment]

    def detach(self) -> None:
        """Take everything off the modules."""
        for handle in self.handles:
            handle.remove()
        for (module, name), before in self.methods.items():
            module.__dict__.pop(name, None)
            if before is not None:
                module.__dict__[name] = before
        for module in self.managed:
            module.__dict__.pop("_is_fsdp_managed_module", None)
            module.__dict__.pop("_fsdp_use_orig_params", None)
