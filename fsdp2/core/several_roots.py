"""Several roots over the same sharded modules: a shared encoder below two models, or one that also runs alone.

A root *claims* the states below it when its forward begins, if another root has claimed one of them since. Every root
keeps the orders that it has learned. All of them share one communication context, so that whichever root ends a
backward waits for all of its reductions. Claiming changes neither groups and buffers nor what a forward has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fsdp2.core.failure import recover_if_failed
from fsdp2.core.streams import FSDPCommContext
from fsdp2.errors import FSDPRuntimeError

if TYPE_CHECKING:
    from fsdp2.core.root import FSDPRoot
    from fsdp2.core.state import FSDPState


class SharedComm:
    """One communication context for several roots, made by the first of them that runs.

    Attributes:
        comm: None until a root runs.
    """

    __slots__ = ("comm",)

    def __init__(self) -> None:
        self.comm: FSDPCommContext | None = None


def roots_of(states: Iterable[FSDPState]) -> list[FSDPRoot]:
    """All roots above ``states``, each once."""
    return list(dict.fromkeys(root for state in states for root in state.roots))


def refuse_busy(claimer: str, names: Mapping[FSDPState, str], own: FSDPRoot | None) -> None:
    """Refuse to claim states that another root than ``own`` is using. Roots whose last pass failed are recovered.

    Raises:
        FSDPRuntimeError: another root is running; the message names both roots and the submodule.
    """
    for state, name in names.items():
        for root in state.roots:
            if root is own:
                continue
            recover_if_failed(root)
            if root.is_running():
                raise FSDPRuntimeError(
                    f"{claimer} begins a forward, but its submodule '{name}' ({state.class_name}) is being used by "
                    f"{root.name}, whose forward or backward is running, or waits for finalize_backward(). Roots that "
                    "share a module take turns: run them one after the other, or call fully_shard on a module that "
                    "contains them."
                )


def supersede(states: Iterable[FSDPState]) -> None:
    """End the roots that modules of ``states`` are: a module above them becomes the root."""
    for state in states:
        if state.own_root is not None:
            state.own_root.dissolve()


def claim(root: FSDPRoot, states: Iterable[FSDPState]) -> None:
    """Make ``root`` the root of ``states``, and mark the roots that it takes them from as disturbed."""
    for state in states:
        for other in state.roots:
            other.is_disturbed = True
        if root not in state.roots:
            state.roots.append(root)
        state.root, state.is_root = root, state is root.owner
    root.is_disturbed = False


def release(root: FSDPRoot, states: Iterable[FSDPState]) -> None:
    """Take ``states`` from ``root``, which ends. Other roots over them must claim them before their next forward."""
    for state in states:
        if root in state.roots:
            state.roots.remove(root)
        if state.own_root is root:
            state.own_root = None
        if state.root is root:
            state.root, state.is_root = None, False
            for other in state.roots:
                other.is_disturbed = True


def share_context(shared: SharedComm, roots: Iterable[FSDPRoot]) -> None:
    """Let ``roots`` use one communication context: that of ``shared``, or else the first one's. None of them runs."""
    for root in roots:
        if shared.comm is None:
            shared.comm = root.comm
        root.shared_comm = shared
        if root.comm is not shared.comm:
            root.comm.finish_reduces()
            for group in root.groups:
                group.quiesce()  # unsharded memory belongs to a stream of the old context, and must not outlive it
                group.comm = shared.comm
            root.comm.let_host_write_shards()
            root.comm = shared.comm
