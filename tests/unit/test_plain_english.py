"""Docstrings and comments begin their sentences with a subject or a verb, so that they can be read aloud once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fsdp2"
FOLDERS = ("core", "plugs", "ragged", "compiled", "optim", "api", "model", "tools")
# These are next: they have still to be rewritten.
EXCEPTED = {
    "core/agreement.py",
    "core/gradients.py",
    "core/layout.py",
    "core/options.py",
    "core/reduce.py",
    "core/transport.py",
    "compiled/support.py",
}
FILES = {path.relative_to(PACKAGE).as_posix(): path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")}
# Each begins a sentence without a main clause, or one that does not say what is the same.
OPENING = re.compile(r"(Of|As of|Those|The same of|The same as before)\b")
WIDTH = 120


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The strings that are statements of their own, which document attributes and constants too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """The comments; lines that follow each other are one."""
    last, start, text = -1, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT:
            continue
        said = token.string.lstrip("#: ")
        if token.start[0] == last + 1:
            text = f"{text} {said}" if said else f"{text}\n\n"
        else:
            yield start, text
            start, text = token.start[0], said
        last = token.start[0]
    yield start, text


def sentences(text: str) -> list[str]:
    paragraphs = [re.sub(r"\s+", " ", each).strip() for each in re.split(r"\n\s*\n", text)]
    return [sentence for each in paragraphs for sentence in re.split(r"(?<=[.!?:])\s+\(?", each.lstrip("("))]


def test_sentences_begin_with_what_they_are_about() -> None:
    found = {
        f"{name}:{line}": sentence
        for name, path in FILES.items()
        if name not in EXCEPTED
        for line, text in (*docstrings(path), *comments(path))
        for sentence in sentences(text)
        if OPENING.match(sentence)
    }
    assert found == {}


def test_first_lines_of_docstrings_are_no_paragraphs() -> None:
    found = [
        f"{name}:{line}"
        for name, path in FILES.items()
        for line, text in docstrings(path)
        if len(text.strip().splitlines()[0]) > WIDTH
    ]
    assert found == []


def test_files_that_are_next_exist() -> None:
    assert EXCEPTED.issubset(FILES)
