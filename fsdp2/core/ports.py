"""`Port`: a place in the engine that one feature fills when it is imported.

Ports lie beside what reads them: mostly when a group is laid out or a call is made. What a step calls of a feature is
bound by then (`Accumulation`, `Pack`, a transport). The core's README lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from fsdp2.errors import FSDPNotImplementedError

T = TypeVar("T")


class Port(Generic[T]):
    """What a feature puts in place of what is there without it.

    Attributes:
        filling: either of them.
    """

    __slots__ = ("filling",)

    def __init__(self, without: T) -> None:
        self.filling = without

    def fill(self, filling: T) -> None:
        """Put ``filling`` there. Once, when the feature is imported."""
        self.filling = filling


def missing(feature: str) -> Callable[..., Any]:
    """What fills a port whose use makes no sense without the ``feature``, a module: it refuses."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise FSDPNotImplementedError(f"this needs fsdp2.plugs.{feature}, which is not part of this installation.")

    return refuse
