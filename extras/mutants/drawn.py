"""Faults to plant: one small change each of the source, which keeps the numbers of all lines."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("core", "optim", "plugs", "model")
OPPOSITES: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SHOWN = frozenset({"__repr__", "__str__", "extra_repr"})
"""Functions whose result is only printed."""


@dataclass(frozen=True, order=True)
class Mutant:
    """The text from ``start`` to ``end`` of ``path`` becomes ``after``; offsets are in bytes."""

    path: str
    start: int
    end: int
    line: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """As in tables: where, and what is done."""
        return f"{self.path}:{self.line} {self.kind}: {' '.join(self.before.split())[:60]}"

    def plant(self, source: bytes) -> bytes:
        """The source with the fault."""
        assert source[self.start : self.end].decode() == self.before, f"{self.path} is another now"
        return source[: self.start] + self.after.encode() + source[self.end :]


class _Sites(ast.NodeVisitor):
    """All faults of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.found: list[Mutant] = []
        self._begins = [0]
        for line in source.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in SHOWN:
            for statement in node.body:
                self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are for the tests of errors."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """What never happens."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        whole = self._text(node)
        parts = [f"({self._text(value)})" for value in node.values]
        if "\n" not in whole:
            self._add(node, f"{word} to {other}", "(" + f" {other} ".join(parts) + ")")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and "\n" not in self._text(node):
            sign = OPPOSITES[type(node.ops[0])]
            left, right = self._text(node.left), self._text(node.comparators[0])
            self._add(node, f"now {sign}", f"(({left}) {sign} ({right}))")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, "call dropped", "pass" + "\n" * self._text(node).count("\n"))
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute) for target in node.targets):
            self._add(node, "assignment dropped", "pass" + "\n" * self._text(node).count("\n"))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
            first, second = node.args[:2]
            between = self.source[self._offset(first, end=True) : self._offset(second)].decode()
            swapped = self._text(second) + between + self._text(first)
            begin, end = self._offset(first), self._offset(second, end=True)
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if self._text(first) != self._text(second) and name not in ("cast", "max", "min", "isinstance"):
                before = self.source[begin:end].decode()
                if before.count("\n") == swapped.count("\n"):
                    self.found.append(Mutant(self.path, begin, end, first.lineno, "arguments swapped", before, swapped))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, f"now {not node.value}", str(not node.value))

    def _negate(self, test: ast.expr) -> None:
        self._add(test, "condition flipped", f"(not ({self._text(test)}))")

    def _offset(self, node: ast.expr | ast.stmt, *, end: bool = False) -> int:
        if end:
            assert node.end_lineno is not None and node.end_col_offset is not None
            return self._begins[node.end_lineno - 1] + node.end_col_offset
        return self._begins[node.lineno - 1] + node.col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        return self.source[self._offset(node) : self._offset(node, end=True)].decode()

    def _add(self, node: ast.expr | ast.stmt, kind: str, after: str) -> None:
        begin, end = self._offset(node), self._offset(node, end=True)
        self.found.append(Mutant(self.path, begin, end, node.lineno, kind, self._text(node), after))


def sites(root: Path, folders: tuple[str, ...] = FOLDERS) -> Iterator[Mutant]:
    """Every fault that could be planted, once."""
    for folder in folders:
        for path in sorted((root / "fsdp2" / folder).rglob("*.py")):
            source = path.read_bytes()
            visitor = _Sites(str(path.relative_to(root)), source)
            visitor.visit(ast.parse(source))
            yield from sorted(set(visitor.found))


def draw(root: Path, number: int, seed: int = 0) -> list[Mutant]:
    """So many of them in a random order, so that the first ones are drawn as well; the same for one source and seed."""
    return random.Random(seed).sample(list(sites(root)), number)
