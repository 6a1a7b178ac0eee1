"""`Taps`: functions that run around methods of single objects of the engine, as long as somebody listens.

[Note: taps]
If nobody listens, the engine calls nothing, not even to find that out. A `Tap` is put into the ``__dict__`` of one
object, where Python finds it before the class's method. When the last listener goes, the ``__dict__`` is as before. So
other models, and this one later, run the code that they would run without. Two alternatives were rejected: functions in
place of methods of classes (all models of the process would run them), and a listener that the engine asks for (a
branch in each gather, for everybody, for ever).

`observing.TAPPED` lists the methods that are tapped, and a test holds the engine to these names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = functools.partial[Any]
"""A function that runs around a call, with the call and its arguments: ``around(call, *args, **kwargs)``."""

_NOTHING = object()


class Tap:
    """Takes the place of one method of one object.

    Attributes:
        arounds: the functions that run around the method, the last one outermost.
    """

    __slots__ = ("_before", "_method", "arounds")

    def __init__(self, method: Callable[..., Any], before: object) -> None:
        self._method = method
        self._before = before
        self.arounds: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method inside of all functions around it."""
        call = self._method
        for around in self.arounds:
            call = functools.partial(around, call)
        return call(*args, **kwargs)

    def leave(self, owner: Any, name: str) -> None:
        """Put ``owner`` back as it was, since nobody listens any more."""
        if owner.__dict__.get(name) is not self:
            return
        if self._before is _NOTHING:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = self._before


class Taps:
    """The taps of one listener."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str, Tap, Around]] = []
        self._known: set[tuple[int, str]] = set()
        self._owners: set[int] = set()

    def place(self, owner: Any, name: str, around: Around) -> None:
        """Run ``around`` whenever the method ``name`` of ``owner`` is called. Placing it again does nothing."""
        if (id(owner), name) in self._known:  # `_placed` holds owners, so no other object has their ids
            return
        before = owner.__dict__.get(name, _NOTHING)
        if isinstance(before, Tap):
            tap = before
        else:
            tap = owner.__dict__[name] = Tap(getattr(owner, name), before)
        tap.arounds.append(around)
        self._known.add((id(owner), name))
        self._owners.add(id(owner))
        self._placed.append((owner, name, tap, around))

    def has(self, owner: Any) -> bool:
        """Whether this listener has a tap on ``owner``."""
        return id(owner) in self._owners

    def forget(self, owner: Any) -> None:
        """Remove this listener's taps from ``owner``."""
        if id(owner) in self._owners:
            self._remove([each for each in self._placed if each[0] is owner])

    def remove(self) -> None:
        """Remove all taps of this listener."""
        self._remove(self._placed)

    def _remove(self, placed: list[tuple[Any, str, Tap, Around]]) -> None:
        gone = {id(owner) for owner, _, _, _ in placed}
        for owner, name, tap, around in placed:
            tap.arounds[:] = [each for each in tap.arounds if each is not around]
            if not tap.arounds:
                tap.leave(owner, name)
        self._placed = [each for each in self._placed if id(each[0]) not in gone]
        self._known = {each for each in self._known if each[0] not in gone}
        self._owners -= gone
