"""Stand-ins where a part of torch must deal with modules of both implementations, or reads what only torch's has.

A program may hold both kinds after the swap: torch's `replicate` derives from torch's own `FSDPModule`, and models may
have been sharded before. What asks "is this an `FSDPModule`?" to decide whether to reduce gradients must not overlook
them.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

PIPELINING = ("torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules")
"""They ask ``isinstance(stage.submod, FSDPModule)`` of any kind of data-parallel stage, and reduce its gradients."""


def either(torchs: type, ours: type) -> type:
    """A class that stands for both in ``isinstance``, and is otherwise ``ours``."""

    class Either(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (torchs, ours))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, (torchs, ours))

    return Either(ours.__name__, (ours,), {"__module__": __name__, "__doc__": ours.__doc__})


@dataclass(frozen=True, slots=True)
class PipelinedState:
    """What `torch.distributed.pipelining` up to 2.14 reads off ``fully_shard.state(module)`` to reduce gradients.

    After the backwards of all microbatches, each without gradient synchronization, it ends the backward of each group
    in ``_state_ctx.all_states`` and then the root's (stage.py, ``perform_reduce_grad``). Here the second does it all,
    in the way that pipelining from 2.15 on takes by itself.
    """

    module: Any
    _state_ctx: SimpleNamespace

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what the microbatches accumulated, wait, and register the sharded parameters.

        Collective, over the mesh of the module.
        """
        self.module.set_manual_backward_finalization(True)
        self.module.finalize_backward()
        self.module.set_manual_backward_finalization(False)


def pipelined(ours: Callable[..., Any], torchs: Any, ours_class: type) -> Callable[..., Any]:
    """``ours``, with the ``state`` that pipelining reads, for modules of both implementations."""

    def state(module: nn.Module) -> Any:
        if isinstance(module, ours_class):
            return PipelinedState(module, SimpleNamespace(all_states=()))
        return torchs.state(module)

    @functools.wraps(ours)
    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    fully_shard.state = state  # type: ignore[attr-defined]
    return fully_shard


def both_mappings(
    ours: Callable[[], MutableMapping[type, type]], torchs: Callable[[], MutableMapping[type, type]]
) -> Callable[[], Mapping[type, type]]:
    """``get_cls_to_fsdp_cls``, for the classes of both implementations. `torch._dynamo` writes guards with it."""

    def get_cls_to_fsdp_cls() -> Mapping[type, type]:
        return ChainMap(ours(), torchs())

    return get_cls_to_fsdp_cls


def both_contexts(
    ours: Callable[[], AbstractContextManager[Any]], torchs: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], AbstractContextManager[None]]:
    """``disable_fsdp_module_new_init``, for both implementations. `torch._dynamo` reads guards under it."""

    @contextmanager
    def disable_fsdp_module_new_init() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(ours())
            stack.enter_context(torchs())
            yield

    return disable_fsdp_module_new_init
