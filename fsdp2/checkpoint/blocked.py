"""A model that was written in part refuses to run, until a load has succeeded."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn

from fsdp2.checkpoint.errors import CheckpointDamaged

_BLOCKED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def block(model: nn.Module, why: str) -> None:
    """Let forwards of ``model`` raise: a load has failed after it began to write, for the reason ``why``."""
    unblock(model)

    def refuse(*_: Any) -> NoReturn:
        raise CheckpointDamaged(
            f"the parameters are those of a load that failed half-way ({why}): load a checkpoint before the next "
            "forward."
        )

    _BLOCKED[model] = model.register_forward_pre_hook(refuse)


def unblock(model: nn.Module) -> None:
    """A load has succeeded."""
    handle = _BLOCKED.pop(model, None)
    if handle is not None:
        handle.remove()
