"""What the modules of a group hold now, compared with what it has registered there. On the hot path.

Loops run inside ``map``: a group of many parameters costs no Python call for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.params.param import FSDPParam

_SHARDED: Callable[[FSDPParam], Any] = attrgetter("sharded")
_UNSHARDED: Callable[[FSDPParam], Any] = attrgetter("unsharded")
_RESTING: Callable[[FSDPParam], Any] = attrgetter("resting")
_LOCAL: Callable[[FSDPParam], Any] = attrgetter("local")
_REQUIRES_GRAD: Callable[[Any], bool] = attrgetter("requires_grad")


class Registrations:
    """The places in which a group's parameters are registered.

    Attributes:
        places: a mapping of registered parameters, the name in it, and whose parameter belongs there.
    """

    __slots__ = ("_mappings", "_names", "_params", "places")

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self.places = tuple((mapping, name, param) for param in params for mapping, name in param.registrations)
        self._mappings = tuple(mapping for mapping, _, _ in self.places)
        self._names = tuple(name for _, name, _ in self.places)
        self._params = tuple(param for _, _, param in self.places)

    def hold_sharded(self) -> bool:
        """Whether the modules hold the sharded parameters, as they were when the plan was made."""
        with _torch.plain_attributes():
            held = self._hold(_SHARDED)
        return held and all(map(is_, map(_torch.local_of, map(_SHARDED, self._params)), map(_LOCAL, self._params)))

    def hold_post_forward(self) -> bool:
        """Whether they hold what was registered after forward, neither frozen nor unfrozen."""
        return self._hold(_RESTING)

    def hold_unsharded(self) -> bool:
        """Whether they hold the unsharded parameters, neither frozen nor unfrozen."""
        return self._hold(_UNSHARDED)

    def _hold(self, form: Callable[[FSDPParam], Any]) -> bool:
        """Whether they hold the parameters in this ``form``, neither frozen nor unfrozen."""
        try:
            found = list(map(getitem, self._mappings, self._names))
        except KeyError:
            return False
        expected = self._params
        return all(map(is_, found, map(form, expected))) and all(
            map(is_, map(_REQUIRES_GRAD, found), map(_REQUIRES_GRAD, expected))
        )

    def are_toggled(self) -> bool:
        """Whether parameters, in either form, were frozen or unfrozen since the plan was made."""
        expected = list(map(_REQUIRES_GRAD, self._params))
        return any(
            not all(map(is_, map(_REQUIRES_GRAD, map(form, self._params)), expected)) for form in (_UNSHARDED, _SHARDED)
        )

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
            elif found is not param.sharded and not (found is not None and _is_another_view(found, param)):
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
            mapping[name] = param.resting


def _is_another_view(found: torch.Tensor, param: FSDPParam) -> bool:
    """Whether ``found`` is another parameter over the very memory of the frozen ``param``, and was not written.

    As quantized layers register, which need a class of their own in forward. Nothing is lost with it.
    """
    unsharded = param.unsharded
    if unsharded is None or param.requires_grad or found.requires_grad or isinstance(found, DTensor):
        return False
    whole = _torch.local_of(unsharded) if isinstance(unsharded, DTensor) else unsharded
    return (
        _torch.storage_of(found) == _torch.storage_of(whole)
        and found.data_ptr() == whole.data_ptr()
        and found.nbytes == whole.nbytes
        and (_torch.version_of(found) == 0 or _torch.share_version(found, whole))  # whose writes are seen elsewhere
    )
