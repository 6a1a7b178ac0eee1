"""When the backward of a module begins, comes to it, and ends: hooks into autograd, and what is done at each moment.

=========================  ==========================================  ================================================
moment                     what notices it                             what is done
=========================  ==========================================  ================================================
it begins                  the gradient of one of the outputs, or of   the unit is gathered, and what comes next ahead
                           a tensor that the module keeps
a call's has ended         a node before the inputs of the call        the unit is resharded; once no other call of the
                                                                       same backward is to come, gradients are reduced
it is differentiated       a node on the gradients that it handed out  the unit is gathered again
it comes to a parameter    a hook on unsharded parameters that         the root's backward begins; the values were left
                           `WatchedParameters` has lent                where they were
the whole one has ended    autograd's callback, `FSDPRoot`             what was not noticed before is done now
=========================  ==========================================  ================================================

All but the last are moments of one state, a `ModuleBackward`. Ranks that run the same graph come to them in one order.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch
from fsdp2.core.hooks import on_real_parameters
from fsdp2.core.trees import Replaced, map_inputs, map_tensors, tensors_anywhere_in, tensors_in
from fsdp2.errors import FSDPRuntimeError, ParamPhase

if TYPE_CHECKING:
    from fsdp2.core.group import FSDPParamGroup
    from fsdp2.core.root import FSDPRoot
    from fsdp2.core.state import FSDPState


class Stage(enum.Enum):
    """Where the backward of a module stands.

    Attributes:
        NONE: none has begun, or it has ended.
        RUNNING: it has begun.
        PAUSED: it is over, and its gradients wait for ``finalize_backward``.
    """

    NONE = enum.auto()
    RUNNING = enum.auto()
    PAUSED = enum.auto()


class ModuleBackward:
    """The backward of the modules of one state.

    Attributes:
        stage: where it stands.
    """

    def __init__(self, state: FSDPState) -> None:
        self.stage = Stage.NONE
        self._state = state
        self._calls: list[weakref.ref[ForwardCall]] = []
        self._on_leaves: list[RemovableHandle] = []

    # -- in forward

    def await_end(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], replaced: Replaced
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A call begins with these inputs: notice when its backward has ended.

        Returns:
            The inputs to use instead, or None if they stay.
        """
        call = ForwardCall(self)
        # A call lives as long as its graph, and is forgotten with it.
        if self._calls:
            self._calls = [each for each in self._calls if each() is not None]
        self._calls.append(weakref.ref(call))
        return after_backward_of_inputs(call, args, kwargs, replaced)

    def await_beginning(self, module: nn.Module, outputs: Sequence[torch.Tensor], output: Any, recompute: bool) -> bool:
        """The last call has ended: notice when its backward begins.

        Args:
            module: the module that was called.
            outputs: all tensors that ``output`` leads to.
            output: what the module has returned.
            recompute: the call was a recompute, inside of a backward.

        Returns:
            Whether one of the outputs requires a gradient.
        """
        # When the call began is looked up only where it can matter: most modules return one tensor of their own.
        is_compared = len(outputs) > 1 or (outputs and outputs[0]._base is not None)
        began = self._began() if is_compared else -1
        is_seen = before_backward_of_outputs(self._begin, outputs, output, began, self._on_leaves)
        if not recompute and torch.Tensor in map(type, module.__dict__.values()):
            before_backward_of_kept(self._begin, module, self._began())
        return is_seen

    def await_graph(self, output: Any) -> None:
        """A compiled forward of the root has ended: notice when its backward begins, so that a failure is known."""
        root = self._state.root
        if root is None or not self._state.is_root or not torch.is_grad_enabled() or _torch.backward_is_running():
            return
        outputs = (output,) if isinstance(output, torch.Tensor) else tensors_anywhere_in(output)
        reference = weakref.ref(root)  # the graph keeps no model alive

        def begin_backward(_: torch.Tensor) -> None:
            living = reference()
            if living is not None:
                living.begin_backward()

        before_backward_of_outputs(
            begin_backward, [each for each in outputs if each.grad_fn is not None], output, -1, []
        )

    def _began(self) -> int:
        """`ForwardCall.began` of the last call; -1 if there is none."""
        call = self._calls[-1]() if self._calls else None
        return -1 if call is None else call.began

    # -- in backward

    def _begin(self, gradient: torch.Tensor) -> None:
        state = self._state
        root = state.root
        if root is None:
            raise FSDPRuntimeError(
                f"'{state.name}', or a module above or below it, was unwrapped between a forward and its backward; run "
                "all backwards before."
            )
        root.begin_backward()
        if self.stage is Stage.RUNNING:  # the gradient of another output came first
            return
        self.stage = Stage.RUNNING
        state.on_real_parameters(self._gather, root)

    def _gather(self, root: FSDPRoot) -> None:
        state = self._state
        if state.unit:
            root.schedule.enter_backward(state)
            for group in state.shared:
                group.users.add(state)
                group.took_part = True

    def begin_second(self) -> None:
        """A recorded backward of one forward call begins to be differentiated: gather the unit again.

        The second backward goes on through the nodes of the forward without coming to its outputs: `_begin` never runs.
        """
        root = self._state.root
        assert root is not None, "a backward follows a forward"
        root.begin_backward()
        root.iteration.is_second = True
        on_real_parameters(functools.partial(root.schedule.gather, self._state.unit, for_backward=True))

    def end_call(self, ended: ForwardCall) -> bool:
        """The backward of one forward call is done: reduce, unless the same backward comes to another call.

        Autograd sets ``.grad`` only after all calls have contributed to it, so there is nothing to reduce before.

        Returns:
            Whether this backward is recorded.
        """
        root = self._state.root
        if root is not None and not root.iteration.in_backward:  # a second backward, which came by another way
            root.begin_backward()
        reduces = True
        for reference in self._calls:
            call = reference()
            if call is not None and call is not ended and call.is_pending():
                reduces = False
        self._state.on_real_parameters(self._end, reduces)
        return root is not None and root.iteration.creates_graph

    def end(self, *, reduces: bool) -> None:
        """Reshard and reduce, as the settings say. Nothing here depends on which gradients this rank has."""
        self._state.on_real_parameters(self._end, reduces)

    def _end(self, reduces: bool) -> None:
        self.stage = Stage.NONE
        state = self._state
        for group in state.shared:
            group.users.discard(state)
        root, reshards = state.root, state.reshard_after_backward
        assert root is not None, "a backward follows a forward"
        iteration = root.iteration
        # A graph that may be differentiated once more reads the unsharded parameters, so they keep their values.
        if not (root.watched.holds_graph or iteration.creates_graph or iteration.is_second):
            for group in state.unit:
                if not group.users and (group.settings.requires_gradient_sync if reshards is None else reshards):
                    group.reshard()
        following, iteration.following = iteration.following, None
        if following is not None and following[0] is state.unit:  # set_backward_prefetch("after"): gather them now
            root.schedule.gather_ahead(following[1], for_backward=True)
        if reduces:
            root.schedule.leave_backward(state)

    def finish(self) -> None:
        """The whole backward is done: finish the module if its own end could not be noticed.

        This is so if its inputs need no gradient, if it holds gradients of microbatches that were accumulated without
        communication, or if its gradients came by another way than its outputs (a loss that it keeps as an attribute).
        """
        while self._on_leaves:
            self._on_leaves.pop().remove()
        state = self._state
        if self.stage is not Stage.NONE:
            self.end(reduces=True)
        else:
            is_due = any([group.reducer.is_due() for group in state.own])
            if is_due or any([group.phase is ParamPhase.UNSHARDED for group in state.unit]):
                self.end(reduces=is_due)

    def pause(self) -> None:
        """A backward has ended, and the user runs others before ``finalize_backward``: reduce nothing until then."""
        if self.stage is not Stage.RUNNING:
            return
        if any(group.settings.requires_gradient_sync for group in self._state.own):
            self.stage = Stage.PAUSED
        else:
            self.end(reduces=True)


