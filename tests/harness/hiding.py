"""A torch that lacks some of its private names, as far as fsdp2's table of them can see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp2 import _torch_names


def without(*paths: str) -> Callable[[str], Any]:
    """What takes the place of the table's look-up: it does not find ``paths``."""
    look_up = _torch_names._look_up

    def look(path: str) -> Any:
        if path in paths:
            raise AttributeError(f"hidden: {path}")
        return look_up(path)

    return look
