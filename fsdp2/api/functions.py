"""Functions on modules that `fully_shard` was called on."""

from __future__ import annotations

from torch import nn

from fsdp2.api.calls import gather_around
from fsdp2.api.module import FSDPModule
from fsdp2.arguments import ANYTHING, checked, shown
from fsdp2.core.several_roots import roots_of, share_context
from fsdp2.errors import FSDPTypeError, FSDPValueError


@checked(modules=ANYTHING)
def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline on this rank, share one communication context.

    They then share streams, so that memory does not fragment between them. Call it before or after their first forward,
    but not while anything is in flight.

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
    """Let the method ``method_name`` of ``module`` gather and reshard like ``forward``. Ignored if it is not sharded.

    The method may call the module itself: its parameters stay unsharded until the outermost call ends.

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
