"""What a state hangs on the modules that it manages beside the hooks around forward: hooks for state dicts, marks.

Knows nothing of what states do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch


def on_real_parameters(action: Callable[..., None], *args: Any) -> None:
    """Run ``action`` on real parameters, although functorch may be transforming the forward around it."""
    if not _torch.functorch_is_active():
        action(*args)
    else:
        with _torch.without_functorch():
            action(*args)


STATE = "_fsdp_state"
"""The attribute of modules that is their state."""


class Settling(Protocol):
    """What the hooks call."""

    def quiesce(self, *, frees: bool) -> None:
        """Reshard, before the user's code looks at the parameters; not ``frees``: but for what a graph reads."""

    def adopt_replaced(self) -> None:
        """Take over parameters that were replaced."""


class StateDictHook:
    """Before state is saved or loaded it reshards, as unsharded parameters may be registered; after, it adopts.

    Attributes:
        state: whose parameters the module holds; None in a copy of a part of what was sharded.
        adopts: after loading; else before saving and loading.
    """

    __slots__ = ("adopts", "state")

    def __init__(self, state: Settling | None, adopts: bool) -> None:
        self.state = state
        self.adopts = adopts

    def __call__(self, *args: object) -> None:
        """Whatever the arguments are."""
        if self.state is not None:
            if self.adopts:
                self.state.adopt_replaced()
            else:
                self.state.quiesce(frees=False)


class ModuleHooks:
    """The hooks of one state on modules.

    Attributes:
        handles: by which all of them can be removed.
        hooks: those for state dicts.
        managed: the modules that are marked as managed.
        methods: of modules, that gather like forward: what was set on the module before, None if nothing was.
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
        """Let ``state`` know when state dicts of ``managed`` modules, which lie below ``modules``, come and go.

        ``take_rows``: a hook that puts rows in the place of whole values, before each of them is loaded.
        """
        quiesce, adopt = StateDictHook(state, adopts=False), StateDictHook(state, adopts=True)
        self.hooks = (quiesce, adopt)
        for module in managed:
            if module._parameters:
                self.handles.append(module.register_state_dict_pre_hook(quiesce))
                self.handles.append(module.register_load_state_dict_pre_hook(quiesce))
                self.handles.append(module.register_load_state_dict_pre_hook(take_rows))
        for module in modules:
            self.handles.append(module.register_load_state_dict_post_hook(adopt))
            self.handles.append(module.register_load_state_dict_pre_hook(take_rows))

    def mark(self, managed: Iterable[nn.Module]) -> None:
        """Set what torch.compile, and programs that ask whether a module is sharded, look for."""
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
