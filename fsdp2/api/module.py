"""`FSDPModule`: the methods that `fully_shard` mixes into a module's class."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NoReturn, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from fsdp2 import _torch, _torch_compiler
from fsdp2.api.copied import completed, reduced
from fsdp2.api.misuse import explanation_of, refuse_data_parallel
from fsdp2.api.shown import on_one_line
from fsdp2.api.zero_stages import set_strategy
from fsdp2.arguments import ANYTHING, Rule, checked, is_number, shown
from fsdp2.compiled.entry import prepares_graphs
from fsdp2.compiled.support import explained_conversion
from fsdp2.core.agreement import refuse_finalization
from fsdp2.core.backward import Stage
from fsdp2.core.failure import ABANDON, recover_if_failed, reset
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.hooks import STATE
from fsdp2.core.options import (
    DEFAULT,
    FREE,
    AllGather,
    ReduceScatter,
    RootSettings,
    check_comm,
    denominator_of,
    refuse_settings,
)
from fsdp2.core.param import refuse_share_memory
from fsdp2.core.prefetch import Unit
from fsdp2.core.root import FSDPRoot
from fsdp2.core.state import FSDPState, Strategy, state_of, states_below
from fsdp2.core.structure import NO_FORWARD
from fsdp2.core.traits import give_traits, traits_of
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError
from fsdp2.plugs.transports.custom_collectives import set_in_memory

# The handles that the asynchronous methods of `FSDPModule` return.


class UnshardHandle:
    """The handle that `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, unit: Unit = (), root: FSDPRoot | None = None) -> None:
        self._unit = unit
        self._root = root

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters. Calling it again does nothing.

        After an exception (out of memory) the next forward starts clean.

        Streams: the current stream waits; on CPU the host does.

        Raises:
            FSDPRuntimeError: an exception came while it was waited for before.
        """
        try:
            for group in self._unit:
                _torch.outside_selective_checkpoints(group.wait_for_unshard)
        except BaseException:
            if self._root is not None:
                self._root.iteration.failed = True  # the next forward cleans up
            raise
        self._unit = ()


class GradientReductionHandle:
    """The handle that `FSDPModule.finalize_backward(async_op=True)` returns."""

    def __init__(self, root: FSDPRoot | None = None) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait for the gradient reductions, and deliver the gradients. Calling it again does nothing.

        Raises:
            FSDPRuntimeError: `FSDPModule.reset_iter_state` dropped them in the meantime.
        """
        root, self._root = self._root, None
        if root is None:
            return
        if not root.comm.is_unfinished(root):
            raise FSDPRuntimeError(
                "this handle was invalidated by reset_iter_state(), which dropped the gradients it stood for."
            )
        root.comm.end_handle()
        root.wait_for_finalization()


# Calling a sharded module's class makes a plain module; this thread has chosen whether it is initialized.


class _NewModules(threading.local):
    are_initialized = True


NEW_MODULES = _NewModules()
"""Whether ``__init__`` runs. Each thread has its own choice, since ranks may be threads of one process."""


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """While this is entered, making an instance of a sharded module's class does not run ``__init__``."""
    before, NEW_MODULES.are_initialized = NEW_MODULES.are_initialized, False
    try:
        yield
    finally:
        NEW_MODULES.are_initialized = before


class _Classes(WeakValueDictionary[type, type]):
    """Classes of sharded modules by their original classes. They are held weakly, as classes may be made in functions.

    Attributes:
        were_any: whether it has ever held a class; `fsdp2.compat` asks this at the end of a process.
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

    ``isinstance(module, OriginalClass)`` stays true, and parameters and submodules keep their names. Settings apply to
    the module's own groups, and with ``recurse`` to all sharded modules below as well. Every rank must set the same.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module: code that builds one from ``type(module)``, as slicing does, gets an unsharded one."""
        original = _original_class(cls)
        plain: Any = original.__new__(original)  # type: ignore[call-overload]
        if NEW_MODULES.are_initialized:
            plain.__init__(*args, **kwargs)
        return plain

    def _get_fsdp_state(self) -> FSDPState:
        return _state(self)

    # -- parameters

    @checked()
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather and register this module's own parameters, not those of sharded submodules.

        They stay unsharded until `reshard`, or until the end of the module's next forward or backward that reshards.
        Results that are computed with them outside of forward can be differentiated like any others; while autograd has
        saved parameters for that, they keep their memory.
        Collective: all ranks of the mesh must call it. Like a forward, it initializes lazily.

        Args:
            async_op: return at once, with a handle whose ``wait()`` completes it; the module's next forward does too.

        Returns:
            The handle if ``async_op``, else None.
        """
        state = _state(self)
        root = state.ensure_root()
        recover_if_failed(root)
        handle = UnshardHandle(state.unit, root)
        try:
            if state.unit:
                root.join()
                for group in state.unit:
                    _torch.outside_selective_checkpoints(functools.partial(group.unshard, user_initiated=async_op))
            if not async_op:
                handle.wait()
                if torch.is_grad_enabled() and not root.is_running():
                    root.watched.lend(state.unit)
        except BaseException:
            root.iteration.failed = True  # the next forward cleans up
            raise
        return handle if async_op else None

    def reshard(self) -> None:
        """Register the sharded parameters of this module, not of sharded submodules, and free the unsharded ones.

        Nothing is communicated; if they are sharded, nothing is done. With `set_keep_unsharded_storage` the memory is
        kept. Inside of the module's own backward, which may still need them, the end of that backward reshards.
        """
        state = _state(self)
        if state.backward.stage is Stage.RUNNING and _torch.backward_is_running():
            return
        for group in state.unit:
            group.reshard(by_user=True)
        if state.root is not None:
            state.root.comm.let_host_write_shards()

    @checked(reshard_after_forward=ANYTHING)
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the end of forward frees the unsharded parameters (else backward finds them in place).

        It overrides the argument of `fully_shard`, also an int, and the root's default.

        Raises:
            FSDPValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise FSDPValueError(f"reshard_after_forward must be a bool here, got {reshard_after_forward!r}.")
        for state in _states(self, recurse):
            state.reshard_after_forward = reshard_after_forward
        for group in _groups(self, recurse):
            group.rest_on_all_ranks()

    @checked()
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the end of backward frees the unsharded parameters.

        False saves the next forward its all-gathers when no optimizer step lies between (gradient accumulation). After
        a step the next forward gathers again.
        """
        for state in _states(self, recurse):
            state.reshard_after_backward = reshard_after_backward

    @checked(strategy=ANYTHING)
    def set_strategy(self, strategy: Strategy, *, recurse: bool = True) -> None:
        """Go on with another ZeRO stage: see ``strategy`` of `fully_shard`. Nothing is communicated or moved.

        Call it between iterations. It overrides ``reshard_after_forward``, `set_reshard_after_forward` and
        `set_reshard_after_backward`; the last call among these counts. Parameters, gradients and the optimizer's state
        stay where they are.

        Args:
            strategy: ``"zero1"``, ``"zero2"`` or ``"zero3"``; ``"replicate"`` only where it is replicated already.
            recurse: whether all sharded modules below follow.

        Raises:
            FSDPValueError: no such strategy; or from ``"replicate"`` to another or back, which `unwrap` followed by
                `fully_shard` does.
        """
        set_strategy(strategy, list(_states(self, recurse)))
        for group in _groups(self, recurse):
            group.rest_on_all_ranks()

    @checked()
    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether resharding leaves the unsharded parameters their memory.

        Their addresses then repeat from step to step, as CUDA graphs need; their memory is never given back.

        Raises:
            FSDPRuntimeError: False, and a graph was captured that uses the memory.
        """
        _configure(self, recurse, keeps_unsharded_storage=keep)

    @checked()
    def set_full_precision(self, full_precision: bool, *, recurse: bool = True) -> None:
        """Whether to compute in the parameters' original dtype, as if the policies had no ``param_dtype``.

        This is for evaluating a model in full precision that is trained in another. Inputs are not cast then. Each
        change lays the unsharded buffers out anew. Every rank must set the same.

        Raises:
            FSDPRuntimeError: a forward or backward is running; gradients wait for their reduction in the former dtypes;
                or `full_parameters` has registered full parameters.
        """
        states = _states(self, recurse)
        for state in states:
            state.refuse_other_precision()
        for state in states:
            state.in_full_precision = full_precision
        _configure(self, recurse, full_precision=full_precision)

    @checked()
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this module's parameters. Set False if it needs none of them (an embedding).

        Raises:
            FSDPValueError: False, and weights are tied to those of other modules, whose backward may need them.
        """
        _configure(self, unshards_in_backward=unshard_in_backward)

    @checked()
    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether the gathers before forward and backward run as asynchronous works of the current stream.

        This applies to all sharded modules below, too. All memory then belongs to the current stream, which avoids
        fragmentation between streams. Only explicit prefetching overlaps then, and casts before the gather do not.
        """
        _configure(self, recurse=True, gathers_on_compute=async_op)

    # -- prefetching

    @checked(modules=ANYTHING)
    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather the parameters of ``modules`` in forward right after this module's.

        This overrides the learned order of prefetches. With two or more modules the gathers run further ahead, at the
        cost of memory. An empty list goes back to the learned order.

        Raises:
            FSDPValueError: not a list of sharded modules.
        """
        _state(self).forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")

    @checked(modules=ANYTHING)
    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather the parameters of ``modules`` in backward right after this module's.

        See `set_modules_to_forward_prefetch`.

        Raises:
            FSDPValueError: not a list of sharded modules.
        """
        units = _units_of(modules, "set_modules_to_backward_prefetch")
        # The groups of a module are needed in reverse in backward.
        _state(self).backward_prefetch = units and tuple(unit[::-1] for unit in units)

    @checked(nbytes=ANYTHING)
    def set_prefetch_budget(self, nbytes: int | None) -> None:
        """How many bytes of unsharded parameters may be gathered ahead, in forward and in backward.

        Modules are gathered ahead in the order of the last iteration as long as all of them together stay within
        ``nbytes``: 0 gathers nothing ahead (where communication blocks, this saves the memory of one module's call and
        costs nothing), and two to three modules' bytes keep a slow network busy behind modules of uneven cost. None,
        the default, gathers one module ahead, whatever its size. Modules with a list of their own
        (`set_modules_to_forward_prefetch`) are not affected. Set it on the root, the same on all ranks, outside of
        forward and backward.

        Raises:
            FSDPValueError: neither None nor an int >= 0.
            FSDPRuntimeError: this module is not the root, or an iteration is running.
        """
        _configure_as_root(self, "set_prefetch_budget", prefetch_bytes=nbytes)

    @checked()
    def set_backward_prefetch(self, when: str) -> None:
        """When a module's backward gathers ahead the modules that come next.

        With "before", the default, it does so before its own gradients are computed: communication overlaps with that
        computation. With "after" it does so once it was resharded: this saves one module's memory, and the gather
        overlaps with the end of the backward alone. With "never" each module is gathered when its own backward begins.
        Forwards, and modules with a list of their own (`set_modules_to_backward_prefetch`), are not affected. Set it on
        the root, the same on all ranks, outside of forward and backward.

        Raises:
            FSDPValueError: another word.
            FSDPRuntimeError: this module is not the root, or an iteration is running.
        """
        _configure_as_root(self, "set_backward_prefetch", backward_prefetch=when)

    @checked()
    def set_replica_check(self, parameters: bool = True, buffers: bool = True) -> None:
        """Whether replicas compare their parameters and buffers when training begins. On by default.

        In the first forward with gradients (since weights are often loaded after `fully_shard`) the ranks that hold the
        same rows of a parameter (hybrid sharding, `replicate`) compare checksums of them. Training assumes that they
        are equal, and nothing makes them so later. If parameters differ, all ranks of the mesh raise an
        FSDPRuntimeError that names them; if buffers differ, they warn. Set it on the root, the same on all ranks,
        outside of forward and backward.

        Args:
            parameters: whether parameters are compared.
            buffers: whether buffers are compared.

        Raises:
            FSDPTypeError: not a bool.
            FSDPRuntimeError: this module is not the root, or an iteration is running.
        """
        _configure_as_root(self, "set_replica_check", compares_parameters=parameters, compares_buffers=buffers)

    @checked(on_error=ANYTHING)
    def set_recovery(self, on_error: str = "keep_accumulated", abort_together: bool = False) -> None:
        """Which gradients are kept when an exception leaves a step, and whether all ranks leave it.

        See 'When ranks fail, or differ' in the documentation.

        Parameters and optimizer states are never touched. Set it on the root, the same on all ranks, outside of forward
        and backward.

        Args:
            on_error: "keep_accumulated", the default: a failed forward drops nothing. A failed backward drops, with a
                warning, the gradients that earlier microbatches have accumulated without communication; it leaves in
                each ``.grad`` what had been reduced by then, so call zero_grad(). "drop_step": the next forward begins
                without any gradient, whatever failed, so that a program that goes on with the next batch never steps on
                partial gradients.
            abort_together: if an exception leaves forward or backward on one rank, the others leave the step, too: each
                raises an FSDPRuntimeError that names the rank, in its next collective, or out of the one that it waits
                in. The program calls nothing for it, and the process group stays usable. It needs gloo, at most 64
                ranks in a process group, and the watchdog (`set_watchdog`).

        Raises:
            FSDPTypeError: ``abort_together`` is no bool.
            FSDPValueError: another word.
            FSDPRuntimeError: this module is not the root, or an iteration is running.
            FSDPNotImplementedError: ``abort_together`` without a watchdog, or with a backend whose messages carry no
                label.
        """
        if abort_together:
            ABANDON.filling.refuse_if_alone(_groups(self, recurse=True))
        _configure_as_root(self, "set_recovery", on_error=on_error, aborts_together=abort_together)

    @checked(on_difference=ANYTHING)
    def set_divergence(self, on_difference: str = "error", order: Sequence[nn.Module] | None = None) -> None:
        """Whether ranks may run different sharded modules in a step.

        See 'Ranks that run different modules on purpose' in the documentation.

        Set it on the root, the same on all ranks, outside of forward and backward. The next forward compares it.

        Args:
            on_difference: "error", the default: all ranks must run the same modules in the same order; where they do
                not, all raise (`set_watchdog`). "join": a rank that skips modules (early exit, layers dropped by rank,
                experts without tokens, nothing to do in a batch) takes part in their gathers and reductions all the
                same, and contributes nothing, so that gradients are the mean over all ranks as usual. All ranks must
                begin as many forwards and backwards of the root; `join_step` stands for those that a rank lacks.
            order: for "join", the sharded modules in the order in which forward comes to them; one that it calls k
                times is listed k times. The default is the order of the last step, if that ran all modules, else their
                order in the model.

        Raises:
            FSDPValueError: another word; ``order`` names a module that is not below, or that was not sharded.
            FSDPRuntimeError: this module is not the root, or an iteration is running.
        """
        names = None if order is None else _names_in_order(cast(nn.Module, self), order)
        _configure_as_root(self, "set_divergence", divergence=on_difference, divergence_order=names)

    @checked()
    def join_step(self) -> None:
        """Let this rank, which has nothing to run, take part in a step of the others: after ``set_divergence("join")``.

        It stands for a forward and a backward that contribute no gradient; in `torch.no_grad` for a forward alone.
        After a forward whose backward this rank lacks, it stands for that backward; after a forward that an exception
        has left, it goes through the rest of that first. ``.grad`` is then set as on the other ranks. Collective: the
        others run the root meanwhile, or call this.

        Raises:
            FSDPRuntimeError: this module is not the root; ``set_divergence("join")`` was not called; a forward or
                backward is running; or an exception has left a backward.
        """
        _state(self).join_step()

    # -- gradients

    @checked()
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, over shards and replicas; False accumulates them without communication.

        They accumulate unsharded, in ``reduce_dtype`` if the policy has one, else in the parameter's ``grad_dtype``
        (its original dtype if that is unset). The next backward with True reduces the sum. ``zero_grad`` of the model
        or of an optimizer drops them.
        """
        _configure(
            self, recurse, requires_gradient_sync=requires_gradient_sync, requires_all_reduce=requires_gradient_sync
        )

    @checked()
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over replicas too (HSDP); False adds them up after the reduce-scatter.

        The next backward with True all-reduces the sum.
        """
        _configure(self, recurse, requires_all_reduce=requires_all_reduce)

    @checked()
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for all gradient reductions at its end (default True).

        With False the last ones stay in flight; before gradients are used, a backward must have run with True.
        """
        _state(self).configure_root(is_last_backward=is_last_backward)

    @checked(event=_EVENT)
    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's all-gathers wait for ``event`` only, recorded after the optimizer's step.

        By default they wait for everything that the current stream has been given. Set it in each iteration, before
        ``zero_grad()`` if the optimizer runs on another stream than forward.
        """
        state = _state(self)
        holder = state if state.root is None else state.root
        holder.post_optim_event = event

    # -- communication

    @checked(comm=ANYTHING)
    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters with ``comm``, packed into buffers that it allocates.

        Raises:
            FSDPTypeError: it cannot be called, or has no ``allocate``.
            FSDPValueError: the module's parameters are on several meshes.
        """
        check_comm(comm, "set_custom_all_gather")
        _configure_groups(_groups_of_one_mesh(self, "set_custom_all_gather"), {"custom_all_gather": comm})

    @checked(comm=ANYTHING)
    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's gradients with ``comm``, packed into buffers that it allocates.

        Raises:
            FSDPTypeError: it cannot be called, or has no ``allocate``.
            FSDPValueError: the module's parameters are on several meshes.
        """
        check_comm(comm, "set_custom_reduce_scatter")
        _configure_groups(_groups_of_one_mesh(self, "set_custom_reduce_scatter"), {"custom_reduce_scatter": comm})

    @checked()
    def set_all_reduce_hook(self, hook: Callable[[Any], None], *, stream: Any = None) -> None:
        """Call ``hook`` with the flat reduced gradients before they are delivered: for an all-reduce of one's own.

        The flat tensor also holds one element per parameter that says whether any rank had a gradient: reduce or scale
        it as a whole.

        Args:
            hook: called after the reduce-scatter, or after the all-reduce over replicas if there is one.
            stream: the stream that it is called on, by default the all-reduce stream. Not possible with replicas.

        Raises:
            FSDPTypeError: ``hook`` cannot be called.
            FSDPValueError: ``stream`` with replicas, or parameters on several meshes.
        """
        groups = _groups_of_one_mesh(self, "set_all_reduce_hook")
        _configure_groups(groups, {"all_reduce_hook": hook, "all_reduce_hook_stream": stream})

    @checked(factor=ANYTHING)
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over all ranks by ``factor``, instead of by the number of ranks.

        NCCL multiplies before it sums, where it can; elsewhere the sum is divided.

        Raises:
            FSDPValueError: not a positive number.
        """
        if not is_number(factor):
            raise FSDPValueError(f"set_gradient_divide_factor takes a positive number, got {factor!r}.")
        _configure(self, divide_factor=float(factor), denominator=None)

    @checked(reduction=ANYTHING)
    def set_gradient_reduction(self, reduction: str | float | torch.Tensor, *, recurse: bool = True) -> None:
        """How the gradients of the data-parallel ranks are combined, from the next reduction on, with every backend.

        Args:
            reduction: ``"mean"``, the default; ``"sum"``; or a number or one-element tensor to divide the sum by, such
                as the number of tokens in the batches of all ranks (it must be the same on every rank; with a loss that
                is the sum over a rank's tokens, every token then counts the same). It may be set anew in every step at
                no cost, and the host does not wait for a tensor on the device. The last call of this or
                `set_gradient_divide_factor` counts.
            recurse: whether all sharded modules below follow. A parameter on a mesh of its own (an expert's) is summed
                over that mesh, so that the same number is right for it too, unlike a mean.

        Raises:
            FSDPValueError: not one of these, or a number (on the host) that is not positive.
            FSDPRuntimeError: gradients that were scaled otherwise wait for their all-reduce over replicas.
        """
        if isinstance(reduction, str) and reduction not in ("mean", "sum"):
            raise FSDPValueError(
                "set_gradient_reduction takes 'mean', 'sum' or a positive number to divide the sum by, got "
                f"{reduction!r}."
            )
        _configure(
            self,
            recurse,
            divide_factor=1.0 if isinstance(reduction, str) and reduction == "sum" else None,
            denominator=None if isinstance(reduction, str) else denominator_of(reduction),
        )

    @checked(factor=ANYTHING)
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated: call `set_gradient_divide_factor`."""
        old, new = "set_reduce_scatter_divide_factor", "set_gradient_divide_factor"
        warnings.warn(f"{old} is deprecated; use {new}.", DeprecationWarning, stacklevel=3)
        self.set_gradient_divide_factor(factor)

    @checked()
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives only sum, and scale gradients separately: some fast paths of NCCL can do nothing else."""
        _configure(self, only_sums=enable)

    @checked()
    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters without a gradient on any rank get one of zeros; else their ``.grad`` stays as it is.

        Parameters that are used on some ranks only are reduced in any case.
        """
        _configure(self, recurse, zeros_for_unused=reduce_scatter_unused_params)

    @checked(max_input_buffers=ANYTHING)
    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight while backward goes on (default 1); each keeps its input alive.

        The largest number set on any group counts.

        Raises:
            FSDPTypeError: not an int.
            FSDPValueError: less than 1.
        """
        _configure(self, recurse, max_pending=max_input_buffers)

    @checked()
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters have a process group of their own, so that they run beside all-gathers.

        It makes process groups, one for each set of ranks, so all ranks must call it.
        """
        _configure(self, recurse, has_scatter_group=enable)

    @checked()
    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether communication buffers come from the process group's own allocator, if it has one.

        Raises:
            FSDPRuntimeError: a custom collective is set, which allocates its own buffers.
        """
        groups, method = _groups(self, recurse=False), "set_allocate_memory_from_process_group_for_comm"
        set_in_memory(groups, method, None, enable)

    @checked()
    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Put the buffers of all-gathers into symmetric memory, and those of reduce-scatters if they only sum.

        Raises:
            FSDPRuntimeError: a custom collective is set, which allocates its own buffers.
            FSDPValueError: another backend than "NCCL".
        """
        if backend != "NCCL":
            raise FSDPValueError(f"set_symm_mem_for_comm knows the backend 'NCCL' only, got {backend!r}.")
        set_in_memory(_groups(self, recurse=False), "set_symm_mem_for_comm", backend, True)

    @checked()
    def set_communication_memory_pool(self, enable: bool) -> None:
        """Whether memory for communication is kept from use to use, instead of being allocated and freed each time.

        This is the memory of unsharded parameters, staging buffers and reduced gradients. A steady-state step then
        allocates nothing for communication, and its addresses repeat. The pool keeps at most what steps had in use at
        the same time, also between steps. A tensor whose memory was reused is as invalid as one on freed memory: it
        never shows another layer's values. Call it on the root, on any ranks, outside of forward and backward. It is
        off by default.

        Raises:
            FSDPTypeError: not a bool.
            FSDPNotImplementedError: torch is older than 2.13, which cannot move memory between storages.
            FSDPRuntimeError: this module is not the root, an iteration is running, or the pool is turned off though a
                captured graph uses it.
        """
        if enable and not _torch.can_swap_memory:
            raise FSDPNotImplementedError(
                f"set_communication_memory_pool(True) needs torch 2.13 or later, this is {torch.__version__}: earlier "
                "ones cannot move memory from one storage to another. set_keep_unsharded_storage(True) keeps the "
                "memory of unsharded parameters, at the cost of all of it."
            )
        root = _state(self).root
        if root is not None and not enable:
            root.comm.refuse_to_drop_pools()
        _configure_as_root(self, "set_communication_memory_pool", pools_memory=enable)
        if root is not None:
            root.comm.pool_memory(enable)

    # -- iterations

    @checked()
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether the user calls `finalize_backward` when backward has ended; else each backward finalizes itself.

        Several backwards can then count as one. It overrides `set_is_last_backward`. Set it before backward.

        Raises:
            FSDPRuntimeError: this module is not the root, or a backward is running or not finalized.
        """
        state = _state(self)
        root = state.root
        if root is not None and not state.is_root:
            raise FSDPRuntimeError(
                f"set_manual_backward_finalization() must be called on the root, {root.name}, not on '{state.name}'."
            )
        changes = enabled is not state.root_settings.finalizes_manually
        if root is not None and changes:
            recover_if_failed(root)
        if root is not None and changes and (root.iteration.in_backward or root.iteration.unfinalized):
            raise FSDPRuntimeError(
                "set_manual_backward_finalization() cannot change while a backward is running or not finalized; call "
                "it before backward, or after finalize_backward()."
            )
        state.configure_root(finalizes_manually=enabled)

    @checked()
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backward: reduce the gradients that are left and reshard, as the settings say. Collective.

        Call it on the root, after all backwards of the iteration, with `set_manual_backward_finalization`. Before the
        first forward it does nothing. With several backwards, disable gradient synchronization for them, and enable it
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
        state = _state(self)
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

        Call it on the root. It is not needed after an exception in forward or backward: the next forward does the same.
        On a module whose submodules ran before it (and so became roots of their own), it drops their iterations.
        Reduced gradients stay: clear them with ``optimizer.zero_grad()``. An outstanding handle of `finalize_backward`
        is invalidated.

        Raises:
            FSDPRuntimeError: this module is not the root, or a root that shares its communication context has a handle
                outstanding.
        """
        state = _state(self)
        if state.root is None:
            state.take_over()
        elif state.is_root:
            reset(state.root)
        else:
            raise FSDPRuntimeError(
                f"reset_iter_state() must be called on the root, {state.root.name}, not on '{state.name}'."
            )

    # -- methods of nn.Module, on sharded parameters

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Observe exceptions (module hooks do not run on KeyboardInterrupt), and make graphs possible.

        Dynamo does not trace this frame of a compiled call, so the work that must stay out of the graph is done here.
        It traces the next frame, that of `_fsdp_captured_call`, and reaches the module's hooks through it.
        """
        if torch.compiler.is_dynamo_compiling():
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        state: FSDPState = self.__dict__[STATE]
        try:
            state.calls += 1
            compiler = _torch_compiler.frame_callback()
            if compiler and (call := prepares_graphs()(self)) is not None:
                with call:
                    if not call.is_captured:
                        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
                    args, kwargs = call.inputs(args, kwargs)
                    with state.graph_hooks.called():
                        output = self._fsdp_captured_call(*args, **kwargs)
                state.backward.await_graph(output)
                return output
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            state.forward_failed(self)  # type: ignore[arg-type]
            explained = explanation_of(error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            state.calls -= 1

    def _fsdp_captured_call(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Convert or move the sharded parameters (``to``, ``half``, ``to_empty``), and take the results over."""
        state = _state(self)
        for each in _states(self, recurse):  # all, before the first of them is converted
            each.quiesce()
        params = [param for group in state.unit for param in group.params]
        traits = [traits_of(param.sharded) for param in params]
        with explained_conversion(state):
            module = super()._apply(fn, recurse)  # type: ignore[misc]
        for param, own in zip(params, traits, strict=True):
            for mapping, name in param.registrations:
                give_traits(own, mapping[name])
        state.adopt_replaced()
        return module

    def extra_repr(self) -> str:
        """The text of the module's own class, and how it is sharded: ``[blocks.3, Shard(0)/8, bf16]``."""
        own: str = super().extra_repr()  # type: ignore[misc]
        state = state_of(self)  # type: ignore[arg-type]
        sharded = "" if state is None else on_one_line(state)
        return ("\n" if "\n" in own else ", ").join(filter(None, (own, sharded)))

    def share_memory(self) -> NoReturn:
        """Raise `FSDPRuntimeError`: parameters lie in one buffer per group, which cannot be shared in parts."""
        refuse_share_memory()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse ``DistributedDataParallel``, which looks for this attribute first."""
        refuse_data_parallel()
        raise AttributeError("_ddp_params_and_buffers_to_ignore")

    # -- copies

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let `copy.deepcopy` copy parameters, gradients, hooks, attributes and settings. Pickling is refused.

        Nothing is communicated. It is possible between iterations only; unsharded parameters are resharded first.
        (A ``__deepcopy__`` would be found by wrappers that look up missing attributes in this module, as their own.)

        Raises:
            FSDPRuntimeError: inside a forward or backward, or while gradients wait for their reduction.
            FSDPNotImplementedError: the original class copies itself in a way of its own.
        """
        return reduced(self, _original_class(type(self)), super().__reduce_ex__, int(protocol), mix_in)

    def __setstate__(self, attributes: Any) -> None:
        """Set the attributes of a copy, and complete the states whose modules have all been copied."""
        super().__setstate__(attributes)  # type: ignore[misc]
        completed()


def _state(module: FSDPModule) -> FSDPState:
    state = state_of(module)  # type: ignore[arg-type]
    assert state is not None, "an FSDPModule has a state"
    return state


def _states(module: FSDPModule, recurse: bool) -> list[FSDPState]:
    return states_below(module) if recurse else [_state(module)]  # type: ignore[arg-type]


def _groups(module: FSDPModule, recurse: bool) -> list[FSDPParamGroup]:
    """The groups that the modules' own `fully_shard` calls made. A tied weight has the settings of its owner."""
    return [group for state in _states(module, recurse) for group in state.unit if group.sharers[0] is state]


def _configure(module: FSDPModule, recurse: bool = False, **changes: Any) -> None:
    """Change settings of the modules' own groups: of all of them, or of none if one refuses."""
    _configure_groups(_groups(module, recurse), changes)


def _configure_as_root(module: FSDPModule, method: str, **changes: Any) -> None:
    """Change settings of roots, between iterations."""
    RootSettings(**changes)
    state = _state(module)
    root = state.root
    if root is not None and not state.is_root:
        raise FSDPRuntimeError(f"{method}() must be called on the root, {root.name}, not on '{state.name}'.")
    if root is not None:
        recover_if_failed(root)
    if root is not None and root.is_running():
        raise FSDPRuntimeError(f"{method}() must be called outside of forward and backward.")
    state.configure_root(**changes)


def _groups_of_one_mesh(module: FSDPModule, method: str) -> list[FSDPParamGroup]:
    groups = _groups(module, recurse=False)
    if len({group.mesh.key for group in groups}) > 1:
        raise FSDPValueError(
            f"{method} is not possible on a module whose parameters are on several meshes (by shard_placement_fn): "
            "it would not be clear which of them is meant."
        )
    return groups


def _names_in_order(root: nn.Module, order: Sequence[nn.Module]) -> tuple[str, ...]:
    names = {module: name for name, module in root.named_modules()}
    for module in order:
        if module not in names or state_of(module) is None:
            raise FSDPValueError(
                f"set_divergence: order has {type(module).__name__}, which is not below {type(root).__name__}, or "
                "on which fully_shard was not called."
            )
    return tuple(names[module] for module in order)


def _configure_groups(groups: Sequence[FSDPParamGroup], changes: Mapping[str, Any]) -> None:
    """Change settings of all ``groups``, or of none if one refuses."""
    # The default is changed as well, so that wrong values are refused also on a module without parameters.
    made = {each: dataclasses.replace(each, **changes) for each in {DEFAULT, *(group.settings for group in groups)}}
    settings = [made[group.settings] for group in groups]
    if not changes.keys() <= FREE:
        for group, each in zip(groups, settings, strict=True):
            refuse_settings(group, each)
        for group, each in zip(groups, settings, strict=True):
            group.configure(each)
    else:
        for group, each in zip(groups, settings, strict=True):
            group.settings = each
            group.reducer.take_settings(each)


def _units_of(modules: Any, method: str) -> tuple[Unit, ...] | None:
    """The units of ``modules``; None for an empty list.

    Raises:
        FSDPValueError: one of them is not sharded.
    """
    if not isinstance(modules, (list, tuple)):
        raise FSDPValueError(f"{method} takes a list of sharded modules, got {shown(modules)}.")
    units = []
    for module in modules:
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise FSDPValueError(
                f"{method} takes modules that fully_shard was called on, got a {type(module).__name__}."
            )
        units.append(state.unit)
    return tuple(units) or None


def _original_class(cls: type) -> type:
    """The class that `FSDPModule` was mixed in front of: it comes next in the MRO."""
    classes = cls.__mro__
    original: type = classes[classes.index(FSDPModule) + 1]
    return original


def mix_in(module: nn.Module) -> None:
    """Change ``module``'s class, in place, to one that also derives from `FSDPModule`. Equal classes share it."""
    original = type(module)
    sharded = _CLASSES.get(original)
    if sharded is None:
        namespace = {"__module__": original.__module__, **_own_forward_of(original)}
        if hasattr(original, "__deepcopy__"):
            namespace["__deepcopy__"] = _refuse_own_copy
        namespace["_fsdp_captured_call"] = _of_its_own_code(FSDPModule._fsdp_captured_call)
        # Another rank may be a thread of this process, and may have made the class meanwhile: the first one is used.
        made = type(f"FSDP{original.__name__}", (FSDPModule, original), namespace)
        sharded = _CLASSES.setdefault(original, made)
        _CLASSES.were_any = True
    module.__class__ = sharded
    _torch.compose(module, "fully_shard")
    if (state := state_of(module)) is not None:
        _torch.map_state(module, state)
    _torch_compiler.recompile_from(module)


def _own_forward_of(kind: type) -> dict[str, Any]:
    """A ``forward`` for classes with torch's: ``torch.compile`` would begin graphs in that one, outside of our call."""
    inherited = kind.forward  # type: ignore[attr-defined]
    if inherited in NO_FORWARD or (getattr(inherited, "__module__", None) or "").split(".")[0] != "torch":
        return {}

    @functools.wraps(inherited)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]  # looked up anew: programs replace it

    return {"forward": forward}


def _refuse_own_copy(self: FSDPModule, memo: dict[int, Any]) -> NoReturn:
    raise FSDPNotImplementedError(
        f"{_original_class(type(self)).__name__} defines __deepcopy__, which knows nothing of sharding; copy the "
        "module before fully_shard, or load its state_dict() into a second one."
    )


def _of_its_own_code(function: Any) -> Any:
    """A copy of ``function``. Dynamo counts and limits what it compiles by code object: each class has its own."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def mix_out(module: nn.Module) -> None:
    """Give ``module`` the class back that it had before `mix_in`."""
    module.__class__ = _original_class(type(module))
    _torch.decompose(module, "fully_shard")
    _torch_compiler.recompile_from(module)
