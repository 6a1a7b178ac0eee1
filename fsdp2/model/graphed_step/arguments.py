"""What a graphed step takes and returns: tensors, which are copied, and plain values, which must stay the same.

A graph has read the tensors of its recording, and knows no others. So each tensor must lie where it can be replaced.
What is no tensor must be the same in each call: plain values are compared as text, other objects by their identity.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fsdp2.core.trees import tensors_anywhere_in, text_of
from fsdp2.errors import FSDPValueError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_LOOKED_AT = (nn.Module, Optimizer)
"""Classes of objects that hold tensors and are the same in each call. `Fixed` looks at what changes in them."""


def described(tree: Any, what: str = "was given") -> str:
    """``tree`` as text, with shapes and dtypes in place of tensors: equal texts can use the same graph.

    ``what``: what the step does with it, for messages.

    Raises:
        FSDPValueError: a replay would use the value of the recording for something in it.
    """

    def leaf(value: Any) -> str:
        return _tensor(value) if isinstance(value, torch.Tensor) else _value(value, what)

    return text_of(tree, leaf)


def _tensor(tensor: torch.Tensor) -> str:
    placements = f", {list(tensor.placements)}" if is_dtensor(tensor) else ""  # type: ignore[attr-defined]
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{placements}"


def _value(value: Any, what: str) -> str:
    if isinstance(value, (*_PLAIN, *_OF_TORCH)):
        return repr(value)
    if isinstance(value, (set, frozenset, Mapping)) and not tensors_anywhere_in(value):
        return f"{type(value).__name__}({sorted(map(repr, value.items() if isinstance(value, Mapping) else value))})"
    if hasattr(value, "__array_interface__"):
        if not getattr(value, "shape", None):  # a number
            return repr(value)
        raise FSDPValueError(f"a graphed step {what} an array that is no tensor: make it one, by torch.from_numpy.")
    if isinstance(value, Iterator):
        raise FSDPValueError(
            f"a graphed step {what} an iterator ({type(value).__name__}), which only the recording would read: take "
            "from it outside, and pass what it yields."
        )
    if not isinstance(value, _LOOKED_AT) and tensors_anywhere_in(value):
        raise FSDPValueError(
            f"a graphed step {what} tensors inside of a {type(value).__name__}, where a graph could not replace them: "
            "use lists, tuples, dicts or dataclasses. (What is the same in each call, the step can take from outside.)"
        )
    return f"{type(value).__name__} at {id(value):#x}"


def static(given: torch.Tensor, device: torch.device, known: list[torch.Tensor]) -> torch.Tensor:
    """A tensor of its own for an argument, where the recorded step reads it; added to ``known``."""
    refuse_differentiable(given)
    own = given.detach().clone() if is_dtensor(given) else given.detach().to(device).clone()
    known.append(own)
    return own


def refuse_differentiable(given: torch.Tensor) -> None:
    """Refuse an argument that requires a gradient: a graph does not give one back.

    Raises:
        FSDPValueError: ``given`` requires one.
    """
    if given.requires_grad:
        raise FSDPValueError(
            f"a graphed step was given a tensor of shape {tuple(given.shape)} that requires a gradient, which no graph "
            "gives back: detach it."
        )


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has placements."""
    return hasattr(tensor, "placements")
