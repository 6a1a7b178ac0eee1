"""``python -m extras.errors``: writes docs/errors.md, every error that fsdp2 raises, every warning, from the source.

A message is found where its error is made, and followed from there to where its parts are: constants of the package,
variables of the function, joined lists, functions that return text, and what a function that makes errors is given.
What is put into it at run time shows as "…". Texts that are made in one place and raised in another, after they have
travelled between ranks for one, are taken from the functions in `PASSED_ON`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"

PASSED_ON: Mapping[tuple[str, str], Sequence[str]] = {
    ("plugs/watchdog/verdict.py", "FSDPRuntimeError"): ("judge", "_of_all", "_never_meets"),
    ("plugs/watchdog/orders.py", "FSDPRuntimeError"): ("look", "_first_difference"),
    ("plugs/watchdog/thread.py", "FSDPRuntimeError"): ("_abandon",),
    ("plugs/watchdog/public.py", "FSDPRuntimeError"): ("text",),
    ("plugs/transports/gloo_p2p.py", "FSDPRuntimeError"): ("text",),
    ("compiled/support.py", "FSDPNotImplementedError"): ("_feature_of_state", "_feature_of_group", "_sharer_outside"),
    ("checkpoint/comparing.py", "CheckpointMismatch"): ("hint_of_names",),
}
"""By file and class: functions whose texts are raised elsewhere. To be added to where a test finds an unknown text."""

_HEAD = """# Errors

<!-- Written by `python -m extras.errors` from the source; a test compares. -->

Every error and warning of fsdp2, in the order of the alphabet: search for what you see. "…" stands for names and
values. First comes what was found, then what to do. A message of the form "x must be y, got z" names what to pass.
All classes derive from `fsdp2.FSDPError`, and from the built-in class of the same name (`FSDPValueError` is a
`ValueError`), so both can be caught. The classes of `fsdp2.checkpoint` derive from `FSDPRuntimeError`.

Errors of ranks that differ, or fail, while they train are explained in [failures.md](failures.md). What depends on
other ranks is raised on all of them; the rest is found by each rank for itself, before it communicates.

| what is said | class | raised by |
|---|---|---|
"""
_OTHERS = ("AttributeError", "ImportError", "ValueError")
"""Of Python's own, which are listed where they are raised with a sentence."""
_WARNINGS = {"warnings.warn": "a warning", "LOG.warning": "logged"}
_UNKNOWN = "…"
_MOST = 12  # texts of one place
_DEPTH = 4  # functions that are followed


class Message(NamedTuple):
    """One message: its text, the class of the error, and the file and function that raise it."""

    text: str
    error: str
    where: str


class Site(NamedTuple):
    """A place where an error is made: its classes, and all texts that it may be given."""

    errors: tuple[str, ...]
    texts: tuple[str, ...]
    where: str
    line: int


