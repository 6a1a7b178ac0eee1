"""A model that was written in part refuses to run, until a load has succeeded."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn

from fsdp2.checkpoint.errors import CheckpointDamaged

_BLOCKED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def block(model: nn.Module, error: BaseException) -> None:
    """Let forwards of ``model`` and of its parts raise: a load has failed after it began to write, by ``error``."""
    unblock(model)
    why = next(iter(str(error).splitlines()), type(error).__name__)

    def refuse(*_: Any) -> NoReturn:
        raise CheckpointDamaged(
            f"the parameters are those of a load that failed half-way ({why}): load a checkpoint before the next "
            "forward."
        )

    # Also those that only have parts with parameters: compiled ones among them do not look at hooks of their parts.
    for module in model.modules():
        if any(True for tensors in (module.parameters(), module.buffers()) for _ in tensors):
            _BLOCKED[module] = module.register_forward_pre_hook(refuse)


def unblock(model: nn.Module) -> None:
    """A load of ``model`` has succeeded."""
    for module in model.modules() if _BLOCKED else ():
        handle = _BLOCKED.pop(module, None)
        if handle is not None:
            handle.remove()
