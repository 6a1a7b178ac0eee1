"""What arguments of this package's functions must be."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch.optim import Optimizer

from fsdp2.arguments import Rule


def is_int(value: Any) -> bool:
    """Whether it is an int, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _are_optimizers(value: Any) -> bool:
    if value is None or isinstance(value, Optimizer):
        return True
    several = value.values() if isinstance(value, Mapping) else value
    return isinstance(several, (list, tuple, type({}.values()))) and all(isinstance(e, Optimizer) for e in several)


OPTIMIZER_RULE = Rule("an optimizer of torch, a list or a dict of several, or None", _are_optimizers)
VALUES_RULE = Rule("a dict of names, or None", lambda value: value is None or isinstance(value, MutableMapping))


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


PATH_RULE = Rule("a path that is not empty", lambda value: _is_path(value) and bool(str(value)), _is_path)
BYTES_RULE = Rule("a number of bytes > 0", lambda value: is_int(value) and value > 0, is_int)
STEP_RULE = Rule("an int >= 0, or None", lambda value: value is None or (is_int(value) and value >= 0))
COUNT_RULE = Rule("an int >= 1, or None", lambda value: value is None or (is_int(value) and value >= 1))
ONLY_RULE = Rule(
    "a pattern, several, a function of a name, or None",
    lambda value: (
        value is None
        or isinstance(value, str)
        or callable(value)
        or (isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value))
    ),
)
RENAME_RULE = Rule("a function, or None", lambda value: value is None or callable(value))