@dataclass(frozen=True, slots=True)
class _Module:
    """A file: what it calls by which name."""

    where: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where names are looked up: a function of a file, and what a caller has given it."""

    module: _Module
    function: ast.FunctionDef | None
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    depth: int = 0


class _Package:
    """All files, and the errors that they make."""

    def __init__(self, folder: Path) -> None:
        self.modules: dict[str, _Module] = {}
        for path in sorted(folder.rglob("*.py")):
            module = _read(path, folder)
            name = path.relative_to(folder.parent).with_suffix("").as_posix().replace("/", ".")
            self.modules[name.removesuffix(".__init__")] = module
        self.errors = self._error_classes()

    def _error_classes(self) -> set[str]:
        classes = {
            node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        }
        found = {"FSDPError", "UsageError"}
        while more := {name for name, bases in classes.items() if bases & found} - found:
            found |= more
        return found - {"FSDPError"}

    # -- where errors are made

    def sites(self) -> Iterator[Site]:
        """All of them, those with what a caller gives included."""
        for module in self.modules.values():
            raised = {id(node.exc) for node in ast.walk(module.tree) if isinstance(node, ast.Raise)}
            for function, call in _calls(module.tree):
                scope = _Scope(module, function)
                errors = self.classes_of(call.func, scope)
                if not errors and id(call) in raised and ast.unparse(call.func) in _OTHERS:
                    errors = (ast.unparse(call.func),)
                said = _WARNINGS.get(ast.unparse(call.func))
                if said is not None and call.args:
                    texts = tuple(text for text in self.texts(call.args[0], scope) if _words(text) > 2)
                    if texts:  # else it is passed on
                        yield Site((said,), texts, module.where, call.lineno)
                elif errors and call.args:
                    yield Site(errors, self.texts(call.args[0], scope), module.where, call.lineno)
                elif not errors:
                    yield from self._through(call, scope)

    def classes_of(self, name: ast.expr, scope: _Scope) -> tuple[str, ...]:
        """The classes of errors that are called ``name``: one, or those that a variable may be."""
        last = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
        if last in self.errors:
            return (last,)
        if not isinstance(name, ast.Name):
            return ()
        found = [node for value in _assigned(scope.function, last) for node in ast.walk(value)]
        names = {each.id if isinstance(each, ast.Name) else getattr(each, "attr", "") for each in found}
        return tuple(sorted(names & self.errors))

    def _through(self, call: ast.Call, scope: _Scope) -> Iterator[Site]:
        """What a function that makes an error says with the sentences that ``call`` gives it."""
        found = self.function_of(call.func, scope)
        if found is None:
            return
        module, function = found
        given = {name: self.texts(value, scope) for name, value in _arguments(call, function).items()}
        given = {name: texts for name, texts in given.items() if all(_words(text) > 1 for text in texts)}
        if not given:
            return
        inner = _Scope(module, function, given, 1)
        for _, made in _calls(function):
            errors = self.classes_of(made.func, inner)
            used = {node.id for each in made.args[:1] for node in ast.walk(each) if isinstance(node, ast.Name)}
            if errors and used & given.keys():
                yield Site(errors, self.texts(made.args[0], inner), scope.module.where, call.lineno)

    # -- what they say

    def texts(self, node: ast.expr, scope: _Scope) -> tuple[str, ...]:
        """All that ``node`` may be, with "…" for what is not known before."""
        found = dict.fromkeys(_tidy(each) for each in self._texts(node, scope))
        return tuple(itertools.islice(found, _MOST))

    def _texts(self, node: ast.expr, scope: _Scope) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return self._of_parts(node.values, scope, "")
        if isinstance(node, ast.FormattedValue):
            return self._texts(node.value, scope)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._of_parts([node.left, node.right], scope, "")
        if isinstance(node, ast.IfExp):
            return [*self._texts(node.body, scope), *self._texts(node.orelse, scope)]
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return [text for each in node.values for text in self._texts(each, scope)]
        if isinstance(node, ast.Name):
            return self._of_name(node.id, scope)
        if isinstance(node, ast.Call):
            return self._of_call(node, scope)
        return [_UNKNOWN]

    def _of_parts(self, parts: Sequence[ast.expr], scope: _Scope, between: str) -> list[str]:
        """Joined. Parts that are made elsewhere are followed where the rest says nothing by itself."""
        every = [self._of_part(each, scope) for each in parts]
        if _words(between.join(each[0] for each in every)) < 3:
            found = ([text for text in self._texts(each, scope) if _words(text) > 2] for each in parts)
            every = [more or short for more, short in zip(found, every, strict=True)]
        return [between.join(each) for each in itertools.islice(itertools.product(*every), _MOST)]

    def _of_part(self, node: ast.expr, scope: _Scope) -> list[str]:
        inner = node.value if isinstance(node, ast.FormattedValue) else node
        if isinstance(inner, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            return self._texts(inner, scope)
        if isinstance(inner, ast.Name) and inner.id in scope.given:
            return list(scope.given[inner.id])
        constant = self._constant(inner.id, scope.module) if isinstance(inner, ast.Name) else None
        return [_UNKNOWN] if constant is None else self._texts(*constant)

    def _of_name(self, name: str, scope: _Scope) -> list[str]:
        if name in scope.given:
            return list(scope.given[name])
        local = _assigned(scope.function, name)
        if local and scope.depth < _DEPTH:
            deeper = _Scope(scope.module, scope.function, scope.given, scope.depth + 1)
            return [text for each in local for text in self._texts(each, deeper)]
        constant = self._constant(name, scope.module)
        return [_UNKNOWN] if constant is None else self._texts(*constant)

    def _constant(self, name: str, module: _Module) -> tuple[ast.expr, _Scope] | None:
        if name in module.constants:
            return module.constants[name], _Scope(module, None)
        source, original = module.imports.get(name, ("", ""))
        other = self.modules.get(source)
        return self._constant(original, other) if other is not None else None

    def _of_call(self, call: ast.Call, scope: _Scope) -> list[str]:
        if isinstance(call.func, ast.Attribute):
            of, method = call.func.value, call.func.attr
            if method == "join" and isinstance(of, ast.Constant) and call.args:
                return self._joined(call.args[0], scope, str(of.value))
            if method in ("strip", "rstrip", "lstrip"):
                return self._texts(of, scope)
            if method == "format":
                return [re.sub(r"\{[^{}]*\}", _UNKNOWN, text) for text in self._texts(of, scope)]
        found = self.function_of(call.func, scope)
        if found is None or scope.depth >= _DEPTH:
            return [_UNKNOWN]
        module, function = found
        given = {name: self.texts(value, scope) for name, value in _arguments(call, function).items()}
        given = {name: texts for name, texts in given.items() if all(_words(text) > 1 for text in texts)}
        inner = _Scope(module, function, given, scope.depth + 1)
        returned = [node.value for node in _own(function) if isinstance(node, ast.Return) and node.value is not None]
        return [text for each in returned for text in self._texts(each, inner)] or [_UNKNOWN]

    def _joined(self, parts: ast.expr, scope: _Scope, between: str) -> list[str]:
        if not isinstance(parts, (ast.List, ast.Tuple)):
            return [_UNKNOWN]
        every: list[ast.expr] = []
        for each in parts.elts:
            if not isinstance(each, ast.Starred):
                every.append(each)
                continue
            assigned = _assigned(scope.function, each.value.id) if isinstance(each.value, ast.Name) else []
            every += [element for value in assigned[:1] if isinstance(value, ast.List) for element in value.elts]
            every.append(ast.Constant(_UNKNOWN))
        return self._of_parts(every, scope, between)

    def function_of(self, name: ast.expr, scope: _Scope) -> tuple[_Module, ast.FunctionDef] | None:
        """A function, or a method of ``self``, of the package."""
        if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "self":
            function = scope.module.functions.get(name.attr)
            return None if function is None else (scope.module, function)
        if not isinstance(name, ast.Name):
            return None
        module, own = scope.module, name.id
        while own not in module.functions and own in module.imports:
            source, own = module.imports[own]
            if source not in self.modules:
                return None
            module = self.modules[source]
        return (module, module.functions[own]) if own in module.functions else None

    # -- what is passed on

    def passed_on(self) -> Iterator[Site]:
        """The texts of the functions in `PASSED_ON`: each string in them that is a sentence or more.

        Raises:
            KeyError: there is no such function.
        """
        for (where, error), names in PASSED_ON.items():
            module = next(each for each in self.modules.values() if each.where == where)
            for name in names:
                function = module.functions[name]
                said = (text for node in _strings(function) for text in self.texts(node, _Scope(module, function)))
                yield Site((error,), tuple(text for text in said if _words(text) > 3), where, function.lineno)


def _read(path: Path, folder: Path) -> _Module:
    module = _Module(path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
    for each in module.tree.body:
        if isinstance(each, ast.Assign):
            module.constants.update({name.id: each.value for name in each.targets if isinstance(name, ast.Name)})
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None:
            module.constants[each.target.id] = each.value
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef):
            module.functions.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom):
            module.imports.update({name.asname or name.name: (node.module or "", name.name) for name in node.names})
    return module


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """What is in ``function``, and not in another in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield node
            yield from _own(node)