class WatchedParameters:
    """Unsharded parameters at which a root notices a backward that begins at no output of its modules.

    They belong to all groups while a backward that was recorded may yet be differentiated, and always to groups that
    were lent. The modules hold the sharded parameters meanwhile, as after any backward: programs clip and step.

    Args:
        notice: called when a backward has come to a parameter.

    Attributes:
        holds_graph: a backward was recorded, and may yet be differentiated: nothing is resharded until one has ended
            that was not.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        self.holds_graph = False
        self._notice = notice
        self._resting: Sequence[FSDPParamGroup] = ()
        self._lent: set[FSDPParamGroup] = set()
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}

    def hold_graph(self, holds: bool, groups: Sequence[FSDPParamGroup], *, in_forward: bool) -> None:
        """A backward has ended. If it was recorded, keep the values of the unsharded parameters for its graph.

        Args:
            holds: it was recorded.
            groups: all groups of the root.
            in_forward: the backward ran inside of the root's forward, which needs the parameters unsharded.
        """
        self.holds_graph = holds
        kept = groups if holds else ()
        for group in self._resting:
            if group not in kept:
                group.free_in_place()
        self._resting = kept
        if not in_forward:
            for group in kept:
                group.rest_in_place()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        if self._lent:
            self._lent = {group for group in self._lent if group.is_in_graph()}
            self._watch(self._lent)
        if kept:
            self._watch(kept)

    def lend(self, unit: Iterable[FSDPParamGroup]) -> None:
        """Watch the parameters of ``unit``: a graph reads them whose backward may begin at no output of a module.

        This is so if the user has unsharded them and computes outside of forward, or if a module hides the tensors that
        it returns. The backward is noticed when it comes to a parameter. While a graph reads a parameter, it keeps its
        values.
        """
        for group in unit:
            group.is_lent = True
            self._lent.add(group)
        self._watch(unit)

    def _watch(self, groups: Iterable[FSDPParamGroup]) -> None:
        for group in groups:
            for param in group.params:
                unsharded = param.unsharded
                if unsharded is not None and unsharded.requires_grad and unsharded not in self._hooks:
                    self._hooks[unsharded] = unsharded.register_post_accumulate_grad_hook(self._came_to)

    def _came_to(self, parameter: torch.Tensor) -> None:
        self._notice()


# Hooks into autograd. They own no state but that of one forward call; callers pass what is to be called.

_MOST_HIDDEN = 100
"""How many objects a call looks into for inputs that require a gradient, if its arguments and containers have none."""


class ForwardCall:
    """One forward call of a module whose backward may come, and the node in the graph that ends that backward."""

    __slots__ = ("__weakref__", "_node", "_owner", "_task")

    def __init__(self, owner: ModuleBackward) -> None:
        self._owner = owner
        self._node: weakref.ref[Any] | None = None
        self._task = -1

    def ends_at(self, node: Any) -> None:
        """Its backward is over when ``node`` runs."""
        self._node = weakref.ref(node)

    @property
    def began(self) -> int:
        """Nothing that the call computes has a lower `_torch.order_of`. -1: unknown, no input requires a gradient."""
        node = self._node() if self._node is not None else None
        return -1 if node is None else _torch.order_of(node)

    def end_backward(self) -> bool:
        """Its backward is over. Returns whether that backward is recorded."""
        self._task = _torch.current_backward()
        return self._owner.end_call(self)

    def record(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """Its backward is recorded, and hands out these ``gradients``: notice when one of them is differentiated."""
        present = [each for each in gradients if each is not None]
        if _torch.functorch_is_active() or not any(each.requires_grad for each in present):
            return gradients
        recorded = iter(_Recorded.apply(self._owner, *present))
        return tuple(None if each is None else next(recorded) for each in gradients)

    def watch(self, hidden: Sequence[torch.Tensor]) -> None:
        """Notice when a recorded backward that came to ``hidden`` is differentiated.

        These inputs lie inside of objects of the program's, where no identity node can take their place.
        """
        for tensor in hidden:
            hooks = (_torch.tensor_hooks(tensor) or {}).values()
            if not any(isinstance(hook, _Record) and hook.owner is self._owner for hook in hooks):
                tensor.register_hook(_Record(self._owner))

    @property
    def is_awaited(self) -> bool:
        """Whether its graph still exists, so that a backward may come to it (once more)."""
        node = self._node() if self._node is not None else None
        return node is not None and not _torch.is_released(node)

    def is_pending(self) -> bool:
        """Whether the running backward will still come to this call. Ranks that run the same graph agree on it."""
        node = self._node() if self._node is not None else None
        return node is not None and self._task != _torch.current_backward() and _torch.backward_will_execute(node)


class _PostBackward(torch.autograd.Function):
    """Identity whose backward runs when everything that was computed from its inputs has been differentiated.

    Autograd runs nodes that were created later first, and gradient accumulation before all others; so by then
    the gradients of a module that was called on these inputs have been accumulated.
    """

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # an input that got no gradient inside passes none on
        ctx.call = call
        call.ends_at(ctx)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.call.end_backward():
            gradients = ctx.call.record(gradients)
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _views(tangents[1:])


class _Recorded(torch.autograd.Function):
    """Identity on the gradients that a recorded backward hands out. Differentiating that backward begins here."""

    @staticmethod
    def forward(ctx: Any, owner: ModuleBackward, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.owner.begin_second()
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _views(tangents[1:])


def _views(tangents: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """Views of the tangents: autograd demands views where a function returns its inputs."""
    return tuple(None if each is None else each.view_as(each) for each in tangents)


class _Record:
    """A hook on a tensor whose gradient a recorded backward may hand out."""

    __slots__ = ("owner",)

    def __init__(self, owner: ModuleBackward) -> None:
        self.owner = owner

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if _torch.functorch_is_active() or not gradient.requires_grad:
            return gradient
        (recorded,) = _Recorded.apply(self.owner, gradient)
        return recorded  # type: ignore[no-any-return]


class _TransformablePostBackward(_PostBackward):
    """`_PostBackward` in the form that functorch transforms need, which costs more to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: ForwardCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.call = inputs[0]
        inputs[0].ends_at(ctx)


