"""Deep copies of a sharded module: its original class copies it, while its parameters are sharded. See `states`."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from fsdp2 import _torch
from fsdp2.api.calls import gather_around
from fsdp2.api.installed import install_once
from fsdp2.core.hooks import STATE
from fsdp2.core.state import FSDPState, state_of
from fsdp2.errors import FSDPNotImplementedError
from fsdp2.plugs.states.copies.predecessors import link_copies
from fsdp2.plugs.states.copies.states import complete_copies, rest_for_copy


def _state(module: Any) -> FSDPState:
    state = state_of(module)
    assert state is not None, "of a sharded module"
    return state


class _Attributes(dict[str, Any]):
    """The attributes of a module that is copied. Their copies share DTensor specs and meshes with the originals."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        for group in self[STATE].unit:
            for param in group.params:
                spec = _torch.spec_of(param.sharded)
                memo[id(spec)], memo[id(spec.mesh)] = spec, spec.mesh  # deepcopy takes these as copied already
        copied = copy.deepcopy(dict(self), memo)
        link_copies(memo)
        return copied


class _MadeAgain:
    """Makes an instance of ``original`` without attributes, to which ``mix_in`` gives the class of sharded modules.

    `copy.deepcopy` calls it. A pickle of a module begins with this object, and fails here, since process groups cannot
    be pickled.
    """

    def __init__(self, original: type, mix_in: Callable[[nn.Module], None]) -> None:
        self._original = original
        self._mix_in = mix_in

    def __call__(self, cls: type, *arguments: Any) -> nn.Module:
        module: nn.Module = self._original.__new__(self._original, *arguments)
        self._mix_in(module)
        return module

    def __reduce__(self) -> NoReturn:
        raise FSDPNotImplementedError(
            f"a sharded {self._original.__name__} cannot be pickled, nor saved by torch.save(model): save its "
            "state_dict(), or use fsdp2.checkpoint.save() (or torch.distributed.checkpoint), and load that into a "
            "model that fully_shard was called on."
        )


def reduced(
    module: Any, original: type, reduce: Callable[[int], Any], protocol: int, mix_in: Callable[[nn.Module], None]
) -> tuple[Any, ...]:
    """The value of ``__reduce_ex__`` by which ``module``, whose class was ``original``, is copied.

    ``reduce`` is the ``__reduce_ex__`` of that class. ``mix_in`` gives the copy the class that `fully_shard` would.

    Raises:
        FSDPNotImplementedError: the original class makes its copies in a way of its own.
    """
    rest_for_copy(_state(module))
    how = reduce(max(2, protocol))
    if isinstance(how, str) or how[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        raise FSDPNotImplementedError(
            f"{original.__name__} says itself how it is copied, and knows nothing of sharding; copy the module before "
            "fully_shard, or load its state_dict() into a second one."
        )
    attributes = _Attributes(how[2]) if type(how[2]) is dict else how[2]
    return _MadeAgain(original, mix_in), how[1], attributes, *how[3:]


def completed() -> None:
    """A copied module has its attributes now: complete the states that waited for it, also those with tied weights."""
    for state in complete_copies():
        # Methods that gather were copied with a reference to the original module, or not at all: make them anew.
        for (module, name), before in state.module_hooks.methods.items():
            module.__dict__.pop(name, None)
            if before is not None:
                module.__dict__[name] = before
            gather_around(module, name)
        for module in state.modules:
            _torch.map_state(module, state)
        install_once()
