"""Where fsdp2 makes streams, or the host, wait, read from its source.

A *site* is a call, outside of `core.streams`, by which a wait is issued: of ``device.wait`` or ``device.block_host``
itself, or of a method of `FSDPCommContext` that leads to one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import fsdp2

SEAM = "streams"
_CONTEXT = "FSDPCommContext"
_WAIT_ARGUMENTS = 3  # stream, event, why: a work's or a handle's wait() has none


@dataclass(frozen=True, slots=True)
class Site:
    """A call that issues a wait.

    Attributes:
        number: among the sites of its function, from the top.
    """

    file: str
    function: str
    method: str
    number: int
    lines: range

    def __str__(self) -> str:
        return f"{self.file}.{self.function}-{self.method}-{self.number}"

    def is_at(self, place: str) -> bool:
        """Whether ``place`` (``file.function:line``, see `RecordingDevice.wait`) is this call."""
        name, line = place.rsplit(":", 1)
        return name == f"{self.file}.{self.function}" and int(line) in self.lines


@cache
def sources() -> dict[str, ast.Module]:
    """The syntax trees of all files of fsdp2 but its tools, which look on, by name without suffix."""
    package = Path(fsdp2.__file__).parent
    paths = [path for path in sorted(package.rglob("*.py")) if package / "tools" not in path.parents]
    return {path.stem: ast.parse(path.read_text()) for path in paths}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """All functions and methods in ``tree``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node


def method_calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """All ``something.name(...)`` in ``tree``, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        assert isinstance(call.func, ast.Attribute), "filtered above"
        yield call.func.attr, call


def device_waits(tree: ast.AST) -> list[ast.Call]:
    """The calls of ``device.wait(stream, event, why)`` in ``tree``."""
    return [
        call
        for name, call in method_calls(tree)
        if name == "wait" and len(call.args) + len(call.keywords) == _WAIT_ARGUMENTS
    ]


def host_blocks(tree: ast.AST) -> list[ast.Call]:
    """The calls of ``device.block_host(event)`` in ``tree``."""
    return [call for name, call in method_calls(tree) if name == "block_host"]


@cache
def waiting_methods() -> frozenset[str]:
    """The methods of `FSDPCommContext` that lead to a wait."""
    context = next(
        node for node in ast.walk(sources()[SEAM]) if isinstance(node, ast.ClassDef) and node.name == _CONTEXT
    )
    waiting = {method.name for method in functions(context) if device_waits(method) or host_blocks(method)}
    while more := {
        method.name
        for method in functions(context)
        if method.name not in waiting and waiting.intersection(name for name, _ in method_calls(method))
    }:
        waiting |= more
    return frozenset(waiting)


@cache
def wait_sites() -> tuple[Site, ...]:
    """All sites, in the order of the files."""
    found = []
    for file, tree in sources().items():
        if file == SEAM:
            continue
        for function in functions(tree):
            calls = [(name, call) for name, call in method_calls(function) if name in waiting_methods()]
            calls += [("wait", call) for call in device_waits(function)]
            calls += [("block_host", call) for call in host_blocks(function)]
            for number, (name, call) in enumerate(calls, start=1):
                lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
                found.append(Site(file, function.name, name, number, lines))
    return tuple(found)
