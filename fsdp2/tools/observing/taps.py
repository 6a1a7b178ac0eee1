"""`Taps`: functions that run around methods of single objects of the engine, for as long as somebody listens.

[Note: taps]
The engine calls nothing when nobody listens, not even to find that out. A `Tap` is put into the ``__dict__`` of one
object, where Python finds it before the method of the class; when the last listener goes, the ``__dict__`` is what it
was. So other models, and this one after, run the code that they would run without. Rejected: functions in the place of
methods of classes (all models of the process would run them), and a listener that the engine asks for (a branch in
each gather, for everybody, for ever).

Which methods are tapped is listed in `observing.TAPPED`, and a test holds the engine to these names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = functools.partial[Any]
"""Called with what it goes around, and the arguments: ``around(call, *args, **kwargs)``."""

_NOTHING = object()


class Tap:
    """What stands in the place of one method of one object.

    Attributes:
        arounds: what runs around it, the last one outermost.
    """

    __slots__ = ("_before", "_method", "arounds")

    def __init__(self, method: Callable[..., Any], before: object) -> None:
        self._method = method
        self._before = before
        self.arounds: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, inside of all that is around it."""
        call = self._method
        for around in self.arounds:
            call = functools.partial(around, call)
        return call(*args, **kwargs)

    def leave(self, owner: Any, name: str) -> None:
        """Nobody listens any more: ``owner`` is again as it was."""
        if owner.__dict__.get(name) is not self:
            return
        if self._before is _NOTHING:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = self._before


class Taps:
    """Those of one listener."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str, Tap, Around]] = []
        self._known: set[tuple[int, str]] = set()
        self._owners: set[int] = set()

    def place(self, owner: Any, name: str, around: Around) -> None:
        """Run ``around`` each time that the method ``name`` of ``owner`` is called. Once, however often it is asked."""
        if (id(owner), name) in self._known:  # (owners are held, so that no other object has their ids)
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
        """Whether something runs around methods of ``owner``."""
        return id(owner) in self._owners

    def forget(self, owner: Any) -> None:
        """Take those of ``owner`` away."""
        if id(owner) in self._owners:
            self._remove([each for each in self._placed if each[0] is owner])

    def remove(self) -> None:
        """Take all of them away."""
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
