"""Several roots over the same sharded modules: a shared encoder below two models, or one that also runs alone.

A root *claims* the states below it when its forward begins, if another has claimed one of them since. Every root keeps
the orders that it has learned; all of them share one communication context, so that whoever ends a backward waits for
all of its reductions. The groups, their buffers and what a forward has saved for its backward stay as they are.
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
        comm: None until then.
    """

    __slots__ = ("comm",)

    def __init__(self) -> None:
        self.comm: FSDPCommContext | None = None


def roots_of(states: Iterable[FSDPState]) -> list[FSDPRoot]:
    """All roots that ``states`` are below of, each once."""
    return list(dict.fromkeys(root for state in states for root in state.roots))


def refuse_busy(claimer: str, names: Mapping[FSDPState, str], own: FSDPRoot | None) -> None:
    """Refuse to claim states that another root than ``own`` is using. Roots that have failed are recovered.

    Raises:
        FSDPRuntimeError: naming both roots and the submodule.
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
    """End the roots that ``states`` were: they lie below another now."""
    for state in states:
        if state.own_root is not None:
            state.own_root.dissolve()


def claim(root: FSDPRoot, states: Iterable[FSDPState]) -> None:
    """Make ``root`` the root of ``states``. Those that it takes them from notice."""
    for state in states:
        for other in state.roots:
            other.is_disturbed = True
        if root not in state.roots:
            state.roots.append(root)
        state.root, state.is_root = root, state is root.owner
    root.is_disturbed = False


def release(root: FSDPRoot, states: Iterable[FSDPState]) -> None:
    """``root`` is to be no root of ``states`` any more; others notice."""
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
    """Let ``roots``, none of which is running, use one communication context: ``shared``, or the first of theirs."""
    for root in roots:
        if shared.comm is None:
            shared.comm = root.comm
        root.shared_comm = shared
        if root.comm is not shared.comm:
            root.comm.finish_reduces()
            for group in root.groups:
                group.quiesce()  # its memory belongs to a stream of the context that it leaves
                group.comm = shared.comm
            root.comm.let_host_write_shards()
            root.comm = shared.comm
