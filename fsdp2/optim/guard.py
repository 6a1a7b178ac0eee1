"""Finds optimizers that were built on parameters which never receive a gradient, at their first step, and re-keys them.

`fully_shard` replaces the user's parameters by sharded ones, and after a forward the unsharded ones of modules that do
not reshard are registered. An optimizer that was built on either would step on nothing, silently. Before an optimizer's
step this guard replaces them by the sharded parameters in its groups and its state. After the step it tells the groups
that their parameters were written.

The guard is one pair of global optimizer hooks. The first `fully_shard` installs it, and `remove` takes it away. An
optimizer is looked through once; after that a step costs a comparison per parameter group.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2 import _torch, _torch_compiler
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.param import FSDPParam, WriteCounter, fsdp_param_of, is_orphan_copy, replacement_of
from fsdp2.core.plan import Waiting
from fsdp2.core.reduce import GradientReducer
from fsdp2.errors import FSDPRuntimeError
from fsdp2.optim.offload import offload_as_policies_ask
from fsdp2.optim.ordinary import Ordinary, ordinary_of
from fsdp2.optim.outside import refuse_outside
from fsdp2.optim.step_targets import is_counter
from fsdp2.plugs.parameters.whole_tensors import former_of

LOG = logging.getLogger("fsdp2")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What an optimizer looked like when it was looked through, and what its steps write.

    Attributes:
        signature: equal as long as the optimizer need not be looked through again.
        ordinary: how it steps on local shards; None: it does not.
        write_counters: count the writes to its parameters.
        on_host: groups whose shards are in host memory, where copies may still be reading them.
        summing: groups whose gradients may add up on the host.
        groups: all groups of its parameters.
    """

    signature: list[int]
    ordinary: Ordinary | None
    write_counters: tuple[WriteCounter, ...]
    on_host: tuple[weakref.ref[FSDPParamGroup], ...]
    summing: tuple[weakref.ref[FSDPParamGroup], ...]
    groups: tuple[weakref.ref[FSDPParamGroup], ...]


