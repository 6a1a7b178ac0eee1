"""``python -m extras.errors``: writes docs/errors.md, every message of an error that fsdp2 raises, from the source.

A message is found where its error is made: a string, an f-string, or a name of a constant of the module. What is put
into it at run time shows as "…"; messages that are nothing else (those of the watchdog, and of errors that are passed
on) are described in docs/failures.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"

_HEAD = """# Errors

<!-- Written by `python -m extras.errors` from the source; a test compares. -->

Every message of fsdp2, in the order of the alphabet: search for what you see. "…" stands for names and values. First
comes what was found, then what to do. A message of the form "x must be y, got z" names what to pass. All classes
derive from `fsdp2.FSDPError`, and from the built-in class of the same name (`FSDPValueError` is a `ValueError`),
so both can be caught.

Errors of ranks that differ, or fail, while they train are in [failures.md](failures.md). What depends on other ranks
is raised on all of them; the rest is found by each rank for itself, before it communicates.

| what is said | class | raised by |
|---|---|---|
"""


class Message(NamedTuple):
    """One message: its text, the class of the error, and the file and function that raise it."""

    text: str
    error: str
    where: str


def messages() -> list[Message]:
    """All messages of the package, each once, in alphabetical order of their texts."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted((ROOT / "fsdp2").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = dict(_constants(tree))
        name = path.relative_to(ROOT / "fsdp2").as_posix()
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
                error = call.func.id
                if re.fullmatch(r"FSDP\w+Error", error):
                    text = _text(call.args[0], constants)
                    if re.search(r"\w{3}", text):
                        found.setdefault((text, error), Message(text, error, name))
    return sorted(found.values(), key=lambda each: (re.sub(r"^\W+", "", each.text).lower(), each.error))


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value.value


def _text(node: ast.expr, constants: Mapping[str, str]) -> str:
    """What ``node`` says, with "…" for what is not known before."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(r"…(?:…)+", "…", "".join(_text(each, constants) for each in node.values))
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    return "…"


def page() -> str:
    """The text of docs/errors.md."""
    rows = []
    for each in messages():
        text = (
            each.text.replace("\n", " ")
            .replace("|", "\\|")
            .replace("<", "&lt;")
            .replace("*", "\\*")
            .replace("_", "\\_")
        )
        rows.append(f"| {text} | `{each.error}` | `{each.where}` |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(messages())} messages: {PAGE.relative_to(ROOT)}")
