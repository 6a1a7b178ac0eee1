"""Says that a program has patched parts of torch's `fully_shard` that are never called here.

Such a patch (of a group's ``unshard``, of the collectives, of a parameter's initialization) would be without effect,
and without a word.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from fsdp2._remedies import TOOLS
from fsdp2.core.module import ON_SHARDING

_IMPLEMENTATION = "torch.distributed.fsdp._fully_shard"
_PARTS = {
    "_fsdp_param_group": "FSDPParamGroup",
    "_fsdp_param": "FSDPParam",
    "_fsdp_state": "FSDPState",
    "_fsdp_collectives": "",  # its functions
}
_TORCH = os.path.dirname(torch.__file__)


@functools.cache
def warn_of_patches() -> None:
    """Warn, the first time, of functions of torch's implementation that are another's."""
    found = sorted(_patched())
    if found:
        warnings.warn(
            f"this program has patched {', '.join(found)} of torch's fully_shard, which fsdp2 never calls: the patch "
            f"has no effect on modules that fsdp2 shards. {TOOLS} lists what can be set and read instead.",
            stacklevel=3,
        )


def _patched() -> Iterator[str]:
    for part, name in _PARTS.items():
        module = sys.modules.get(f"{_IMPLEMENTATION}.{part}")
        if module is None:
            continue
        for attribute, member in list(vars(getattr(module, name, module)).items()):
            if (name or attribute.startswith("foreach_")) and _is_others(member):
                yield f"{name}.{attribute}".strip(".")


def _is_others(member: Any) -> bool:
    """Whether ``member`` is a function whose code is not in torch's files."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    if getattr(getattr(function, "__code__", None), "co_filename", "") == contextlib.__file__:
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return code is not None and not code.co_filename.startswith(_TORCH)


ON_SHARDING.append(warn_of_patches)