def after_backward_of_inputs(
    call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any], replaced: Replaced
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arrange that ``call`` ends in backward once all that is computed from these inputs is differentiated.

    ``replaced``: keeps what was in the caller's containers.

    Returns:
        The inputs to use instead, or None if none of them requires a gradient (then nothing was arranged).
    """
    function = _TransformablePostBackward if _torch.functorch_is_active() else _PostBackward
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and not args[0].__dict__:  # most modules
        return (function.apply(call, args[0]), kwargs) if args[0].requires_grad else None
    inputs: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            inputs.append(tensor)
        return tensor

    map_tensors(collect, (args, kwargs))  # the same walk as below, so that each input meets its own output
    if not inputs:
        call.watch([each for each in tensors_anywhere_in((args, kwargs), _MOST_HIDDEN) if each.requires_grad])
        return None
    outputs = iter(function.apply(call, *inputs))
    return map_inputs(lambda tensor: next(outputs) if tensor.requires_grad else tensor, args, kwargs, replaced)


def before_backward_of_outputs(
    callback: Callable[[torch.Tensor], None],
    outputs: Iterable[torch.Tensor],
    output: object,
    began: int,
    on_leaves: list[RemovableHandle],
) -> bool:
    """Arrange that ``callback`` runs in backward as soon as the gradient of any of ``outputs`` arrives.

    Args:
        callback: is called with that gradient.
        outputs: all tensors that ``output`` leads to.
        output: what the module has returned. An object in it may hold tensors that other modules have made, which are
            passed over.
        began: tensors with a lower `_torch.order_of` were made before the call; -1: nothing is known to be.
        on_leaves: takes the hooks on leaf tensors. Leaves outlive the backward, so the caller removes these after it.

    Returns:
        Whether such a backward may come: whether one of the outputs requires a gradient.
    """
    found = False
    for tensor in outputs:
        if tensor.requires_grad:
            is_older = began >= 0 and tensor.grad_fn is not None and _torch.order_of(tensor.grad_fn) < began
            if is_older and all(each is not tensor for each in tensors_in(output)):
                continue
            found = True
            if tensor.grad_fn is not None:
                tensor.register_hook(callback)
                base = tensor._base
                if base is not None and base.grad_fn is not None and _torch.order_of(base.grad_fn) >= began:
                    # A write in place to a view takes the view's hooks out of the graph, and leaves those of its base.
                    base.register_hook(callback)
            elif callback not in (_torch.tensor_hooks(tensor) or {}).values():
                on_leaves.append(tensor.register_hook(callback))
    return found


def before_backward_of_kept(callback: Callable[[torch.Tensor], None], module: nn.Module, began: int) -> None:
    """Arrange that ``callback`` runs when a gradient arrives at a tensor that ``module`` keeps as an attribute.

    A tensor that was computed after the outputs is differentiated before them. Only tensors of the call that ``began``
    are taken: an older one may be another module's. If nothing tells when it began, none is taken.
    """
    for value in tuple(vars(module).values()) if began >= 0 else ():
        if type(value) is not torch.Tensor or value.grad_fn is None or _torch.order_of(value.grad_fn) < began:
            continue
        if callback not in (_torch.tensor_hooks(value) or {}).values():
            value.register_hook(callback)
