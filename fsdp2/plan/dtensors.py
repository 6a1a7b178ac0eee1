"""DTensors over local tensors that lie in a buffer: of the right class, with copies and pickles of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from fsdp2 import _torch

CLASSES: dict[type[Placement], type[DTensor]] = {}
"""By placements that torch's own DTensor does not know, the class that does: with ``_over(local, spec)``."""

OF_ROWS: list[Callable[[Sequence[int]], Placement]] = []
"""The placement of rows (one number for each rank) that are dealt out otherwise than torch's ``Shard`` does."""


def class_of(spec: Any) -> type[DTensor]:
    """The class of a tensor of ``spec`` (a DTensorSpec)."""
    return next((CLASSES[type(each)] for each in spec.placements if type(each) in CLASSES), DTensor)


def dtensor_over(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor over ``local`` of the class that ``spec`` asks for."""
    own = class_of(spec)
    return _torch.make_dtensor(local, spec) if own is DTensor else own._over(local, spec)  # type: ignore[attr-defined]


def dtensor_at_offset(local: torch.Tensor, spec: Any) -> DTensor:
    """The same for a ``local`` that lies at an offset in memory that it shares, with copies and pickles of its own.

    The wrapper has that offset too: Dynamo (up to torch 2.14) cannot take up one that has another. Its own storage is
    null, and torch would try to copy it from there; so `copy.deepcopy` and `torch.save` are told to copy its own part.
    """
    dtensor = dtensor_over(local, spec)
    dtensor.__deepcopy__ = _DeepCopy(local, spec)  # type: ignore[method-assign]
    dtensor.__reduce_ex__ = _Reduce(local, spec)  # type: ignore[method-assign,assignment]
    return dtensor


def parameter_at_offset(local: torch.Tensor, spec: Any, *, requires_grad: bool) -> nn.Parameter:
    """A parameter of the same kind; how it is copied is the caller's affair."""
    parameter = nn.Parameter(dtensor_over(local, spec), requires_grad=requires_grad)
    _torch.set_local(parameter, local)
    parameter.__reduce_ex__ = _ReduceParameter(local, spec)  # type: ignore[method-assign,assignment]
    return parameter


class _OnItsOwn:
    """What a DTensor's local tensor holds, as a DTensor on memory of its own. Does not travel with copies."""

    __slots__ = ("_local", "_spec")

    def __init__(self, local: torch.Tensor, spec: Any) -> None:
        self._local = local
        self._spec = spec

    def _made(self) -> DTensor:
        return dtensor_over(self._local.detach().clone(), self._spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copied as None."""

    def __reduce__(self) -> Any:
        """Pickled as None."""
        return type(None), ()


class _DeepCopy(_OnItsOwn):
    __slots__ = ()

    def __call__(self, memo: dict[int, Any]) -> DTensor:
        return self._made()


class _Reduce(_OnItsOwn):
    __slots__ = ()

    def __call__(self, protocol: Any) -> Any:
        return self._made().__reduce_ex__(protocol)


class _ReduceParameter(_OnItsOwn):
    __slots__ = ()

    def __call__(self, protocol: Any) -> Any:
        return nn.Parameter(self._made()).__reduce_ex__(protocol)
