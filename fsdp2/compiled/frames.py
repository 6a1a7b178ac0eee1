"""Lets graphs of ``torch.compile`` begin, among this package's frames, at calls of sharded modules only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from fsdp2 import _torch_compiler

PACKAGE = "fsdp2"
BEGINS_GRAPHS = "_fsdp_captured_call"
HOOKS = ("pre_forward", "post_forward")
"""Functions whose callees must not begin graphs either: these may be the user's collectives or tensor subclasses."""


OPTIMIZERS = "fsdp2.optim."
LEADS_TO_GRAPHS = (
    "step",
    "_step_inside",
    "run",
    "step_with",
    "_step_on_lent_state",
    "_before_step",
    "_after_step",
)
"""The functions of optimizers that lead to the ``step`` of torch's class, which is a graph. Others lead to none."""


_marked: set[str] = set()
"""The names of modules whose functions are marked."""
_imported = 0
"""How many modules the interpreter had when this package's modules were last looked for."""


def begin_graphs_at_calls_only() -> None:
    """Let ``torch.compile`` begin no graph in this package's own functions. It may still trace through them.

    Modules of this package that are imported later (`compat`, tools) are marked when this is called the next time.
    """
    global _imported
    if _imported == len(sys.modules):
        return
    _imported = len(sys.modules)
    modules = [(name, module) for name, module in sys.modules.items() if name.split(".")[0] == PACKAGE]
    modules = [(name, module) for name, module in modules if name not in _marked]
    _marked.update(name for name, _ in modules)
    alone: list[CodeType] = []
    with_callees: list[CodeType] = []
    for name, module in modules:
        is_optimizers = name.startswith(OPTIMIZERS)
        for code in _codes_in(module):
            if code.co_name != BEGINS_GRAPHS:
                callees = code.co_name not in LEADS_TO_GRAPHS if is_optimizers else code.co_name in HOOKS
                (with_callees if callees else alone).append(code)
    _torch_compiler.skip_frames(alone)
    _torch_compiler.skip_frames(with_callees, callees=True)


def begin_graphs_anywhere() -> None:
    """Undo `begin_graphs_at_calls_only`."""
    global _imported
    for name in _marked & sys.modules.keys():
        _torch_compiler.unskip_frames(_codes_in(sys.modules[name]))
    _marked.clear()
    _imported = 0


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
