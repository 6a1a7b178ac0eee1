"""`FSDPModule`: the methods that `fully_shard` mixes into a module's class, and `UnshardHandle`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from fsdp2.common import FSDPNotImplementedError, FSDPRuntimeError, ParamPhase
from fsdp2.param import refuse_share_memory
from fsdp2.param_group import FSDPParamGroup
from fsdp2.state import FSDPState, state_of, states_below

_ORIGINAL_CLASS_INDEX = 2
"""In the MRO of a sharded module's class: FSDP<Name>, FSDPModule, Name."""


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, group: FSDPParamGroup | None) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters. Calling it again does nothing.

        Streams: the current stream waits; on CPU the host does.
        """
        if self._group is not None:
            self._group.wait_for_unshard()
            self._group = None


class FSDPModule:
    """Mixed in front of the class of every module that `fully_shard` was called on.

    ``isinstance(module, OriginalClass)`` keeps holding, and so do the names of parameters and submodules.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module: what builds a new one from ``type(module)``, as slicing does, gets an unsharded one."""
        original = cls.__mro__[_ORIGINAL_CLASS_INDEX]
        plain: Any = original.__new__(original)  # type: ignore[call-overload]
        plain.__init__(*args, **kwargs)
        return plain

    def _state(self) -> FSDPState:
        state = state_of(self)  # type: ignore[arg-type]
        assert state is not None, "an FSDPModule has a state"
        return state

    def _states(self, recurse: bool) -> list[FSDPState]:
        return states_below(self) if recurse else [self._state()]  # type: ignore[arg-type]

    # -- parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather and register this module's own group of parameters, not those of sharded submodules.

        They stay unsharded until `reshard`, or until the end of the module's next forward or backward that reshards.
        Collective: all ranks of the mesh must call it. Initializes lazily, like a forward.

        Args:
            async_op: return at once, with a handle whose ``wait()`` completes it.

        Returns:
            The handle if ``async_op``, else None.
        """
        state = self._state()
        root = state.ensure_root()
        root.recover_if_failed()
        handle = UnshardHandle(state.group)
        try:
            if state.group is not None:
                root.join()
                state.group.unshard()
            if not async_op:
                handle.wait()
        except BaseException:
            root.iteration.failed = True  # the next forward cleans up
            raise
        return handle if async_op else None

    def reshard(self) -> None:
        """Register the sharded parameters of this module's own group and free the unsharded ones.

        No communication. Nothing to do if they are sharded.
        """
        group = self._state().group
        if group is not None:
            group.reshard()

    # -- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; False accumulates them unsharded, without communication.

        The next backward with True reduces the sum. Every rank must set the same.
        """
        for state in self._states(recurse):
            if state.group is not None:
                state.group.requires_gradient_sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for all gradient reductions at its end (default True).

        With False the last ones stay in flight; before gradients are used, a backward must have run with True.
        """
        state = self._state()
        state.is_last_backward = is_last_backward
        if state.root is not None:
            state.root.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the end of forward frees the unsharded parameters (else backward finds them in place)."""
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the end of backward frees the unsharded parameters.

        False saves the next forward its all-gathers when no optimizer step lies between (gradient accumulation). After
        a step the next forward gathers again.
        """
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    # -- iterations

    def reset_iter_state(self) -> None:
        """Drop the running iteration: wait for what is in flight, discard its gradients, reshard everything.

        Call it on the root. Not needed after an exception in forward or backward: the next forward does the same. On a
        module whose submodules ran before it (and so became roots of their own), it makes this module their root.
        Reduced gradients stay: clear them with ``optimizer.zero_grad()``.

        Raises:
            FSDPRuntimeError: this module is not the root.
        """
        state = self._state()
        if state.root is None:
            state.take_over()
        elif state.is_root:
            state.root.reset()
        else:
            raise FSDPRuntimeError(
                f"reset_iter_state() must be called on the root, {state.root.name}, not on '{state.name}'."
            )

    # -- what nn.Module does, on sharded parameters

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Observe exceptions: module hooks do not run on KeyboardInterrupt."""
        try:
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._state().forward_failed()
            raise

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Convert or move the sharded parameters (``to``, ``half``, ``to_empty``), and take the results over."""
        self._state().settle()
        group = self._state().group
        module = super()._apply(fn, recurse)  # type: ignore[misc]
        if group is not None:
            group.adopt_replaced()
        return module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients like `nn.Module.zero_grad`, of sharded parameters also while unsharded ones are registered.

        Gradients accumulated without communication are cleared only while unsharded parameters are registered;
        `reset_iter_state` drops them at any time.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for state in self._states(recurse=True):
            if state.group is not None and state.group.phase is not ParamPhase.SHARDED:
                state.group.zero_grad(set_to_none)

    def share_memory(self) -> NoReturn:
        """Refused: parameters lie in one buffer per group, which cannot be shared in parts."""
        refuse_share_memory()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused in this version."""
        raise FSDPNotImplementedError(
            f"{type(self).__name__} cannot be copied with copy.deepcopy(); build a second model, shard it alike, and "
            "load this one's state_dict() into it."
        )


def mix_in(module: nn.Module) -> None:
    """Change ``module``'s class to one that also derives from `FSDPModule`, in place."""
    original = type(module)
    module.__class__ = type(f"FSDP{original.__name__}", (FSDPModule, original), {"__module__": original.__module__})
