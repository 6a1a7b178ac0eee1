"""Functions on modules that `fully_shard` was called on."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from fsdp2.common import FSDPValueError
from fsdp2.module import FSDPModule
from fsdp2.state import share_context


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline on this rank, share one communication context.

    They then share streams, so that memory does not fragment between them. Before or after their first forward, but not
    while anything is in flight.

    Raises:
        FSDPValueError: one of ``modules`` is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise FSDPValueError(
                f"share_comm_ctx takes modules that fully_shard was called on, got a {type(module).__name__}."
            )
    if modules:
        share_context([module._get_fsdp_state() for module in modules])


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let the method ``method_name`` of ``module`` gather and reshard like ``forward``. Nothing to do if not sharded.

    Raises:
        FSDPValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise FSDPValueError(f"{type(module).__name__} has no method '{method_name}'.")

    @functools.wraps(method)
    def wrapped(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        try:
            inputs = state.pre_forward(self, args, kwargs, method)  # type: ignore[arg-type]
            args, kwargs = inputs or (args, kwargs)
            output = method(*args, **kwargs)
            cast = state.post_forward(self, args, output)  # type: ignore[arg-type]
        except BaseException:
            state.forward_failed()
            raise
        return output if cast is None else cast

    setattr(module, method_name, types.MethodType(wrapped, module))
