"""From the text of a config to nested mappings that know in which line each key is, and back. Knows no setting.

JSON is always there; YAML needs PyYAML, which comes with ``fsdp2[tools]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp2.errors import FSDPRuntimeError, FSDPValueError

Lines = Mapping[tuple[Any, ...], int]
"""The line, from 1, of each key, by its path from the top."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is written, for messages: ``sharding.yaml, line 3, mp_policy.param_dtype``.

    Attributes:
        source: the file.
        lines: where its keys are.
        path: of keys.
    """

    source: str
    lines: Lines = field(default_factory=dict)
    path: tuple[Any, ...] = ()

    def within(self, key: Any) -> Place:
        """That of a key of what is here."""
        return replace(self, path=(*self.path, key))

    def __str__(self) -> str:
        line = self.lines.get(self.path)
        parts = [self.source, f"line {line}" if line else "", ".".join(map(str, self.path))]
        return ", ".join(part for part in parts if part)


Read = Callable[[str, str], tuple[Place, Any]]
Write = Callable[[dict[str, Any]], str]


def reader_of(path: Path) -> Read:
    """What reads the file, by the ending of its name.

    Raises:
        FSDPValueError: another ending.
    """
    return read_json if _is_json(path) else read_yaml


def writer_of(path: Path) -> Write:
    """What writes the file, by the ending of its name.

    Raises:
        FSDPValueError: another ending.
    """
    return written_json if _is_json(path) else written_yaml


def _is_json(path: Path) -> bool:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise FSDPValueError(f"the name of a config ends in .json, .yaml or .yml, got '{path.name}'.")
    return path.suffix == ".json"


# ---- JSON -------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def written_json(settings: dict[str, Any]) -> str:
    """``settings`` as JSON, and an end of line."""
    return json.dumps(settings, indent=2) + "\n"


def read_json(text: str, source: str) -> tuple[Place, Any]:
    """The place of the whole, and what is there.

    Raises:
        FSDPValueError: it is no JSON; a key is there twice.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise FSDPValueError(f"{source}, line {error.lineno}: this is no JSON: {error.msg}.") from error
    lines: dict[tuple[Any, ...], int] = {}
    for path, line in _keys_of_json(text):
        _note(lines, path, line, source)
    return Place(source, lines), tree


def _keys_of_json(text: str) -> Iterator[tuple[tuple[Any, ...], int]]:
    """The paths of all keys of a text that is JSON, and their lines."""
    open_keys: list[Any] = []  # of each mapping or list that is open, the key or number that is read now
    previous = ("", 0)
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token in "{[":
            open_keys.append(None if token == "{" else 0)
        elif token in "}]":
            open_keys.pop()
        elif token == "," and isinstance(open_keys[-1], int):
            open_keys[-1] += 1
        elif token == ":":
            open_keys[-1] = json.loads(previous[0])
            yield tuple(open_keys), previous[1]
        previous = (token, text.count("\n", 0, found.start()) + 1)


def _note(lines: dict[tuple[Any, ...], int], path: tuple[Any, ...], line: int, source: str) -> None:
    if path in lines:
        raise FSDPValueError(
            f"{source}, line {line}: '{'.'.join(map(str, path))}' is there twice, in line {lines[path]} before."
        )
    lines[path] = line


# ---- YAML -------------------------------------------------------------------------------------------


def _yaml() -> ModuleType:
    try:
        import yaml  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise FSDPRuntimeError(
            "YAML is read and written with PyYAML, which is not installed: pip install 'fsdp2[tools]', or use a .json "
            "file, which needs nothing."
        ) from error
    return yaml  # type: ignore[no-any-return]


def written_yaml(settings: dict[str, Any]) -> str:
    """``settings`` as YAML, in their order.

    Raises:
        FSDPRuntimeError: PyYAML is not installed.
    """
    return str(_yaml().safe_dump(settings, sort_keys=False, default_flow_style=None)) if settings else "{}\n"


def read_yaml(text: str, source: str) -> tuple[Place, Any]:
    """The place of the whole, and what is there. (An empty text is None.)

    Raises:
        FSDPValueError: it is no YAML; a key is there twice.
        FSDPRuntimeError: PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        top = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark is not None else source
        raise FSDPValueError(f"{where}: this is no YAML: {getattr(error, 'problem', None) or error}.") from error
    lines: dict[tuple[Any, ...], int] = {}
    for path, line in () if top is None else _keys_of_yaml(yaml, top, ()):
        _note(lines, path, line, source)
    return Place(source, lines), tree


def _keys_of_yaml(yaml: ModuleType, node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inside = (*path, key.value)
            yield inside, key.start_mark.line + 1
            yield from _keys_of_yaml(yaml, value, inside)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _keys_of_yaml(yaml, value, (*path, number))
