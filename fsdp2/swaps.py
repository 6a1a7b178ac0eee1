"""What the modules of a group hold now, compared with what it has registered there. On the hot path.

Loops run inside ``map``: a group of many parameters costs no Python call for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

from torch import nn

from fsdp2 import _torch
from fsdp2.param import FSDPParam

_SHARDED: Callable[[FSDPParam], Any] = attrgetter("sharded")
_UNSHARDED: Callable[[FSDPParam], Any] = attrgetter("unsharded")
_POST_FORWARD: Callable[[FSDPParam], Any] = attrgetter("post_forward")
_LOCAL: Callable[[FSDPParam], Any] = attrgetter("local")
_REQUIRES_GRAD: Callable[[Any], bool] = attrgetter("requires_grad")


class Swaps:
    """The places in which a group's parameters are registered.

    Attributes:
        places: a mapping of registered parameters, the name in it, and whose parameter belongs there.
    """

    __slots__ = ("_params", "places")

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self.places = tuple((mapping, name, param) for param in params for mapping, name in param.registrations)
        self._params = tuple(param for _, _, param in self.places)

    def hold_sharded(self) -> bool:
        """Whether the modules hold the sharded parameters, as they were when the plan was made."""
        found = self._found()
        return (
            self._hold(found, _SHARDED)
            and all(map(is_, map(_torch.local_of, found), map(_LOCAL, self._params)))
            and self._require_alike(found)
        )

    def hold_post_forward(self) -> bool:
        """Whether they hold what was registered after forward, neither frozen nor unfrozen."""
        found = self._found()
        return self._hold(found, _POST_FORWARD) and self._require_alike(found)

    def hold_unsharded(self) -> bool:
        """Whether they hold the unsharded parameters, neither frozen nor unfrozen."""
        found = self._found()
        return self._hold(found, _UNSHARDED) and self._require_alike(found)

    def _found(self) -> list[nn.Parameter]:
        try:
            return [mapping[name] for mapping, name, _ in self.places]
        except KeyError:
            return []

    def _hold(self, found: list[nn.Parameter], form: Callable[[FSDPParam], Any]) -> bool:
        """Whether ``found`` are the parameters in this ``form``."""
        return len(found) == len(self._params) and all(map(is_, found, map(form, self._params)))

    def _require_alike(self, found: list[nn.Parameter]) -> bool:
        return all(map(is_, map(_REQUIRES_GRAD, found), map(_REQUIRES_GRAD, self._params)))

    def register_sharded(self) -> None:
        """Let the modules hold the sharded parameters."""
        for mapping, name, param in self.places:
            mapping[name] = param.sharded

    def restore_sharded(self) -> FSDPParam | None:
        """The same, whatever they hold. Frozen and unfrozen parameters stay so.

        Returns:
            A parameter that they held something else for, which is lost, if there is one.
        """
        replaced: FSDPParam | None = None
        for mapping, name, param in self.places:
            found: nn.Parameter | None = mapping.get(name)
            if found is not None and (found is param.unsharded or found is param.post_forward):
                if found.requires_grad is not param.requires_grad:
                    param.sharded.requires_grad_(found.requires_grad)
            elif found is not param.sharded:
                replaced = param
            mapping[name] = param.sharded
        return replaced

    def register_unsharded(self) -> None:
        """Let the modules hold the unsharded parameters."""
        for mapping, name, param in self.places:
            mapping[name] = param.unsharded

    def register_post_forward(self) -> None:
        """Let the modules hold what the parameters rest as after forward."""
        for mapping, name, param in self.places:
            mapping[name] = param.post_forward
