"""Torch's ``FSDPMemTracker``, for modules that fsdp2 has sharded.

Torch's class puts itself in the place of methods of torch's own states and groups. What it measures then is left to it;
this class says where it is called: around what our hooks do before and after a forward and a backward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fsdp2.modules.module import FSDPModule

DEFINED_IN = "torch.distributed._tools.fsdp2_mem_tracker"
"""Loaded when a program asks for it: it takes more than half a second."""

NAME = "FSDPMemTracker"


def for_our_modules(torchs: Any) -> type:
    """A class like torch's, of which it takes the module whose attribute it is."""
    kinds: Any = vars(sys.modules[DEFINED_IN])["_FSDPRefType"]
    changed: Any = vars(sys.modules[torchs.__base__.__module__])["_UpdateType"]

    class FSDPMemTracker(torchs):  # type: ignore[misc]
        __doc__ = torchs.__doc__

        def _groups(self) -> Iterator[Any]:
            for module in self._root_mod.modules():
                if isinstance(module, FSDPModule):
                    yield from module._get_fsdp_state()._fsdp_param_groups

        def _instrument_fsdp_module(self) -> None:
            self._put_back: list[Callable[[], None]] = []
            for module in self._root_mod.modules():
                if isinstance(module, FSDPModule) and module._get_fsdp_state().unit:
                    self._instrument(module)
            for group in self._groups():
                self._instrument_fsdp_sharded_params_grads(group)
            for buffer in self._root_mod.buffers():
                self._update_and_maybe_create_winfos(buffer, kinds.BUFFER)

        def _instrument(self, module: Any) -> None:
            state = module._get_fsdp_state()

            def begin(*args: Any) -> tuple[Any, Any]:
                changed = state.pre_forward(*args)
                return args[1:] if changed is None else changed

            self._replace_hook(module._forward_pre_hooks, state, self._fsdp_state_pre_forward(module, begin))
            self._replace_hook(module._forward_hooks, state, self._fsdp_state_post_forward(module, state.post_forward))
            self._replace_method(state, "_gather_for_backward", self._fsdp_param_group_pre_backward, module)
            self._replace_method(state, "_end_module_backward", self._fsdp_param_group_post_backward, module)

        def get_tracker_snapshot(self, type: str = "current") -> Any:
            """As torch's, once it knows what it has not seen: memory that moved, gradients that have arrived."""
            for storage, (known, _) in list(self._WINFO.items()):
                if known.size != storage.size():
                    before = known.mem_consumed
                    known.update_mem_consumed(storage)
                    self._update_snap(changed.SIZE, known, old_mem_consumed=before)
            for group in self._groups():
                self._instrument_fsdp_sharded_params_grads(group)
            return super().get_tracker_snapshot(type)

        def _update_and_maybe_create_winfos(self, t: Any, reftype: Any, update_existing: bool = False) -> Any:
            # Torch's insists that what it updates was allocated under it; buffers of ours may be older.
            return super()._update_and_maybe_create_winfos(t, reftype)

        def _replace_hook(self, hooks: dict[int, Any], state: Any, replacement: Any) -> None:
            for key, hook in hooks.items():
                if getattr(hook, "__self__", None) is state:
                    hooks[key] = replacement
                    self._put_back.append(functools.partial(hooks.__setitem__, key, hook))
                    return

        def _replace_method(self, state: Any, name: str, around: Callable[..., Any], module: Any) -> None:
            replacement = around(module, getattr(state, name))
            replacement.__self__ = state  # for the names of profiler ranges
            setattr(state, name, replacement)
            self._put_back.append(functools.partial(state.__dict__.pop, name, None))

        def _deregister_module_and_optimizer_hooks(self) -> None:
            while self._put_back:
                self._put_back.pop()()
            super()._deregister_module_and_optimizer_hooks()

    FSDPMemTracker.__module__, FSDPMemTracker.__qualname__ = __name__, NAME
    return FSDPMemTracker
