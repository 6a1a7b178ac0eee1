"""Hooks into autograd, by which the beginning and the end of a module's backward are noticed; and what a state hangs on
the modules that it manages beside those around forward: hooks for state dicts, marks. Knows nothing of what states do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch
from fsdp2.core.trees import Replaced, map_inputs, map_tensors, tensors_anywhere_in, tensors_in

# Hooks into autograd.
#
# Owns no state but that of one forward call; callers pass what is to be called.


_MOST_HIDDEN = 100
"""How many objects are looked into, in each call, for inputs that require a gradient, if none was found elsewhere."""


class CallOwner(Protocol):
    """What a `ForwardCall` belongs to."""

    def end_call(self) -> bool:
        """The backward of a call is over. Returns whether it was recorded (``create_graph=True``)."""

    def begin_second_backward(self) -> None:
        """The backward of a call, which was recorded, begins to be differentiated itself."""


class ForwardCall:
    """One forward call of a module whose backward may come, and the node in the graph that ends that backward."""

    __slots__ = ("__weakref__", "_node", "_owner", "_task")

    def __init__(self, owner: CallOwner) -> None:
        self._owner = owner
        self._node: weakref.ref[Any] | None = None
        self._task = -1

    def ends_at(self, node: Any) -> None:
        """Its backward is over when ``node`` runs."""
        self._node = weakref.ref(node)

    @property
    def began(self) -> int:
        """What it computes comes no earlier in `_torch.order_of`; -1: not known, for no input requires a gradient."""
        node = self._node() if self._node is not None else None
        return -1 if node is None else _torch.order_of(node)

    def end_backward(self) -> bool:
        """Its backward is over. Returns whether that is recorded."""
        self._task = _torch.current_backward()
        return self._owner.end_call()

    def record(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """Its backward is recorded, and hands out these ``gradients``: notice when that is differentiated."""
        present = [each for each in gradients if each is not None]
        if _torch.functorch_is_active() or not any(each.requires_grad for each in present):
            return gradients
        recorded = iter(_Recorded.apply(self._owner, *present))
        return tuple(None if each is None else next(recorded) for each in gradients)

    def watch(self, hidden: Sequence[torch.Tensor]) -> None:
        """These inputs, inside of objects, cannot be replaced: notice when a recorded backward that came to them is."""
        for tensor in hidden:
            hooks = (_torch.tensor_hooks(tensor) or {}).values()
            if not any(isinstance(hook, _Record) and hook.owner is self._owner for hook in hooks):
                tensor.register_hook(_Record(self._owner))

    @property
    def is_awaited(self) -> bool:
        """Whether its graph is there, so that a backward may come to it (once more)."""
        node = self._node() if self._node is not None else None
        return node is not None and not _torch.is_released(node)

    def is_pending(self) -> bool:
        """Whether the running backward will still come to this call. The same on all ranks that run the same graph."""
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
    """Identity on the gradients that a recorded backward hands out: the first of it to be differentiated."""

    @staticmethod
    def forward(ctx: Any, owner: CallOwner, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.owner.begin_second_backward()
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _views(tangents[1:])


def _views(tangents: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """As autograd wants tangents of inputs that are returned as they are."""
    return tuple(None if each is None else each.view_as(each) for each in tangents)


class _Record:
    """A hook on a tensor whose gradient a recorded backward may hand out."""

    __slots__ = ("owner",)

    def __init__(self, owner: CallOwner) -> None:
        self.owner = owner

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if _torch.functorch_is_active() or not gradient.requires_grad:
            return gradient
        (recorded,) = _Recorded.apply(self.owner, gradient)
        return recorded  # type: ignore[no-any-return]


class _TransformablePostBackward(_PostBackward):
    """The same in the form that functorch transforms need, which costs more to call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: ForwardCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.call = inputs[0]
        inputs[0].ends_at(ctx)


