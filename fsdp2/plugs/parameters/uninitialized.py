"""Sharded parameters that ``to_empty`` gave memory, but nobody values: they are NaN, and the first forward names them.

Whatever lies in that memory looks like values. No version counter tells whether a value was written, as initialization
often writes through ``.data``. So the memory is filled with NaN, which nobody initializes a parameter with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.param import FSDPParam, fsdp_param_of
from fsdp2.core.root import ON_ROOT

_EMPTY_LIKE = torch.ops.aten.empty_like.default

_FILLED: WeakSet[FSDPParam] = WeakSet()
"""Parameters that were on meta, and got memory that was filled with NaN."""


def serve() -> list[_torch.Undo]:
    """Fill sharded parameters that get memory from now on with NaN."""
    return [_torch.handle_operators({_EMPTY_LIKE: _empty_like})]


def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if isinstance(tensor, _torch.OwnOperators):
        return tensor.run_operator(func, args, kwargs)
    made = _torch.run_unhandled(func, args, kwargs)
    param = fsdp_param_of(tensor) if tensor.is_meta else None
    if param is not None and _can_be_nan(local := _torch.local_of(made)):
        local.fill_(math.nan)
        _FILLED.add(param)
    return made


def _can_be_nan(local: torch.Tensor) -> bool:
    return type(local) is torch.Tensor and local.is_floating_point() and local.element_size() > 1 and not local.is_meta


def warn_of_uninitialized(_: Sequence[Any], groups: Sequence[FSDPParamGroup]) -> None:
    """Warn of parameters of which this rank has rows that are all still NaN."""
    filled = [param for group in groups for param in group.params if param in _FILLED]
    _FILLED.difference_update(filled)
    of_values = [param for param in filled if _can_be_nan(param.local) and param.local.numel()]
    found = [f"'{param.path}'" for param in of_values if param.local.isnan().all()]
    if found:
        rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
        warnings.warn(
            f"parameters were never initialized: {', '.join(found[:3])}{rest}. to_empty() gave them memory without "
            "values, which fsdp2 fills with NaN. After to_empty() call what initializes them (reset_parameters() of "
            "each module, or the model's own function), or load a state dict.",
            stacklevel=2,
        )


ON_ROOT.append(warn_of_uninitialized)
