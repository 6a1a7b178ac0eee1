"""How one sharded module is deep-copied: by its original class, with its state at rest. See `states`."""

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
    """The attributes of a module that is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        for group in self[STATE].unit:
            for param in group.params:
                spec = _torch.spec_of(param.sharded)
                memo[id(spec)], memo[id(spec.mesh)] = spec, spec.mesh  # which copies have in common
        copied = copy.deepcopy(dict(self), memo)
        link_copies(memo)
        return copied


class _MadeAgain:
    """Makes an instance of ``original``, of no attributes yet, to which ``mix_in`` gives the class of sharded ones.

    `copy.deepcopy` calls it. Pickles begin with it, and end there: a process group cannot be pickled.
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
    """What ``module`` is copied by, whose class was ``original``; ``reduce`` is that class's own way.

    ``mix_in`` gives a copy the class that `fully_shard` would.

    Raises:
        FSDPNotImplementedError: that class does not leave it to Python how an instance is made.
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
    """A module has got its attributes: states may be complete by that, its own and those of tied weights."""
    for state in complete_copies():
        for (module, name), before in state.module_hooks.methods.items():  # copied as the original's, or not at all
            module.__dict__.pop(name, None)
            if before is not None:
                module.__dict__[name] = before
            gather_around(module, name)
        for module in state.modules:
            _torch.map_state(module, state)
        install_once()