def on_real_parameters(action: Callable[..., None], *args: Any) -> None:
    """Run ``action`` on real parameters, although functorch may be transforming the forward around it."""
    if not _torch.functorch_is_active():
        action(*args)
    else:
        with _torch.without_functorch():
            action(*args)


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
        callback: with that gradient.
        outputs: all tensors that ``output`` leads to.
        output: what the module has returned. An object of some class in it may hold what other modules have made: that
            is passed over.
        began: which is what comes before this in `_torch.order_of`.
        on_leaves: takes the hooks on leaves, to be removed after the backward: those outlive it, and have others.

    Returns:
        Whether there may be one: whether one of them requires a gradient.
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
    """The same of tensors that ``module`` keeps as attributes, from the call that ``began`` on.

    One that was computed after the outputs is differentiated before them. Of a call of which nothing tells when it
    began (no input requires a gradient) none is taken, as it may be another module's.
    """
    for value in tuple(vars(module).values()) if began >= 0 else ():
        if type(value) is not torch.Tensor or value.grad_fn is None or _torch.order_of(value.grad_fn) < began:
            continue
        if callback not in (_torch.tensor_hooks(value) or {}).values():
            value.register_hook(callback)


STATE = "_fsdp_state"
"""The attribute of modules that is their state."""


class Settling(Protocol):
    """What the hooks call."""

    def quiesce(self, *, frees: bool) -> None:
        """Reshard, before the user's code looks at the parameters; not ``frees``: but for what a graph reads."""

    def adopt_replaced(self) -> None:
        """Take over parameters that were replaced."""


class StateDictHook:
    """Before state is saved or loaded it reshards, as unsharded parameters may be registered; after, it adopts.

    Attributes:
        state: whose parameters the module holds; None in a copy of a part of what was sharded.
        adopts: after loading; else before saving and loading.
    """

    __slots__ = ("adopts", "state")

    def __init__(self, state: Settling | None, adopts: bool) -> None:
        self.state = state
        self.adopts = adopts

    def __call__(self, *args: object) -> None:
        """Whatever the arguments are."""
        if self.state is not None:
            if self.adopts:
                self.state.adopt_replaced()
            else:
                self.state.quiesce(frees=False)


class ModuleHooks:
    """The hooks of one state on modules.

    Attributes:
        handles: by which all of them can be removed.
        hooks: those for state dicts.
        managed: the modules that are marked as managed.
        methods: of modules, that gather like forward: what was set on the module before, None if nothing was.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.hooks: tuple[StateDictHook, ...] = ()
        self.managed: tuple[nn.Module, ...] = ()
        self.methods: dict[tuple[nn.Module, str], Any] = {}

    def handle_state_dicts(
        self,
        state: Settling,
        modules: Iterable[nn.Module],
        managed: Iterable[nn.Module],
        take_rows: Callable[..., None],
    ) -> None:
        """Let ``state`` know when state dicts of ``managed`` modules, which lie below ``modules``, come and go.

        ``take_rows``: a hook that puts rows in the place of whole values, before each of them is loaded.
        """
        quiesce, adopt = StateDictHook(state, adopts=False), StateDictHook(state, adopts=True)
        self.hooks = (quiesce, adopt)
        for module in managed:
            if module._parameters:
                self.handles.append(module.register_state_dict_pre_hook(quiesce))
                self.handles.append(module.register_load_state_dict_pre_hook(quiesce))
                self.handles.append(module.register_load_state_dict_pre_hook(take_rows))
        for module in modules:
            self.handles.append(module.register_load_state_dict_post_hook(adopt))
            self.handles.append(module.register_load_state_dict_pre_hook(take_rows))

    def mark(self, managed: Iterable[nn.Module]) -> None:
        """Set what torch.compile, and programs that ask whether a module is sharded, look for."""
        self.managed = tuple(managed)
        for module in self.managed:
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
            module._fsdp_use_orig_params = True  # type: ignore[assignment]

    def detach(self) -> None:
        """Take everything off the modules."""
        for handle in self.handles:
            handle.remove()
        for (module, name), before in self.methods.items():
            module.__dict__.pop(name, None)
            if before is not None:
                module.__dict__[name] = before
        for module in self.managed:
            module.__dict__.pop("_is_fsdp_managed_module", None)
            module.__dict__.pop("_fsdp_use_orig_params", None)
