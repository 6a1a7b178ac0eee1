"""How one sharded module is copied and pickled: by its original class, with its state at rest. See `states`."""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp2 import _torch
from fsdp2.core.functions import gather_around
from fsdp2.core.hooks import STATE
from fsdp2.core.module import COMPLETED, ON_SHARDING, REDUCED, mix_in, new_sharded
from fsdp2.core.options import GroupSettings, RootSettings
from fsdp2.core.plan import fingerprint
from fsdp2.core.sharding import Partition
from fsdp2.core.state import FSDPState, ShardArguments, state_of
from fsdp2.errors import FSDPNotImplementedError
from fsdp2.features.copies.meshes import MeshRecord
from fsdp2.features.copies.predecessors import link_copies
from fsdp2.features.copies.states import PICKLED, GroupFacts, complete_copies, rest_for_copy


def _state(module: Any) -> FSDPState:
    state = state_of(module)
    assert state is not None, "of a sharded module"
    return state


class _Attributes(dict[str, Any]):
    """The attributes of a module that is copied or pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        for group in self[STATE].unit:
            for param in group.params:
                spec = _torch.spec_of(param.sharded)
                memo[id(spec)], memo[id(spec.mesh)] = spec, spec.mesh  # which copies have in common
        copied = copy.deepcopy(dict(self), memo)
        link_copies(memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """As a plain dict."""
        return dict, (), None, None, iter(self.items())


def reduced(module: Any, original: type, reduce: Callable[[int], Any], protocol: int) -> tuple[Any, ...]:
    """What ``module`` is pickled as, whose class was ``original``; ``reduce`` is that class's own way.

    Raises:
        FSDPNotImplementedError: that class does not leave it to Python how an instance is made.
    """
    rest_for_copy(_state(module))
    how = reduce(max(2, protocol))
    if isinstance(how, str) or how[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        raise FSDPNotImplementedError(
            f"{original.__name__} says itself how it is pickled, and knows nothing of sharding; save its state_dict() "
            "instead."
        )
    attributes = _Attributes(how[2]) if type(how[2]) is dict else how[2]
    return made_again, (original, _format(), *how[1][1:]), attributes, *how[3:]


BY_PLACE = (Partition, ShardArguments, GroupSettings, RootSettings, MeshRecord, GroupFacts)
"""Whose values pickles keep by their place, without names: other fields would be taken for them."""


@functools.cache
def _format() -> str:
    """Stands for what pickles keep of a module's sharding, and how."""
    fields = [(kind.__name__, list(kind.__annotations__)) for kind in BY_PLACE]
    return str(fingerprint(str([*fields, *PICKLED])))


def made_again(original: type, written: str = "", *arguments: Any) -> nn.Module:
    """An instance of ``original``, of no attributes yet, with the class that `fully_shard` would give it.

    Raises:
        FSDPRuntimeError: what it is unpickled from has another format than is ``written`` here.
    """
    if written != _format():
        new_sharded(original)
    module: nn.Module = original.__new__(original, *arguments)
    mix_in(module)
    return module


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
        for action in ON_SHARDING:
            action()


REDUCED.fill(reduced)
COMPLETED.fill(completed)
