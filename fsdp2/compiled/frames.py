"""Which frames of this package a graph may begin at: that of a sharded module's call, and no other."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from fsdp2 import _torch_compiler

PACKAGE = "fsdp2"
BEGINS_GRAPHS = "_captured_call"
HOOKS = ("pre_forward", "post_forward", "look_through")
"""What they call may be the user's (collectives, tensors that gather themselves), or torch's."""


@functools.cache
def begin_graphs_at_calls_only() -> None:
    """Let ``torch.compile`` leave this package's own functions alone, unless it traces through them on its way."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == PACKAGE]
    codes = [code for module in modules for code in _codes_in(module)]
    _torch_compiler.skip_frames(code for code in codes if code.co_name not in (BEGINS_GRAPHS, *HOOKS))
    _torch_compiler.skip_frames((code for code in codes if code.co_name in HOOKS), callees=True)


def _codes_in(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            for function in _functions_of(member):
                yield from _with_nested(function.__code__)


def _functions_of(member: object) -> Iterator[FunctionType]:
    candidates: list[object]
    if isinstance(member, property):
        candidates = [member.fget, member.fset]
    else:
        candidates = [getattr(member, "__func__", member), getattr(member, "__wrapped__", None)]
    for each in candidates:
        if isinstance(each, FunctionType):
            yield each


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
