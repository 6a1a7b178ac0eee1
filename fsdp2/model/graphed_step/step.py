"""`make_graphed_step`: forward, backward, clipping and optimizer in one graph, which costs the host one launch."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch, _torch_compiler
from fsdp2.arguments import ANYTHING, at_least, checked
from fsdp2.core.agreement import compared_over
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.group import FSDPParamGroup, free_cleared_gradients
from fsdp2.core.state import state_of, states_below_all
from fsdp2.core.trees import map_tensors, tensors_in
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.model.graphed_step.arguments import described, refuse_differentiable, static
from fsdp2.model.graphed_step.fixed import Fixed, Found, Kept, host_state
from fsdp2.model.graphed_step.recording import OF_DEVICES, Recording

Step = Callable[..., Any]


@checked(step=ANYTHING, module=ANYTHING, optimizer=ANYTHING, warm_up=at_least(1), pool=ANYTHING)
def make_graphed_step(
    step: Step,
    module: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    warm_up: int = 3,
    pool: Any = None,
) -> GraphedStep:
    """``step`` as a graph of the device: called like it, it costs the host one launch instead of thousands.

        >>> lr = torch.tensor(3e-4, device="cuda")  # a scheduler writes into it
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)
        >>> def step(tokens, targets):
        ...     loss = loss_of(model(tokens), targets)
        ...     loss.backward()
        ...     fsdp2.clip_grad_norm_(model, 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> step = fsdp2.make_graphed_step(step, model, optimizer)
        >>> for tokens, targets in batches:
        ...     loss = step(tokens, targets)

    The first ``warm_up`` calls run ``step`` as it is, so that everything has been made that is made once. The next call
    records it, and that call and all later ones replay the recording. Each call is one step on its arguments: they are
    copied to where the recorded step reads them, and it returns copies of the recorded outputs, which no later call
    changes.

    A replay uses the addresses of the recording. So from now on memory for communication is kept from use to use
    (``set_communication_memory_pool(True)``; before torch 2.13 ``set_keep_unsharded_storage(True)``), for ever.

    What the host decides is decided once. Before each replay it is compared with the recording, and a difference is an
    error: other shapes, dtypes or plain values among the arguments; hyperparameters that are no tensors; settings;
    ``training``; ``requires_grad``; tensors that were replaced or moved. The caller must mind what cannot be seen:
    Python code inside of ``step`` does not run again, so counters, prints and branches stay as they were. Between two
    calls anything may run: evaluation, checkpoints, steps of other shapes by the plain function.

    Collective: all ranks of the meshes must call this, and then the result, as they would call ``step``.

    Args:
        step: a function that does forward, backward, and whatever else belongs to a step, but nothing that waits for
            the device (``.item()``, ``print`` of a tensor). It ends with ``zero_grad()``, so it leaves no gradients. It
            takes and returns tensors, or lists, tuples, dicts and dataclasses of them, and plain values.
        module: the root that the step trains, or several.
        optimizer: the optimizer that it steps, with ``capturable=True`` if it has this argument; several, or none.
        warm_up: how many calls run ``step`` as it is, at least 1.
        pool: `GraphedStep.pool` of another graphed step, for example of validation, whose memory this one shall use
            too. The two must not be replayed at the same time.

    Raises:
        FSDPTypeError, FSDPValueError: an argument is of another kind.
        FSDPRuntimeError: nothing at or below ``module`` is sharded, or it is not the root. Raised by a call: the step
            cannot be recorded, or a replay would not do what ``step`` does. Nothing has been stepped then.
        FSDPNotImplementedError: the device records no graphs, or parameters or gradients are offloaded.
    """
    if not callable(step):
        raise FSDPTypeError(f"make_graphed_step takes a function that does a step, got {step!r}.")
    modules = _each_of(module, nn.Module, "modules")
    optimizers = _each_of(optimizer, Optimizer, "optimizers")
    states = states_below_all(modules)
    groups = list(dict.fromkeys(group for state in states for group in state.unit))
    if not groups:
        raise FSDPRuntimeError(
            "make_graphed_step() was given nothing that contains a sharded module: pass what fully_shard was called on."
        )
    _refuse_offloaded(groups)
    devices = list(dict.fromkeys(group.mesh.device for group in groups))
    make = OF_DEVICES.get(devices[0].type)
    if make is None or len(devices) > 1:
        raise FSDPNotImplementedError(
            f"make_graphed_step records a graph of one device that can ({', '.join(OF_DEVICES)}), and the model is on "
            f"{', '.join(map(str, devices))}. Call the step itself there."
        )
    _keep_addresses(modules)
    return GraphedStep(step, modules, optimizers, warm_up, lambda: make(devices[0], pool), devices[0])


class GraphedStep:
    """What `make_graphed_step` makes; call it like the step that it was given."""

    def __init__(
        self,
        step: Step,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        warm_up: int,
        make: Callable[[], Recording],
        device: torch.device,
    ) -> None:
        self._step = step
        self._modules = modules
        self._optimizers = optimizers
        self._warm_up = warm_up
        self._make = make
        self._device = device
        self._is_closed = True
        self._find()
        self._let_go()
        self.reset()
        _LIVE.add(self)

    @property
    def pool(self) -> Any:
        """The pool of the graph's memory; for ``make_graphed_step(..., pool=...)`` of another step."""
        return self._recording.pool

    @property
    def is_recorded(self) -> bool:
        """Whether calls are replays."""
        return self._fixed is not None

    def reset(self) -> None:
        """Give the graph up: the next calls warm up and record again, with what has changed. Allowed after `close`."""
        self.close()
        self._recording = self._make()
        self._is_closed = False

    def close(self) -> None:
        """Free the graph, and forget what it reads and writes, before process groups are destroyed.

        NCCL does not end a communicator while a graph holds a collective of it: ``destroy_process_group()`` would wait
        for ever. At the end of the program open graphed steps are closed. A second close does nothing; a call
        afterwards is an error, unless `reset` comes before it.
        """
        if not self._is_closed:
            self._is_closed = True
            self._recording.close()
            self._let_go()

    def _let_go(self) -> None:
        self._fixed: Fixed | None = None
        self._calls = 0
        self._arguments = ""
        self._written: tuple[list[FSDPParamGroup], list[torch.Tensor]] = [], []
        self._parameters: list[torch.Tensor] = []
        # The recorded step's own arguments. They stay alive, as objects among them are recognized by their identity.
        self._own: tuple[Any, Any] = (), {}
        self._inputs: list[torch.Tensor] = []
        self._outputs: Any = None
        self._raised: list[Exception] = []  # what the step raised while it was recorded: at most one

    @_torch_compiler.stays_outside("a graphed step is a graph already")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do one step. Returns what the step returns, detached.

        Raises:
            FSDPRuntimeError, FSDPValueError: see `make_graphed_step`.
        """
        if self._is_closed:
            raise FSDPRuntimeError(
                "a graphed step was called after close(): call reset() first, after which it is recorded again, or the "
                "step itself."
            )
        if self._fixed is None and self._calls < self._warm_up:
            with self._recording.warm_up():
                output = map_tensors(torch.Tensor.detach, self._step(*args, **kwargs))
            self._calls += 1
            return output
        if self._fixed is None:
            self._record(args, kwargs)
        else:
            self._refuse_changes(args, kwargs)
            self._fill(tensors_in((args, kwargs)))
        # Recording executes nothing, so the call that has recorded replays, too.
        self._recording.replay()
        self._note_writes()
        return map_tensors(lambda each: each.detach().clone(), self._outputs)

    # -- the recording

    def _record(self, args: Any, kwargs: Any) -> None:
        failure: BaseException | None = None
        try:
            fixed, own_args, own_kwargs = self._prepare(args, kwargs)
        except Exception as error:  # other ranks are told first; `_refuse` raises it
            failure = error
        # All ranks are ready, or all raise: recording issues collectives, which need every rank.
        self._refuse(failure, None)
        # An exchange would be recorded now, so the other ranks learn of an error after the recording has ended.
        kept = Kept(self._modules, self._optimizers)
        try:
            counted, versions = host_state(self._optimizers, self._device), self._versions()
            self._recording.record(lambda: self._run(own_args, own_kwargs))
            complaint = self._complaint(fixed, counted)
        except Exception as error:
            failure = self._raised[0] if self._raised else error  # ending a graph early raises another error
            complaint = f"{type(failure).__name__}: {failure}"
        except BaseException:
            self._abandon(kept)
            raise
        try:
            self._refuse(failure, complaint)
        except BaseException:
            self._abandon(kept)
            raise
        # A replay writes what the recording wrote.
        self._written = self._writes_since(versions)
        self._fixed = fixed

    def _prepare(self, args: Any, kwargs: Any) -> tuple[Fixed, Any, Any]:
        """Copy the arguments to where the recorded step reads them. Parameters come to rest, as before each replay."""
        self._find()  # again: modules may have changed since
        self._settle()
        for state in self._states:
            state.adopt_replaced()
        free_cleared_gradients(self._groups)  # else others might get this memory before a replay writes into it
        of_modules = (parameter for module in self._modules for parameter in module.parameters())
        of_optimizers = (each for one in self._optimizers for group in one.param_groups for each in group["params"])
        self._parameters = list({id(each): each for every in (of_modules, of_optimizers) for each in every}.values())
        self._refuse_unready()
        inputs: list[torch.Tensor] = []
        arguments = described((args, kwargs))
        self._own = map_tensors(lambda each: static(each, self._device, inputs), (args, kwargs))
        self._inputs, self._arguments = inputs, arguments
        return Fixed(self._modules, self._states, self._optimizers, self._device), *self._own

    def _refuse(self, failure: BaseException | None, complaint: str | None) -> None:
        """Let no rank replay a step that another one could not record. Collective.

        Raises:
            FSDPRuntimeError: on all ranks, if one has a failure or a complaint. A failure of this rank that came before
                the recording is raised as it is.
        """
        said = complaint or (None if failure is None else f"{type(failure).__name__}: {failure}")
        others = self._of_others(said)
        if failure is not None and complaint is None:
            raise failure
        if said is not None or others is not None:
            raise FSDPRuntimeError(
                f"the step could not be recorded as a graph, and nothing was stepped. {said or others}"
            ) from failure

    def _of_others(self, said: str | None) -> str | None:
        """How the ranks differ, or None. Collective over every mesh."""
        difference, *_ = compared_over(self._meshes, lambda _: str(said), "whether a step was recorded")
        return f"The ranks differ:\n{difference}" if difference else None

    def _find(self) -> None:
        """Look up what is sharded, and over which ranks."""
        self._states = states_below_all(self._modules)
        self._groups = list(dict.fromkeys(group for state in self._states for group in state.unit))
        self._meshes = list(dict.fromkeys(group.mesh for group in self._groups))

    def _settle(self) -> None:
        """Bring parameters to rest, sharded, as each replay begins. Compute has waited for all other streams then."""
        for state in self._states:
            state.quiesce()

    def _run(self, args: Any, kwargs: Any) -> None:
        try:
            self._outputs = self._step(*args, **kwargs)
        except Exception as error:
            self._raised.append(error)
            raise

    def _complaint(self, fixed: Fixed, counted: list[Found]) -> str | None:
        """Why the recording does not do what the step does. ``counted``: `host_state` before the recording."""
        for before, now in zip(counted, host_state(self._optimizers, self._device), strict=False):
            if before != now:
                which, name = now[0]
                return f"{which} keeps '{name}' on the host, which a replay does not change. {_CAPTURABLE}"
        described(self._outputs, "returns")
        change = fixed.change()
        fixed.take_denominators()
        if change is not None:
            return (
                f"While the step was recorded {change}: each replay would begin with the one of before. A state of an "
                "optimizer is made in the first step that has a gradient for its parameter, so warm up with such steps "
                "(warm_up=...); buffers must be written in place."
            )
        if self._has_gradients():
            return f"It leaves gradients. {_END_WITH_ZERO_GRAD}"
        return None

    def _abandon(self, kept: Kept) -> None:
        """Undo on the host what the recording has done, of which nothing ran on the device."""
        self.reset()
        kept.put_back()
        roots = dict.fromkeys(state.root for state in self._states if state.root is not None)
        for root in roots:
            root.leave_recording()  # first: later calls wait for what is under way, and its events never happen
        for module in self._modules:
            module.zero_grad()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for root in roots:
            recover_if_failed(root)

    def _refuse_unready(self) -> None:
        """Refuse, before the recording, what cannot be part of a graph.

        Raises:
            FSDPRuntimeError: there is such a thing.
        """
        _refuse_below_roots([each for module in self._modules for each in _topmost(module)])
        for optimizer in self._optimizers:
            if any(group.get("capturable") is False for group in optimizer.param_groups):
                raise FSDPRuntimeError(f"{type(optimizer).__name__} counts its steps on the host. {_CAPTURABLE}")
        if self._has_gradients():
            raise FSDPRuntimeError(
                f"there are gradients before a step is recorded, to which each replay would add. {_END_WITH_ZERO_GRAD}"
            )
        held = self._held_gradient()
        if held is not None:
            raise FSDPRuntimeError(f"before a step is recorded, {held}.")

    def _has_gradients(self) -> bool:
        """Whether there are gradients, in ``.grad`` or waiting for a reduction."""
        if any([group.reducer.owes_gradients() for group in self._groups]):
            return True
        with _torch.plain_attributes():
            return any([parameter.grad is not None for parameter in self._parameters])

    def _held_gradient(self) -> str | None:
        """A message, if somebody holds a gradient of an earlier step that lies where the graph writes."""
        for group in self._groups:
            for bucket in group.reducer.buckets:
                buffer = bucket.delivered
                if buffer is not None and buffer.resizable.has_memory and not buffer.is_free():
                    return (
                        f"somebody holds a gradient of '{group.name}' of an earlier step, which lies where the graph "
                        "writes: keep a clone of it"
                    )
        for comm in {group.comm for group in self._groups if group.comm is not None}:
            if comm.is_held_elsewhere():
                return "somebody holds a gradient of some earlier step, which lies where the graph writes: keep clones"
        return None

    # -- a replay

    def _versions(self) -> tuple[list[tuple[int, int]], list[tuple[torch.Tensor, int]]]:
        """Counters that show what is written: one for each group, and one for each other parameter and buffer."""
        sharded = {id(param.sharded) for group in self._groups for param in group.params}
        of_modules = (each for module in self._modules for each in (*module.parameters(), *module.buffers()))
        every = {id(each): each for each in (*of_modules, *self._parameters) if id(each) not in sharded}
        others = [each for each in every.values() if not each.is_inference()]  # inference tensors count no writes
        return [group.written() for group in self._groups], [(each, each._version) for each in others]

    def _writes_since(self, versions: Any) -> tuple[list[FSDPParamGroup], list[torch.Tensor]]:
        of_groups, of_others = versions
        groups = [group for group, before in zip(self._groups, of_groups, strict=True) if group.written() != before]
        return groups, [tensor for tensor, before in of_others if tensor._version != before]

    def _note_writes(self) -> None:
        """Count a replay's writes, so that a backward whose forward came before it is refused."""
        groups, others = self._written
        for group in groups:
            group.note_write()
        torch.autograd.graph.increment_version(others)

    def _fill(self, given: Iterable[torch.Tensor]) -> None:
        """Copy the arguments to where the graph reads them."""
        with torch.no_grad():
            for own, value in zip(self._inputs, given, strict=True):
                own.copy_(value)

    def _refuse_changes(self, args: Any, kwargs: Any) -> None:
        assert self._fixed is not None, "it is recorded"
        self._settle()
        found = described((args, kwargs))
        for each in tensors_in((args, kwargs)):
            refuse_differentiable(each)
        if found != self._arguments:
            raise FSDPValueError(
                f"the step was recorded for arguments {self._arguments}, and was called with {found}: a graph is of "
                "one shape. Pad batches to it, call the step itself for others, or make a graphed step for each shape."
            )
        change = self._fixed.change()
        if change is None and self._has_gradients():
            change = "a parameter has a gradient, reduced or not, which belongs to no step of the graph"
        change = change or self._held_gradient()
        if change is not None:
            raise FSDPRuntimeError(
                f"since the step was recorded something has changed that a replay would not see: {change}. Change it "
                "back, or call reset(), after which the step is recorded again. Hyperparameters that are tensors on "
                "the device may change in place: lr=torch.tensor(1e-3, device=...)."
            )


_CAPTURABLE = "Make it with capturable=True, or, where it knows no such argument, take another optimizer."
_END_WITH_ZERO_GRAD = "End the step with optimizer.zero_grad(set_to_none=True), for all parameters that have gradients."


_LIVE: weakref.WeakSet[GraphedStep] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what is open when the program ends, before process groups do."""
    for graphed in list(_LIVE):
        graphed.close()


def _each_of(given: Any, kind: type[Any], what: str) -> list[Any]:
    every = [given] if isinstance(given, kind) else given
    if not isinstance(every, (list, tuple)) or not all(isinstance(each, kind) for each in every):
        raise FSDPTypeError(f"make_graphed_step takes {what}, one or a list of them, got {given!r}.")
    return list(every)


def _refuse_offloaded(groups: Sequence[FSDPParamGroup]) -> None:
    for group in groups:
        offloading = group.storage.offloading
        if offloading.is_host or offloading.sums_on_host or offloading.state_on_host:
            raise FSDPNotImplementedError(
                f"'{group.name}' is offloaded: the host waits for what it copies, in each step, so the step cannot be "
                "a graph. Shard it with the default OffloadPolicy()."
            )


def _keep_addresses(modules: Sequence[nn.Module]) -> None:
    """Let memory for communication have the same addresses in each step."""
    roots = [each for module in modules for each in _topmost(module)]
    _refuse_below_roots(roots)
    for root in roots:
        # The pool moves memory between buffers, which torch can do since 2.13. Before, buffers keep theirs instead.
        if _torch.can_swap_memory:
            root.set_communication_memory_pool(True)
        else:
            root.set_keep_unsharded_storage(True)


def _refuse_below_roots(roots: Sequence[Any]) -> None:
    for each in roots:
        state = each._get_fsdp_state()
        if state.root is not None and not state.is_root:
            raise FSDPRuntimeError(
                f"make_graphed_step was given '{state.name}', which is a part of {state.root.name}: pass that."
            )


def _topmost(module: nn.Module) -> list[Any]:
    if state_of(module) is not None:
        return [module]
    return [root for child in module.children() for root in _topmost(child)]
