"""Which methods of modules run, read off the call stack: are parameters asked for inside of a pass that uses them?"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal

from torch import nn

from fsdp2 import _torch
from fsdp2.errors import FSDPRuntimeError

CALLS = frozenset({"_call_impl", "_fsdp_captured_call", "wrapped"})
"""The methods of sharded modules that gather."""


def refuse_inside_of_a_pass(root: Any, modules: Sequence[nn.Module], name: str) -> None:
    """Refuse to look at the parameters of ``modules``, called ``name``, while a forward or backward uses them.

    Raises:
        FSDPRuntimeError: one of ``root`` or of ``modules`` runs.
    """
    running = running_pass(root, modules)
    if running is not None:
        raise FSDPRuntimeError(
            f"state_dict(), load_state_dict() or a conversion (such as to()) of '{name}' was called inside a "
            f"{running} of {root.name}, which computes with its unsharded parameters: they would be taken away from "
            "it. Call it between iterations, on all ranks."
        )


def running_pass(root: Any, modules: Sequence[nn.Module]) -> Literal["forward", "backward"] | None:
    """Which pass of ``root``, or of one of its ``modules`` by itself, the calling code is inside of, if of any."""
    iteration = root.iteration
    if iteration.in_backward and _torch.backward_is_running():
        return "backward"
    in_forward = iteration.in_forward or any(
        self in modules
        for frame in frames_from(sys._getframe())
        if frame.f_code.co_name in CALLS
        for self, _ in methods_of([frame])
    )
    return "forward" if in_forward else None


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame``, its caller, and so on outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def methods_of(frames: Iterable[FrameType]) -> Iterator[tuple[Any, FrameType]]:
    """The modules and frames of methods among ``frames``, as the frames' local variables tell.

    Before Python 3.13 a frame whose variables are read keeps all that they hold, until they are read again or it ends:
    where nothing has failed, only frames of torch and of this package are to be given.
    """
    for frame in frames:
        code = frame.f_code
        self = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(self, nn.Module):
            method = getattr(type(self), code.co_name, None)
            if code.co_varnames[0] == "self" or getattr(method, "__code__", None) is code:  # no function of a module
                yield self, frame
