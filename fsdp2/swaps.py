"""What the modules of a group hold now, compared with what it has registered there. On the hot path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fsdp2 import _torch
from fsdp2.param import FSDPParam

Swap = tuple[Any, str, FSDPParam]
"""A mapping of registered parameters, the name in it, and whose parameter belongs there."""


def hold_sharded(swaps: Sequence[Swap]) -> bool:
    """Whether the modules hold the sharded parameters, as they were when the plan was made."""
    local_of = _torch.local_of
    for mapping, name, param in swaps:
        found = mapping.get(name)
        if (
            found is not param.sharded
            or local_of(found) is not param.local
            or found.requires_grad is not param.requires_grad
        ):
            return False
    return True


def hold_post_forward(swaps: Sequence[Swap]) -> bool:
    """Whether they hold what was registered after forward, neither frozen nor unfrozen."""
    for mapping, name, param in swaps:
        found: nn.Parameter | None = mapping.get(name)
        if found is None or found is not param.resting or found.requires_grad is not param.requires_grad:
            return False
    return True
