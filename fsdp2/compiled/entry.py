"""The work outside of graphs before a compiled module is called: it makes what the trace, and each run, rely on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch, _torch_compiler
from fsdp2.arguments import checked
from fsdp2.compiled.exchanges import abandon, handle_of
from fsdp2.compiled.grad_sinks import Premises, grad_sinks_of
from fsdp2.compiled.overlap import overlap, source_hash
from fsdp2.compiled.specs import GroupSpec, text_of
from fsdp2.compiled.support import reason_against
from fsdp2.compiled.tracing import RefusedState, TracedGroup, TracedState, TracedUse
from fsdp2.compiled.unsharding import unshard
from fsdp2.core.buffers import storage_alias
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.param import FSDPParam
from fsdp2.core.plan import GroupPlan
from fsdp2.core.state import FSDPState, state_of, states_below
from fsdp2.core.trees import Replaced
from fsdp2.errors import FSDPNotImplementedError, FSDPTypeError


@functools.cache
def prepares_graphs() -> Callable[[Any], CompiledCall]:
    """`prepare_call` with a mark that Dynamo must not trace it. (Made late, since importing Dynamo takes a second.)"""
    return torch.compiler.disable(prepare_call)  # type: ignore[no-any-return]


@checked()
def prepare_compile(model: nn.Module) -> None:
    """Make ``model`` ready to be called by a compiled function.

    Only compiled functions need it: a sharded module's own compiled call (``torch.compile(model)``,
    ``model.compile()``) begins with it. A function is traced from its own first line, where nothing can be communicated
    or allocated::

        >>> @torch.compile(fullgraph=True)
        ... def loss_of(batch):
        ...     return model(batch).square().mean()
        >>> fsdp2.prepare_compile(model)      # before each call
        >>> loss_of(batch).backward()

    The first time it initializes the root, collectively: all ranks of the mesh must call it.

    Args:
        model: the outermost module on which `fully_shard` was called.

    Raises:
        FSDPTypeError: `fully_shard` was not called on ``model``.
        FSDPNotImplementedError: it cannot be part of a graph; the message names the feature.
    """
    if state_of(model) is None:
        raise FSDPTypeError(
            f"fully_shard was not called on this {type(model).__name__}: prepare_compile() takes the outermost module "
            "that it was called on."
        )
    prepare_call(model)
    traced = state_of(model).graph_hooks  # type: ignore[union-attr]
    if isinstance(traced, RefusedState):
        raise FSDPNotImplementedError(traced.reason)


@functools.cache
def _set_up_compiler() -> None:
    _torch_compiler.need_compiler()
    _torch_compiler.call_opaquely(unshard)
    _torch_compiler.trace_through_checkpoints()
    _torch_compiler.guard_attributes()
    _torch_compiler.reorder_graphs(overlap, source_hash())


class CompiledCall:
    """A prepared compiled call of a module, as a context manager around it. Each call needs one of its own.

    Attributes:
        is_captured: whether the module's own hooks can be part of the graph. If not, they run outside of it, as in
            eager mode.
    """

    __slots__ = ("_outside", "_replaced", "_state", "is_captured")

    def __init__(self, state: FSDPState, outside: list[tuple[FSDPState, Any]], *, is_captured: bool) -> None:
        self._state = state
        self._outside = outside
        self._replaced = Replaced()
        self.is_captured = is_captured

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs to call the module with: a root's are moved to its device, which graphs would not do."""
        return self._state.on_device(args, kwargs, self._replaced) or (args, kwargs)

    def __enter__(self) -> None:
        """The call begins; everything was prepared when this was made."""

    def __exit__(self, *_: object) -> None:
        """The call is over: give states the hooks back that a call around it has set."""
        for state, hooks in self._outside:
            state.graph_hooks = hooks
        self._replaced.take_out()


def prepare_call(module: nn.Module) -> CompiledCall:
    """Make ``module``, whose compiled call begins, ready to be traced or run. Collective over the mesh.

    Modules below it that cannot be part of a graph raise an error when they are traced.
    """
    _set_up_compiler()
    state = state_of(module)
    assert state is not None, "a sharded module has a state"
    root = state.ensure_root()
    recover_if_failed(root)
    if not root.has_trained and torch.is_grad_enabled():
        root.begin_training()
    if state.own_root is root:
        state.refuse_changed_structure()
        root.begin_compiled_call()
    below = state.states if state.own_root is root else tuple(states_below(module))
    outside = [(each, each.graph_hooks) for each in below]
    reasons = {each: reason_against(each, below) for each in below}
    is_captured = reasons[state] is None
    held = _held_by_top(below) if is_captured else ()
    for each in below:
        reason = reasons[each]
        if reason is not None:
            _refuse_state(each, reason)
        elif each is state:
            _prepare_state(each, tuple(dict.fromkeys((*each.unit, *held))))
        else:
            _prepare_state(each, tuple(group for group in each.unit if group not in held))
    for each in below:
        each.graph_hooks = each.prepared_hooks
    return CompiledCall(state, outside, is_captured=is_captured)


