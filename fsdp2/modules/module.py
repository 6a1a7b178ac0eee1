"""`FSDPModule`: the methods that `fully_shard` mixes into a module's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn

from fsdp2 import _torch, _torch_compiler
from fsdp2.arguments import ANYTHING, Rule, checked
from fsdp2.common import FSDPRuntimeError, FSDPValueError
from fsdp2.compiled.entry import prepares_graphs
from fsdp2.compiled.support import explained_conversion
from fsdp2.modules import communicating, prefetching
from fsdp2.modules.handles import GradientReductionHandle, UnshardHandle
from fsdp2.modules.module_comm import CommunicationSettings
from fsdp2.modules.module_copies import completed, deepcopied, reduced
from fsdp2.modules.new_modules import NEW_MODULES
from fsdp2.params.param import refuse_share_memory
from fsdp2.plan.strategies import Strategy, refuse_switch, reshard_policy_of
from fsdp2.plan.structure import own_forward_of
from fsdp2.runtime.misuse import explanation_of, refuse_data_parallel
from fsdp2.runtime.param_group import FSDPParamGroup
from fsdp2.runtime.root_checks import refuse_finalization
from fsdp2.runtime.state import FSDPState, state_of, states_below


class _Classes(WeakValueDictionary[type, type]):
    """Classes of sharded modules by their original ones. Those made in functions are let go again.

    Attributes:
        were_any: whether it ever held one, which `fsdp2.compat` asks at the end of a process.
    """

    were_any = False


_CLASSES = _Classes()
_NO_EVENTS = (bool, int, float, str, torch.Tensor)
_EVENT = Rule("a recorded event, or None", lambda value: type(value) not in _NO_EVENTS)


def get_cls_to_fsdp_cls() -> Mapping[type, type]:
    """The classes of sharded modules by their original classes, as long as there are modules of them."""
    return _CLASSES


class FSDPModule:
    """Mixed in front of the class of every module that `fully_shard` was called on.

    ``isinstance(module, OriginalClass)`` keeps holding, and so do the names of parameters and submodules. Settings
    apply to the module's own groups; those with ``recurse`` to all sharded modules below as well. Every rank must set
    the same.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module: what builds a new one from ``type(module)``, as slicing does, gets an unsharded one."""
        original = _original_class(cls)
        plain: Any = original.__new__(original)  # type: ignore[call-overload]
        if NEW_MODULES.are_initialized:
            plain.__init__(*args, **kwargs)
        return plain

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(self)  # type: ignore[arg-type]
        assert state is not None, "an FSDPModule has a state"
        return state

    def _states(self, recurse: bool) -> list[FSDPState]:
        return states_below(self) if recurse else [self._get_fsdp_state()]  # type: ignore[arg-type]

    def _communication(self, *, recurse: bool) -> CommunicationSettings:
        return CommunicationSettings(self._groups(recurse))

    def _groups(self, recurse: bool) -> list[FSDPParamGroup]:
        """Those that the modules' own `fully_shard` calls made: settings of a tied weight are its owner's."""
        return [group for state in self._states(recurse) for group in state.unit if group.sharers[0] is state]

    # -- parameters

    @checked()
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather and register this module's own parameters, not those of sharded submodules.

        They stay unsharded until `reshard`, or until the end of the module's next forward or backward that reshards.
        Collective: all ranks of the mesh must call it. Initializes lazily, like a forward.

        Args:
            async_op: return at once, with a handle whose ``wait()`` completes it; the module's next forward does too.

        Returns:
            The handle if ``async_op``, else None.
        """
        state = self._get_fsdp_state()
        root = state.ensure_root()
        root.recover_if_failed()
        handle = UnshardHandle(state.unit)
        try:
            if state.unit:
                root.join()
                for group in state.unit:
                    group.unshard(user_initiated=async_op)
            if not async_op:
                handle.wait()
        except BaseException:
            root.iteration.failed = True  # the next forward cleans up
            raise
        return handle if async_op else None

    def reshard(self) -> None:
        """Register the sharded parameters of this module and free the unsharded ones; not of sharded submodules.

        No communication. Nothing to do if they are sharded. See `set_keep_unsharded_storage`. Inside of the module's
        own backward, which may need them yet, it is left to the end of that.
        """
        state = self._get_fsdp_state()
        if state._in_backward and _torch.backward_is_running():
            return
        for group in state.unit:
            group.reshard()
        if state.root is not None:
            state.root.comm.let_host_write_shards()

    @checked(reshard_after_forward=ANYTHING)
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the end of forward frees the unsharded parameters (else backward finds them in place).

        Takes the place of the argument of `fully_shard`, also of an int, and of the root's default.

        Raises:
            FSDPValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise FSDPValueError(f"reshard_after_forward must be a bool here, got {reshard_after_forward!r}.")
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward
        for group in self._groups(recurse):
            group.rest_on_all_ranks()

    @checked()
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the end of backward frees the unsharded parameters.

        False saves the next forward its all-gathers when no optimizer step lies between (gradient accumulation). After
        a step the next forward gathers again.
        """
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    @checked(strategy=ANYTHING)
    def set_strategy(self, strategy: Strategy, *, recurse: bool = True) -> None:
        """Go on with another ZeRO stage: see ``strategy`` of `fully_shard`. Nothing is communicated or moved.

        To be called between iterations. Takes the place of ``reshard_after_forward``, of `set_reshard_after_forward`
        and of `set_reshard_after_backward`; of these the last call counts. Parameters, gradients and the optimizer's
        state stay where they are.

        Args:
            strategy: ``"zero1"``, ``"zero2"`` or ``"zero3"``; ``"replicate"`` only where it is replicated already.
            recurse: whether all sharded modules below follow.

        Raises:
            FSDPValueError: no such strategy; or from ``"replicate"`` to another or back, which `unwrap` followed by
                `fully_shard` does.
        """
        reshard_policy, states = reshard_policy_of(strategy), self._states(recurse)
        for state in states:
            refuse_switch(strategy, state.mesh, state.name)
        for state in states:
            state.reshard_after_forward, state.reshard_after_backward = reshard_policy
        for group in self._groups(recurse):
            group.rest_on_all_ranks()

    @checked()
    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether resharding leaves the unsharded parameters their memory.

        Their addresses then repeat from step to step, as CUDA graphs need; their memory is never given back.
        """
        for group in self._groups(recurse):
            group.keep_unsharded_storage(keep)

    @checked()
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this module's parameters. False where it needs none of them (an embedding).

        Raises:
            FSDPValueError: False, and weights are tied to those of other modules, whose backward may need them.
        """
        for group in self._groups(recurse=False):
            if group.is_shared and not unshard_in_backward:
                raise FSDPValueError(
                    f"set_unshard_in_backward(False) on '{group.name}', whose weights are tied to those of another "
                    "module: that one's backward may need them."
                )
            group.unshards_in_backward = unshard_in_backward

    @checked()
    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether the gathers before forward and backward run as asynchronous works of the current stream.

        Recursive. All memory then belongs to the current stream, which avoids fragmentation between streams; only
        explicit prefetching overlaps, and casts before the gather do not.
        """
        for group in self._groups(recurse=True):
            group.set_gathers_on_compute(async_op)

    # -- prefetching

    set_modules_to_forward_prefetch = prefetching.set_modules_to_forward_prefetch
    set_modules_to_backward_prefetch = prefetching.set_modules_to_backward_prefetch
    set_prefetch_budget = prefetching.set_prefetch_budget

    # -- gradients

    @checked()
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, over shards and replicas; False accumulates them, without communication.

        They accumulate unsharded, in ``reduce_dtype`` if the policy has one, else as the parameter's ``grad_dtype``
        says (unset: its original dtype). The next backward with True reduces the sum. ``zero_grad``, of the model or
        of an optimizer, drops them.
        """
        for group in self._groups(recurse):
            group.reducer.requires_gradient_sync = requires_gradient_sync
            group.reducer.requires_all_reduce = requires_gradient_sync

    @checked()
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over replicas too (HSDP); False adds them up after the reduce-scatter.

        The next backward with True all-reduces the sum.
        """
        for group in self._groups(recurse):
            group.reducer.requires_all_reduce = requires_all_reduce

    @checked()
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for all gradient reductions at its end (default True).

        With False the last ones stay in flight; before gradients are used, a backward must have run with True.
        """
        state = self._get_fsdp_state()
        settings = state.settings if state.root is None else state.root.settings
        settings.is_last_backward = is_last_backward

    @checked(event=_EVENT)
    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's all-gathers wait for ``event`` only, recorded after the optimizer's step.

        By default they wait for everything that the current stream has been given. To be set for each iteration.
        """
        state = self._get_fsdp_state()
        settings = state.settings if state.root is None else state.root.settings
        settings.post_optim_event = event

    # -- communication

    set_custom_all_gather = communicating.set_custom_all_gather
    set_custom_reduce_scatter = communicating.set_custom_reduce_scatter
    set_all_reduce_hook = communicating.set_all_reduce_hook
    set_gradient_divide_factor = communicating.set_gradient_divide_factor
    set_gradient_reduction = communicating.set_gradient_reduction
    set_reduce_scatter_divide_factor = communicating.set_reduce_scatter_divide_factor
    set_force_sum_reduction_for_comms = communicating.set_force_sum_reduction_for_comms
    set_reduce_scatter_unused_params = communicating.set_reduce_scatter_unused_params
    set_reduce_scatter_max_input_buffers = communicating.set_reduce_scatter_max_input_buffers
    set_separate_reduce_scatter_group = communicating.set_separate_reduce_scatter_group
    set_allocate_memory_from_process_group_for_comm = communicating.set_allocate_memory_from_process_group_for_comm
    set_symm_mem_for_comm = communicating.set_symm_mem_for_comm
    set_communication_memory_pool = communicating.set_communication_memory_pool

    # -- iterations

    @checked()
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether the user says when backward has ended, with `finalize_backward`; else each backward's end is its own.

        Several backwards can then be one. Takes the place of `set_is_last_backward`. Set it before backward.

        Raises:
            FSDPRuntimeError: this module is not the root, or a backward is running or not finalized.
        """
        state = self._get_fsdp_state()
        root = state.root
        if root is not None and not state.is_root:
            raise FSDPRuntimeError(
                f"set_manual_backward_finalization() must be called on the root, {root.name}, not on '{state.name}'."
            )
        changes = enabled is not state.settings.finalizes_manually
        if root is not None and changes and (root.iteration.in_backward or root.iteration.unfinalized):
            raise FSDPRuntimeError(
                "set_manual_backward_finalization() cannot change while a backward is running or not finalized; call "
                "it before backward, or after finalize_backward()."
            )
        state.settings.finalizes_manually = enabled

    @checked()
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Say that backward has ended: reduce the gradients that are left and reshard, as the settings say. Collective.

        After all backwards of the iteration, on the root, with `set_manual_backward_finalization`. Before the first
        forward there is nothing to do. With several backwards, disable gradient synchronization for them, and enable it
        before this.

        Args:
            async_op: return a handle at once; call its ``wait()`` before the gradients are used, or anything else is
                begun on a root that shares the communication context.

        Returns:
            The handle if ``async_op``, else None.

        Raises:
            FSDPRuntimeError: not the root, not enabled, during a backward, a handle is outstanding, or gradients would
                stop between reduce-scatter and all-reduce.
        """
        state = self._get_fsdp_state()
        root = state.root
        if root is None:
            return GradientReductionHandle() if async_op else None
        refuse_finalization(root, state.name, is_root=state.is_root)
        root.finalize()
        if not async_op:
            root.wait_for_finalization()
            return None
        root.comm.begin_handle(root)
        return GradientReductionHandle(root)

    def reset_iter_state(self) -> None:
        """Drop the running iteration: wait for what is in flight, discard its gradients, reshard everything.

        Call it on the root. Not needed after an exception in forward or backward: the next forward does the same. On a
        module whose submodules ran before it (and so became roots of their own), it drops what these have begun.
        Reduced gradients stay: clear them with ``optimizer.zero_grad()``. An outstanding handle of `finalize_backward`
        is invalidated.

        Raises:
            FSDPRuntimeError: this module is not the root, or a root that shares its communication context has a handle
                outstanding.
        """
        state = self._get_fsdp_state()
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
        """Observe exceptions (module hooks do not run on KeyboardInterrupt), and make graphs possible.

        Dynamo does not take up this frame of a compiled call, so what must happen outside of the graph happens here. It
        takes up the next one, of `_captured_call`, and reaches the module's hooks through it.
        """
        if torch.compiler.is_dynamo_compiling():
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        try:
            if _torch_compiler.frame_callback() and prepares_graphs()(self):
                with self._get_fsdp_state().graph_hooks.called():
                    return self._captured_call(*args, **kwargs)
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._get_fsdp_state().forward_failed(self)  # type: ignore[arg-type]
            explained = explanation_of(error)
            if explained is not None:
                raise explained from error
            raise

    def _captured_call(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Convert or move the sharded parameters (``to``, ``half``, ``to_empty``), and take the results over."""
        state = self._get_fsdp_state()
        for each in self._states(recurse):  # all, before the first of them is converted
            each.quiesce()
        with explained_conversion(state):
            module = super()._apply(fn, recurse)  # type: ignore[misc]
        state.adopt_replaced()
        return module

    def share_memory(self) -> NoReturn:
        """Refused: parameters lie in one buffer per group, which cannot be shared in parts."""
        refuse_share_memory()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What ``DistributedDataParallel`` asks for first."""
        refuse_data_parallel()
        raise AttributeError("_ddp_params_and_buffers_to_ignore")

    # -- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A sharded module of its own: parameters, gradients, hooks, attributes and settings like this one's.

        No communication. Between iterations only; unsharded parameters are resharded first.

        Raises:
            FSDPRuntimeError: inside a forward or backward, or while gradients wait for their reduction.
            FSDPNotImplementedError: the original class copies or pickles itself in a way of its own.
        """
        return deepcopied(self, _original_class(type(self)), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by its original class; see `__deepcopy__` and, for another job, `Facts`."""
        return reduced(self, _original_class(type(self)), super().__reduce_ex__, made_again, int(protocol))

    def __setstate__(self, attributes: Any) -> None:
        """The end of copying and unpickling."""
        super().__setstate__(attributes)  # type: ignore[misc]
        completed()


def new_sharded(original: type, *arguments: Any) -> NoReturn:
    """What pickles of sharded modules begin with that were written before the package was rearranged.

    Raises:
        FSDPRuntimeError: always.
    """
    raise FSDPRuntimeError(
        f"this sharded {original.__name__} was pickled by an earlier fsdp2, whose parts had other names. Unpickle it "
        "with the fsdp2 that wrote it, save its state_dict() (or a distributed checkpoint), and load that here."
    )


def made_again(original: type, *arguments: Any) -> nn.Module:
    """An instance of ``original``, of no attributes yet, with the class that `fully_shard` would give it."""
    module: nn.Module = original.__new__(original, *arguments)
    mix_in(module)
    return module


def _original_class(cls: type) -> type:
    """What `FSDPModule` was mixed in front of: the class behind it in the MRO."""
    classes = cls.__mro__
    original: type = classes[classes.index(FSDPModule) + 1]
    return original


def mix_in(module: nn.Module) -> None:
    """Change ``module``'s class to one that also derives from `FSDPModule`, in place; the same for equal classes."""
    original = type(module)
    sharded = _CLASSES.get(original)
    if sharded is None:
        namespace = {"__module__": original.__module__, **own_forward_of(original)}
        namespace["_captured_call"] = _of_its_own_code(FSDPModule._captured_call)
        # Another rank, a thread of this process, may have made it by now: the first counts.
        made = type(f"FSDP{original.__name__}", (FSDPModule, original), namespace)
        sharded = _CLASSES.setdefault(original, made)
        _CLASSES.were_any = True
    module.__class__ = sharded
    _torch.compose(module, "fully_shard")
    if (state := state_of(module)) is not None:
        _torch.map_state(module, state)
    _torch_compiler.recompile_from(module)


def _of_its_own_code(function: Any) -> Any:
    """A copy of ``function``. Dynamo counts and limits what it compiles by code object: each class has its own."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def mix_out(module: nn.Module) -> None:
    """Take the class back that `mix_in` changed."""
    module.__class__ = _original_class(type(module))
    _torch.decompose(module, "fully_shard")
    _torch_compiler.recompile_from(module)