class OptimizerGuard:
    """The two hooks and what they remember of every optimizer."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._stepping: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_warned = False
        self._lock = threading.Lock()  # ranks may be threads of one process, which share the hooks

    def install(self) -> None:
        """Register the hooks, unless they are registered."""
        with self._lock:
            if not self._handles:
                self._handles = [
                    register_optimizer_step_pre_hook(self._before_step),
                    register_optimizer_step_post_hook(self._after_step),
                ]
                WriteCounter.unwatched = False

    def remove(self) -> None:
        """Remove the hooks. Until the next `fully_shard` no optimizer is checked then."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        WriteCounter.unwatched = True

    @_torch_compiler.stays_outside("fsdp2 looks through optimizers before each step, outside of graphs")
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        # torch passes the arguments of ``step``: the optimizer, and a closure by position or by name.
        closure: Any = None
        result: tuple[Any, Any] | None = None
        if args[1:]:
            closure = args[1]
        elif "closure" in kwargs:
            closure = kwargs["closure"]
        seen = self._looked_through(optimizer)
        ordinary = seen.ordinary
        if closure is None or not callable(closure):
            # In most programs both are empty, so a step does not look at its groups.
            if GradientReducer.owing or seen.summing:
                self._refuse_lost_gradients(seen)
            for write_counter in seen.write_counters:  # already now: if the step raises, no hook is called after it
                write_counter.writes += 1
        else:
            counted = self._counted(closure, seen)
            if args[1:]:
                args = (args[0], counted, *args[2:])
            else:
                kwargs = {**kwargs, "closure": counted}
            result = args, kwargs
        with self._lock:
            self._stepping.add(optimizer)
            WriteCounter.unwatched = True  # a closure may run forwards between two writes of one step
        if ordinary is None:
            return result
        if _torch_compiler.frame_callback() is not None:  # a compiled function calls the step, or has called it
            ordinary.forget()
            return result
        stand_in = ordinary.stand_in(optimizer)
        # torch calls the ``step`` of the class with the arguments that this hook returns.
        return result if stand_in is None else ((stand_in, *args[1:]), kwargs)

    def _counted(self, closure: Callable[[], Any], seen: _Seen) -> Callable[[], Any]:
        """``closure``, after which writes are counted: its backward still needs the values of before the step."""

        @functools.wraps(closure)
        def evaluated() -> Any:
            loss = closure()
            self._refuse_lost_gradients(seen)
            for write_counter in seen.write_counters:
                write_counter.writes += 1
            return loss

        return evaluated

    def look_through(self, optimizer: Optimizer) -> _Seen:
        """Do what is due before a step: re-key ``optimizer`` if it changed since the last time.

        Raises:
            FSDPRuntimeError: the step would lose gradients.
        """
        seen = self._looked_through(optimizer)
        self._refuse_lost_gradients(seen)
        return seen

    def _looked_through(self, optimizer: Optimizer) -> _Seen:
        seen = self._seen.get(optimizer)
        if seen is None or seen.signature != _signature(optimizer):
            rekey(optimizer)
            offload_as_policies_ask(optimizer)
            seen = _seen(optimizer)
            refuse_outside(optimizer, [group for each in seen.groups if (group := each()) is not None])
            self._seen[optimizer] = seen
        # Shards in host memory may still be the source of copies to the device; the step is going to write them.
        for reference in seen.on_host:
            group = reference()
            if group is not None and group.comm is not None:
                group.comm.let_host_write_shards()
        return seen

    def _refuse_lost_gradients(self, seen: _Seen) -> None:
        if GradientReducer.owing and not self._has_warned:
            self._warn_of_gradients_that_wait(seen)
        for summing in seen.summing:
            _refuse_to_skip(summing())

    @contextmanager
    def knows_parameters_of(self, optimizer: Optimizer) -> Iterator[None]:
        """A block in which ``optimizer`` holds others in place of some parameters, and is not looked through again."""
        seen = self._seen[optimizer]
        self._seen[optimizer] = dataclasses.replace(seen, signature=_signature(optimizer))
        try:
            yield
        finally:
            self._seen[optimizer] = seen

    def _warn_of_gradients_that_wait(self, seen: _Seen) -> None:
        """Warn once of a step that finds no gradient in a group, as all that was computed waits to be reduced."""
        for reference in seen.groups:
            group = reference()
            if group is None or not group.reducer.waiting & Waiting.UNREDUCED:
                continue
            if all(param.sharded.grad is None for param in group.params):
                self._has_warned = True
                LOG.warning(
                    "fsdp2: an optimizer steps, and parameters of '%s' have no gradient: what backwards have computed "
                    "was accumulated, and never reduced over the ranks. The last backward of a step must run with "
                    "set_requires_gradient_sync(True), or inside of fsdp2.accumulate(model, last=True).",
                    group.name,
                )
                return

    @_torch_compiler.stays_outside("fsdp2 notes after each step that parameters were written, outside of graphs")
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for write_counter in self._seen[optimizer].write_counters if optimizer in self._seen else ():
            write_counter.writes += 1
        with self._lock:
            WriteCounter.steps += 1
            self._stepping.discard(optimizer)
            WriteCounter.unwatched = bool(self._stepping) or not self._handles


GUARD = OptimizerGuard()
"""The guard of this process: torch's optimizer hooks are global too."""


def _signature(optimizer: Optimizer) -> list[int]:
    """A list that changes if the optimizer gets other parameters, or any sharded parameter is created or replaced."""
    found = [FSDPParam.identity_changes]
    for group in optimizer.param_groups:
        params = group["params"]
        found += (len(params), id(params[0]), id(params[-1])) if params else (0,)
    return found


def _seen(optimizer: Optimizer) -> _Seen:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    owners = [owner for parameter in parameters if (owner := fsdp_param_of(parameter)) is not None]
    groups = dict.fromkeys(owner.group for owner in owners if owner.group is not None)
    # Groups are held weakly: an optimizer must not keep those of a dropped model alive.
    return _Seen(
        _signature(optimizer),
        ordinary_of(optimizer),
        tuple(dict.fromkeys(owner.write_counter for owner in owners)),
        tuple(weakref.ref(group) for group in groups if group.storage.offloading.is_host),
        tuple(weakref.ref(group) for group in groups if group.storage.offloading.sums_on_host),
        tuple(map(weakref.ref, groups)),
    )


