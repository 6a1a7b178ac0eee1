"""Torch's ``FSDPMemTracker``, for modules that fsdp2 has sharded.

Torch's class puts itself in the place of methods of torch's own states and groups. What it measures then is left to it;
this class says where it is called: around what our hooks do before and after a forward and a backward.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fsdp2
from fsdp2 import _torch_names

DEFINED_IN = "torch.distributed._tools.fsdp2_mem_tracker"
"""Loaded when a program asks for it: it takes more than half a second."""

NAME = "FSDPMemTracker"


def for_our_modules(torchs: Any) -> type:
    """A class like ``torchs``, of which it takes what and how it measures; itself where that is not as it was."""
    missing = _torch_names.missing_for(_torch_names.MEMORY_TRACKER)
    if missing:
        warnings.warn(_torch_names.says(_torch_names.MEMORY_TRACKER, missing), stacklevel=2)
        return torchs  # type: ignore[no-any-return]
    names: dict[str, Any] = {
        "__doc__": torchs.__doc__,
        "__module__": __name__,
        "_kinds": vars(sys.modules[torchs.__module__])["_FSDPRefType"],
        "_changes": vars(sys.modules[torchs.__bases__[0].__module__])["_UpdateType"],
    }
    return type(NAME, (_OfOurModules, torchs), names)


def groups_of(module: fsdp2.FSDPModule) -> Any:
    """The groups of ``module`` as torch's tools see them."""
    state: Any = module._get_fsdp_state()
    return state._fsdp_param_groups


class _OfOurModules:
    """What takes the place of methods of torch's class, which follows in the order of resolution.

    Attributes:
        _root_mod: (torch's) the module that is measured.
        _WINFO: (torch's) by storage, what is known of it.
    """

    _kinds: Any
    _changes: Any
    _root_mod: Any
    _WINFO: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._put_back: list[Callable[[], None]] = []

    def get_tracker_snapshot(self, type: str = "current") -> Any:
        """As torch's, once it knows what it has not seen: memory that moved, gradients that have arrived."""
        torchs: Any = super()
        for storage, (known, _) in list(self._WINFO.items()):
            if known.size != storage.size():
                before = known.mem_consumed
                known.update_mem_consumed(storage)
                torchs._update_snap(self._changes.SIZE, known, old_mem_consumed=before)
        for group in self._groups():
            torchs._instrument_fsdp_sharded_params_grads(group)
        return torchs.get_tracker_snapshot(type)

    def _update_and_maybe_create_winfos(self, t: Any, reftype: Any, update_existing: bool = False) -> Any:
        # Torch's insists that what it updates was allocated under it; buffers of ours may be older.
        torchs: Any = super()
        return torchs._update_and_maybe_create_winfos(t, reftype)

    def _groups(self) -> Iterator[Any]:
        for module in self._root_mod.modules():
            if isinstance(module, fsdp2.FSDPModule):
                yield from groups_of(module)

    def _instrument_fsdp_module(self) -> None:
        torchs: Any = super()
        for module in self._root_mod.modules():
            if isinstance(module, fsdp2.FSDPModule) and groups_of(module):
                self._instrument(module)
        for group in self._groups():
            torchs._instrument_fsdp_sharded_params_grads(group)
        for buffer in self._root_mod.buffers():
            self._update_and_maybe_create_winfos(buffer, self._kinds.BUFFER)

    def _instrument(self, module: Any) -> None:
        torchs: Any = super()
        state = module._get_fsdp_state()

        def begin(*args: Any) -> tuple[Any, Any]:
            changed = state.pre_forward(*args)
            return args[1:] if changed is None else changed

        self._replace_hook(module._forward_pre_hooks, state, torchs._fsdp_state_pre_forward(module, begin))
        self._replace_hook(module._forward_hooks, state, torchs._fsdp_state_post_forward(module, state.post_forward))
        if module is state.modules[0]:  # the others of a list share its backward
            self._replace_method(state, "_gather_for_backward", torchs._fsdp_param_group_pre_backward, module)
            self._replace_method(state, "_end_module_backward", torchs._fsdp_param_group_post_backward, module)

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
        self._put_back.append(functools.partial(state.__dict__.pop, name))

    def _deregister_module_and_optimizer_hooks(self) -> None:
        torchs: Any = super()
        while self._put_back:
            self._put_back.pop()()
        torchs._deregister_module_and_optimizer_hooks()
