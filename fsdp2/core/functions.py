"""Functions on modules that `fully_shard` was called on."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch import nn

from fsdp2.arguments import ANYTHING, checked, shown
from fsdp2.core.module import FSDPModule
from fsdp2.core.root import roots_of, share_context
from fsdp2.core.state import MISUSE, state_of
from fsdp2.errors import FSDPTypeError, FSDPValueError

# Methods of sharded modules that gather and reshard like ``forward``. Knows states, and no more of modules.


def gather_around(module: nn.Module, name: str) -> None:
    """Let the method ``name`` of ``module``, which is sharded, gather and reshard like ``forward``."""
    state = state_of(module)
    assert state is not None, "of a sharded module"
    method: Any = getattr(module, name)
    is_own = inspect.ismethod(method) and method.__self__ is module
    function: Any = method.__func__ if is_own else None

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        assert state is not None, "of a sharded module"
        try:
            state.calls += 1
            inputs = state.pre_forward(self, args, kwargs, method)
            args, kwargs = inputs or (args, kwargs)
            output = method(*args, **kwargs) if function is None else function(self, *args, **kwargs)
            cast = state.post_forward(self, args, output)
        except BaseException as error:
            state.forward_failed(self)
            explained = MISUSE.filling.explanation_of(error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            state.calls -= 1
        return output if cast is None else cast

    state.module_hooks.methods.setdefault((module, name), module.__dict__.get(name))
    module.__dict__[name] = types.MethodType(wrapped, module)


@checked(modules=ANYTHING)
def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline on this rank, share one communication context.

    They then share streams, so that memory does not fragment between them. Before or after their first forward, but not
    while anything is in flight.

    Raises:
        FSDPTypeError: not a list.
        FSDPValueError: one of ``modules`` is not sharded.
    """
    if not isinstance(modules, (list, tuple)):
        raise FSDPTypeError(f"share_comm_ctx takes a list of sharded modules, got {shown(modules)}.")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise FSDPValueError(
                f"share_comm_ctx takes modules that fully_shard was called on, got a {type(module).__name__}."
            )
    if modules:
        states = [module._get_fsdp_state() for module in modules]
        shared = states[0]._comm_ctx
        share_context(shared, roots_of(states))
        for state in states:
            state.shared_comm = shared


@checked()
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let the method ``method_name`` of ``module`` gather and reshard like ``forward``. Nothing to do if not sharded.

    The method may call the module itself: its parameters stay until the outermost call ends.

    Raises:
        FSDPTypeError: not a module, or not a name.
        FSDPValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise FSDPValueError(f"{type(module).__name__} has no method '{method_name}': pass the name of one it has.")

    gather_around(module, method_name)