def _refuse_state(state: FSDPState, reason: str) -> None:
    before = state.prepared_hooks
    if not isinstance(before, RefusedState) or before.reason != reason:
        state.prepared_hooks = RefusedState(reason)


def _held_by_top(below: tuple[FSDPState, ...]) -> tuple[FSDPParamGroup, ...]:
    """The groups that several states use (tied weights). They are gathered once, around the whole compiled module."""
    seen: dict[FSDPParamGroup, int] = {}
    for state in below:
        for group in state.unit:
            seen[group] = seen.get(group, 0) + 1
    return tuple(group for group, count in seen.items() if count > 1)


def _prepare_state(state: FSDPState, groups: tuple[FSDPParamGroup, ...]) -> None:
    assert state.root is not None, "an entry makes a root"
    if state.attributes_outside and not torch.is_grad_enabled():
        # Inside of `inference()` parameters are gathered once for all calls, by eager means: a graph would gather them
        # in each call.
        for group in groups:
            group.refuse_set_data()
        if not state.is_unsharded() or any(group.is_stale() for group in groups):
            state.root.comm.gathers_follow_compute()
        state.root.schedule.gather_in_turn(groups, ())
        groups = ()
    ready, again, budget = [], _gathers_again(state), state.root.settings.prefetch_bytes
    for group in groups:
        group.refuse_loan("a compiled call")
        group.refuse_set_data()
        group.reshard()
        group.adopt_replaced()
        if not group.is_prepared:
            assert group.comm is not None, "a root has prepared it"
            group.prepare(group.comm)
        ready.append(_prepared(group, again, budget))
    before = state.prepared_hooks
    policy = dataclasses.replace(state.policy, inputs=None) if state.in_full_precision else state.policy
    if isinstance(before, TracedState) and before.groups == tuple(ready) and before.policy == policy:
        before.escapes = 0
    else:
        state.prepared_hooks = TracedState(tuple(ready), policy, state.modules[0])


def _gathers_again(state: FSDPState) -> bool:
    """Whether backward gathers again. By default all modules but the root do, as in eager mode."""
    return not state.is_root if state.reshard_after_forward is None else state.reshard_after_forward


def _prepared(group: FSDPParamGroup, again: bool, budget: int | None) -> TracedGroup:
    """Prepare ``group`` for graphs, or return what was prepared before if nothing has changed since."""
    plan, version = group.plan, group.written()
    known = group.graph_inputs
    if known is not None and known.premises.version != version:
        if _torch.backward_is_running():  # this forward is a recompute, and needs the values of its first run
            group.refuse_backward()
        # A backward whose forward came before the write must fail, and not silently use the new values.
        torch.autograd.graph.increment_version(known.group.shards)
    if known is not None and known.made_of[0] is plan and known.made_of[1:] == (again, budget):
        if known.group.handle is not None:
            abandon(known.group.handle)
        known.premises.version = version
        return known.group
    spec = GroupSpec.of(group, again, budget)
    handle = handle_of(group, budget) if spec.by_transport else None
    # Functional collectives write into memory that a compiler may reuse in each run, as with CUDA graphs.
    premises = Premises(plan, again, version, may_keep=spec.by_transport)
    # The first call may be without gradients, and a later one may train.
    with torch.inference_mode(False), torch.enable_grad():
        shards = tuple(
            storage_alias(buffers.shard, 0, (buffers.layout.shard_numel,), (1,)) for buffers in group.storage.buffers
        )
        grad_sinks = grad_sinks_of(group, premises)
    uses = tuple(
        TracedUse(module, name, index, param.sharded, _tensor_parallel(param))
        for index, param in enumerate(group.params)
        for module, name in param.uses
    )
    sharded = [param.sharded for param in group.params]
    _torch_compiler.keep_static([*shards, *grad_sinks, *sharded, *(param.local for param in group.params)])
    _torch_compiler.keep_in_place(shards)  # their addresses stay the same while this plan is in use
    prepared = TracedGroup(text_of(spec), shards, grad_sinks, handle, uses)
    group.graph_inputs = Prepared((plan, again, budget), premises, prepared)
    return prepared


class Prepared:
    """The result of `prepare_call` for a group, and what it was made from.

    Attributes:
        made_of: the plan of the group, whether backward gathers again, and how many bytes may be gathered ahead.
        premises: the conditions that its backward relies on.
        group: the result.
    """

    __slots__ = ("group", "made_of", "premises")

    def __init__(self, made_of: tuple[GroupPlan, bool, int | None], premises: Premises, group: TracedGroup) -> None:
        self.made_of = made_of
        self.premises = premises
        self.group = group


def _tensor_parallel(param: FSDPParam) -> tuple[Any, Any, Any, Any] | None:
    spec = param.sharding.unsharded_spec
    return None if spec is None else (spec.mesh, tuple(spec.placements), spec.shape, spec.stride)
