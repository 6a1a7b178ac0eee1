"""Keeps torch's own crash on gloo (`extras/gloo_race.py`) out of the tests: tensors outlive the moment in which it is.

A tensor whose last reference in Python goes just when gloo's thread lets go of it is freed twice. In
`DTensor.full_tensor`, which tests call thousands of times, that is the padded input of uneven shards, and the result
where it is copied and dropped at once. Both are kept here until a few later ones have come.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor
from torch.distributed.tensor import placement_types

_KEPT: deque[Tensor] = deque(maxlen=8)


def outlive(tensor: Tensor) -> Tensor:
    """``tensor``, which gloo may hold, for longer than that."""
    _KEPT.append(tensor)
    return tensor


def install() -> None:
    """Let what DTensors pad outlive its exchange, in this process."""
    pad: Any = getattr(placement_types, "pad_tensor")  # noqa: B009 (torch's, private)

    def padded(tensor: Tensor, *arguments: Any) -> Tensor:
        found: Tensor = pad(tensor, *arguments)
        return found if found is tensor else outlive(found)

    setattr(placement_types, "pad_tensor", padded)  # noqa: B010


def forget() -> None:
    """Keep nothing: a test is over."""
    _KEPT.clear()