def _refuse_to_skip(group: FSDPParamGroup | None) -> None:
    if group is not None and group.reducer.waiting & Waiting.ON_HOST:
        raise FSDPRuntimeError(
            f"gradients of '{group.name}' add up in host memory, as its offload_policy asks, and no backward has "
            "brought them back, so the step would lose them: run the step's last backward with "
            "set_is_last_backward(True) and set_requires_gradient_sync(True), or drop them with reset_iter_state()."
        )


def rekey(optimizer: Optimizer) -> None:
    """Replace predecessors of sharded parameters in ``optimizer``'s groups and state by the sharded ones.

    Predecessors are parameters from before `fully_shard`, unsharded ones, and sharded ones that were replaced. State of
    the unsharded shape is cut to this rank's rows, without communication. State of parameters that `unwrap` has made
    full is gathered, which is collective.

    Raises:
        FSDPRuntimeError: the optimizer would then hold a parameter twice, or lose a gradient, or train nothing.
    """
    _refuse_stranded(optimizer)
    present = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            successor = replacement_of(parameter)
            if successor is None or fsdp_param_of(parameter) is not None:
                continue
            if successor in present:
                owner = fsdp_param_of(successor)
                raise FSDPRuntimeError(
                    f"the optimizer holds parameter '{owner.path if owner else '?'}' twice: sharded, and as it was "
                    "before sharding (or unsharded). Build the optimizer from model.parameters() after fully_shard, "
                    "while the model is resharded."
                )
            _move_gradient(parameter, successor)
            present.add(successor)
            group["params"][index] = successor
            if parameter in optimizer.state:
                state = _gathered(optimizer.state.pop(parameter), parameter, successor)
                optimizer.state[successor] = _shard_state(state, successor)


def _refuse_stranded(optimizer: Optimizer) -> None:
    orphans = [each for group in optimizer.param_groups for each in group["params"] if is_orphan_copy(each)]
    if orphans and all(each.grad is None for each in orphans):
        raise FSDPRuntimeError(
            f"the optimizer holds {len(orphans)} parameters that are copies of such as were sharded, unsharded or "
            "replaced since the optimizer was built, and that no module holds: its steps would train nothing. Copy it "
            "together with the model, copy.deepcopy((model, optimizer)), pickle it after its first step, or build one "
            "from the parameters of the copy."
        )


def _gathered(state: Any, parameter: torch.nn.Parameter, successor: torch.nn.Parameter) -> Any:
    """``state``, unsharded if ``parameter`` was unwrapped; unless ``successor`` is sharded as it was before."""
    former = former_of(parameter)
    if former is None:
        return state
    owner, sharding = fsdp_param_of(successor), former.sharding
    if (
        owner is not None
        and owner.sharding.mesh.key == sharding.mesh.key
        and owner.sharding.partition == sharding.partition
    ):
        return state
    return former.gathered(state, successor.device)


def _move_gradient(parameter: torch.nn.Parameter, successor: torch.nn.Parameter) -> None:
    """Move a gradient of zeros, which torch sets to let an optimizer create its state; refuse any other gradient."""
    gradient = parameter.grad
    if gradient is None or successor.grad is not None:
        return
    if torch.count_nonzero(gradient):
        owner = fsdp_param_of(successor)
        raise FSDPRuntimeError(
            f"the optimizer was built on parameters from before fully_shard (or on unsharded ones), and "
            f"'{owner.path if owner else '?'}' has a gradient there that was never reduced; the step would "
            "lose it. Build the optimizer after fully_shard, and step after a backward that reduces gradients."
        )
    successor.grad = _shard_value(gradient, successor)
    parameter.grad = None


def _shard_state(state: Any, sharded: torch.nn.Parameter) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: value if is_counter(key, value) else _shard_value(value, sharded) for key, value in state.items()}


def _shard_value(value: Any, sharded: Any) -> Any:
    owner = fsdp_param_of(sharded)
    # State of another shape (a counter, factors of a matrix) has no rows to cut.
    if owner is None or not isinstance(value, torch.Tensor) or value.shape != sharded.shape:
        return value
    if isinstance(value, DTensor):
        if value.placements == sharded.placements and value.device_mesh == sharded.device_mesh:
            return value
        value = _torch.local_of(value)  # tensor parallelism has cut it: the rows are those of its local tensor
    return owner.shard_of(value)