def _calls(tree: ast.AST, function: ast.FunctionDef | None = None) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
    """All calls below ``tree``, with the function that they stand in."""
    own = tree if isinstance(tree, ast.FunctionDef) else function
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield own, node
        yield from _calls(node, own)


def _strings(tree: ast.AST) -> Iterator[ast.expr]:
    """The largest expressions below ``tree`` that are strings, but docstrings."""
    for node in ast.iter_child_nodes(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield node
        elif not is_docstring and not isinstance(node, ast.Assert):
            yield from _strings(node)


def _assigned(function: ast.FunctionDef | None, name: str) -> list[ast.expr]:
    """What the variable ``name`` of ``function`` may be."""
    return [] if function is None else _variables(function).get(name, [])


@functools.cache
def _variables(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in _own(function):
        if isinstance(node, ast.Assign):
            for each in node.targets:
                if isinstance(each, ast.Name):
                    found.setdefault(each.id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            found.setdefault(node.target.id, []).append(node.value)
    return found


def _arguments(call: ast.Call, function: ast.FunctionDef) -> dict[str, ast.expr]:
    """What ``call`` gives to which parameter."""
    names = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
    given = dict(zip(names, call.args, strict=False))
    return given | {each.arg: each.value for each in call.keywords if each.arg is not None}


def _tidy(text: str) -> str:
    return re.sub(r"…(?:…)+", _UNKNOWN, text)


def _words(text: str) -> int:
    """How many words it has that are more than a letter."""
    return sum(bool(re.search(r"[^\W\d_]{2}", each)) for each in text.split())


@functools.cache
def sites() -> tuple[Site, ...]:
    """All places that make errors, and what is said there."""
    package = _Package(ROOT / "fsdp2")
    return (*package.sites(), *package.passed_on())


def messages() -> list[Message]:
    """All messages of the package, each once, in alphabetical order of their texts."""
    found: dict[tuple[str, str], Message] = {}
    for site in sites():
        for text, error in itertools.product(site.texts, site.errors):
            if re.search(r"\w{3}", text) and (_words(text) > 2 or error not in _OTHERS):
                found.setdefault((text, error), Message(text, error, site.where))
    return sorted(found.values(), key=lambda each: (re.sub(r"^\W+", "", each.text).lower(), each.error))


def page() -> str:
    """The text of docs/errors.md."""
    rows = [f"| {_escaped(each.text)} | `{each.error}` | `{each.where}` |\n" for each in messages()]
    return _HEAD + "".join(rows)


def _escaped(text: str) -> str:
    """As Markdown shows it in a table; what stands between backticks is code there already."""
    parts = re.sub(r"\s*\n\s*", " ", text).replace("|", "\\|").split("`")
    for index, part in enumerate(parts):
        if index % 2 == 0 or len(parts) % 2 == 0:
            parts[index] = part.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(messages())} messages: {PAGE.relative_to(ROOT)}")
