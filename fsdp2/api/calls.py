"""Makes methods of sharded modules gather and reshard like ``forward``."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch import nn

from fsdp2.api.misuse import explanation_of
from fsdp2.core.state import state_of


def gather_around(module: nn.Module, name: str) -> None:
    """Let the method ``name`` of the sharded ``module`` gather and reshard like ``forward``."""
    state = state_of(module)
    assert state is not None, "of a sharded module"
    method: Any = getattr(module, name)
    # The function of an own method is called with `self`, which is another module in a copy of this one.
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
            explained = explanation_of(error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            state.calls -= 1
        return output if cast is None else cast

    state.module_hooks.methods.setdefault((module, name), module.__dict__.get(name))
    module.__dict__[name] = types.MethodType(wrapped, module)
