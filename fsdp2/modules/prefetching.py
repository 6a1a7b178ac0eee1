"""Those methods of `FSDPModule` that say what is gathered ahead; why they are functions, see `communicating`."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from fsdp2.arguments import ANYTHING, checked, shown
from fsdp2.common import FSDPRuntimeError, FSDPValueError
from fsdp2.runtime.root import Unit
from fsdp2.runtime.state import FSDPState, state_of


class Prefetching(Protocol):
    """What these methods need of a module."""

    def _get_fsdp_state(self) -> FSDPState:
        """The module's own."""


@checked(modules=ANYTHING)
def set_modules_to_forward_prefetch(self: Prefetching, modules: list[Any]) -> None:
    """Gather the parameters of ``modules`` in forward as soon as this module's have been.

    Takes the place of what is learned and gathered ahead by itself. With two or more the gathers run further
    ahead, for more memory. An empty list goes back to what is learned.

    Raises:
        FSDPValueError: not a list of sharded modules.
    """
    self._get_fsdp_state().forward_prefetch = _units(modules, "set_modules_to_forward_prefetch")


@checked(modules=ANYTHING)
def set_modules_to_backward_prefetch(self: Prefetching, modules: list[Any]) -> None:
    """The same as `set_modules_to_forward_prefetch`, in backward.

    Raises:
        FSDPValueError: not a list of sharded modules.
    """
    units = _units(modules, "set_modules_to_backward_prefetch")
    # The groups of a module are needed in reverse in backward.
    self._get_fsdp_state().backward_prefetch = units and tuple(unit[::-1] for unit in units)


@checked(nbytes=ANYTHING)
def set_prefetch_budget(self: Prefetching, nbytes: int | None) -> None:
    """How many bytes of unsharded parameters may be gathered ahead of the module that computes, in both directions.

    Units are gathered ahead in the order of the last iteration as long as all of them together stay within
    ``nbytes``: 0 gathers nothing ahead (where communication blocks, that saves a unit's memory and costs nothing),
    and two to three units' bytes keep a slow network busy behind modules of uneven cost. None, the default: one
    unit, whatever its size. Modules with a list of their own (`set_modules_to_forward_prefetch`) are not affected.
    Set it on the root, the same on all ranks, outside of forward and backward.

    Raises:
        FSDPValueError: neither None nor an int >= 0.
        FSDPRuntimeError: this module is not the root, or an iteration is running.
    """
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
        raise FSDPValueError(f"the prefetch budget must be a number of bytes >= 0 or None, got {nbytes!r}.")
    state = self._get_fsdp_state()
    root = state.root
    if root is not None and not state.is_root:
        raise FSDPRuntimeError(f"set_prefetch_budget() must be called on the root, {root.name}, not on '{state.name}'.")
    if root is not None and root.is_running():
        raise FSDPRuntimeError("set_prefetch_budget() must be called outside of forward and backward.")
    state.settings.prefetch_bytes = nbytes


def _units(modules: Any, method: str) -> tuple[Unit, ...] | None:
    """The units of ``modules``; None of an empty list.

    Raises:
        FSDPValueError: one of them is not sharded.
    """
    if not isinstance(modules, (list, tuple)):
        raise FSDPValueError(f"{method} takes a list of sharded modules, got {shown(modules)}.")
    units = []
    for module in modules:
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise FSDPValueError(
                f"{method} takes modules that fully_shard was called on, got a {type(module).__name__}."
            )
        units.append(state.unit)
    return tuple(units) or None
