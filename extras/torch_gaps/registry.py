"""The cases: a program each, with what the table says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from extras.torch_gaps.api import Api


@dataclass(frozen=True, slots=True)
class Trial:
    """What a program is given on each rank: the implementation, and where it runs."""

    api: Api
    rank: int
    world_size: int


Program = Callable[[Trial], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        name: of the program, the key in the record.
        area: the heading that the row stands under.
        title: what a user wants, in a few words.
        asked: issues in which users meet it, as ``repository#number``; may be empty.
        world_size: ranks it needs.
        program: returns if the wish is granted. Raises `Wrong` if the result is not the unsharded model's,
            `NoSuchOption` if there is no way to say it, or whatever the implementation raises.
    """

    name: str
    area: str
    title: str
    asked: tuple[str, ...]
    world_size: int
    program: Program


_CASES: dict[str, Case] = {}


def case(area: str, title: str, *, asked: str = "", world_size: int = 2) -> Callable[[Program], Program]:
    """Registers the decorated program. ``asked``: the sources, separated by blanks."""

    def register(program: Program) -> Program:
        name = program.__name__
        if name in _CASES:
            raise ValueError(f"two cases are called {name!r}")
        _CASES[name] = Case(name, area, title, tuple(asked.split()), world_size, program)
        return program

    return register


def all_cases() -> dict[str, Case]:
    """Every case by name, in the order of the table."""
    import extras.torch_gaps.cases  # noqa: F401  registers them

    return dict(_CASES)
