"""Tells from the call stack whether code runs inside of a forward or backward that uses sharded parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal

from torch import nn

from fsdp2 import _torch
from fsdp2.errors import FSDPRuntimeError

CALLS = frozenset({"_call_impl", "_fsdp_captured_call", "wrapped"})
"""Names of the functions in which the methods of sharded modules gather and compute."""


def refuse_inside_of_a_pass(root: Any, modules: Sequence[nn.Module], name: str) -> None:
    """Refuse to touch the parameters of ``modules``, called ``name``, while a forward or backward uses them.

    Raises:
        FSDPRuntimeError: a pass of ``root``, or a forward of one of ``modules``, is running.
    """
    running = running_pass(root, modules)
    if running is not None:
        raise FSDPRuntimeError(
            f"state_dict(), load_state_dict() or a conversion (such as to()) of '{name}' was called inside a "
            f"{running} of {root.name}, which computes with its unsharded parameters: they would be taken away from "
            "it. Call it between iterations, on all ranks."
        )


def running_pass(root: Any, modules: Sequence[nn.Module]) -> Literal["forward", "backward"] | None:
    """The pass of ``root``, or the forward of one of its ``modules`` alone, that the caller is inside of; else None."""
    iteration = root.iteration
    if iteration.in_backward and _torch.backward_is_running():
        return "backward"
    # The call stack shows modules that run outside of the root's forward, about which the iteration knows nothing.
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
    """Pairs of a module and a frame of ``frames`` that runs one of its methods, as the frame's local variables tell.

    Before Python 3.13 a frame whose variables are read keeps alive what they held, until they are read again or the
    frame ends. So where nothing has failed, pass only frames of torch and of this package.
    """
    for frame in frames:
        code = frame.f_code
        self = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(self, nn.Module):
            method = getattr(type(self), code.co_name, None)
            # A plain function may take a module as its first argument, too: that is no method of it.
            if code.co_varnames[0] == "self" or getattr(method, "__code__", None) is code:
                yield self, frame
