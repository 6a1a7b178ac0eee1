"""`Port`: a place in the engine that one feature fills when it is imported.

A port stands beside the code that reads it, mostly when a group is laid out or a call is made. What a step calls of a
feature is bound by then (`Accumulation`, `Pack`, a transport). The core's README lists all ports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from fsdp2.errors import FSDPNotImplementedError

T = TypeVar("T")


class Port(Generic[T]):
    """Holds what a feature has put there, or a default.

    Attributes:
        filling: the feature's object, or the default if there is no feature.
    """

    __slots__ = ("filling",)

    def __init__(self, without: T) -> None:
        self.filling = without

    def fill(self, filling: T) -> None:
        """Put ``filling`` there. The feature calls this once, when it is imported."""
        self.filling = filling


def missing(feature: str) -> Callable[..., Any]:
    """The default of a port that means nothing without ``feature``, a module's name: a function that refuses.

    The function raises `FSDPNotImplementedError` when it is called.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise FSDPNotImplementedError(f"this needs fsdp2.plugs.{feature}, which is not part of this installation.")

    return refuse
