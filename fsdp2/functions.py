"""Functions on modules that `fully_shard` was called on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp2.common import FSDPValueError
from fsdp2.forward_methods import gather_around
from fsdp2.module import FSDPModule
from fsdp2.state import FSDPState


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
        _share_context([module._get_fsdp_state() for module in modules])


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

    gather_around(module, method_name)


def _share_context(states: Sequence[FSDPState]) -> None:
    """Let the roots among ``states`` share the communication context of the first."""
    shared = states[0]._comm_ctx
    for state in states:
        if shared.comm is None and state.root is not None:
            shared.comm = state.root.comm
    for state in states[1:]:
        root = state.root
        settings = state.settings if root is None else root.settings
        settings.comm = shared
        if root is not None and shared.comm is not None and root.comm is not shared.comm:
            root.comm.retire_reduces(0)
            root.comm = shared.comm
            for group in root.groups:
                group.comm = shared.comm
