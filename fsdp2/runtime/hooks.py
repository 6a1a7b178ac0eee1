"""Hooks into autograd, and walking trees of tensors.

Owns no state but that of one forward call; callers pass what is to be called.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.common import FSDPValueError
from fsdp2.plan.policies import InputCast


class ForwardCall:
    """One forward call of a module whose backward may come, and the node in the graph that ends that backward."""

    __slots__ = ("__weakref__", "_callback", "_node", "_task")

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._node: weakref.ref[Any] | None = None
        self._task = -1

    def ends_at(self, node: Any) -> None:
        """Its backward is over when ``node`` runs."""
        self._node = weakref.ref(node)

    def end_backward(self) -> None:
        """Its backward is over."""
        self._task = _torch.current_backward()
        self._callback()

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
        ctx.call.end_backward()
        return (None, *gradients)


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

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tangents[1:]


_REBUILT = (list, tuple, dict, UserDict)
"""Containers that can be rebuilt with other items; dataclass instances too."""


def _items(tree: object) -> Iterable[tuple[Any, Any]]:
    """The keys and values of a container; none for anything else."""
    if isinstance(tree, (list, tuple)):
        return enumerate(tree)
    if isinstance(tree, Mapping):
        return tree.items()
    if _is_dataclass(tree):
        names = (entry.name for entry in dataclasses.fields(tree))  # type: ignore[arg-type]
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return ()


def _is_dataclass(tree: object) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """All tensors in ``tree``, through lists, tuples, mappings and dataclass instances, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for _, value in _items(tree):
            yield from tensors_in(value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced by ``function`` of it.

    Containers are copied, in their own type, only where something in them changes. Mappings other than ``dict`` and
    ``UserDict`` are left alone.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if not isinstance(tree, _REBUILT) and not _is_dataclass(tree):
        return tree
    changes = {}
    for key, value in _items(tree):
        replacement = map_tensors(function, value)
        if replacement is not value:
            changes[key] = replacement
    return _with_changes(tree, changes) if changes else tree


def _with_changes(tree: Any, changes: dict[Any, Any]) -> Any:
    if isinstance(tree, tuple):
        values = [changes.get(index, value) for index, value in enumerate(tree)]
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    rebuilt = copy.copy(tree)
    for key, value in changes.items():
        if _is_dataclass(tree):
            object.__setattr__(rebuilt, key, value)  # of frozen ones as well
        else:
            rebuilt[key] = value
    return rebuilt


def on_real_parameters(action: Callable[..., None], *args: Any) -> None:
    """Run ``action`` on real parameters, although functorch may be transforming the forward around it."""
    if not _torch.functorch_is_active():
        action(*args)
    else:
        with _torch.without_functorch():
            action(*args)


def cast_floating_point(dtype: torch.dtype, tree: Any) -> Any:
    """``tree`` with every floating-point tensor of another dtype cast to ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree)


def cast_inputs(
    cast: InputCast, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` for ``function``, those that ``cast`` names cast."""
    if cast.names is None:
        return cast_floating_point(cast.dtype, (args, kwargs))  # type: ignore[no-any-return]
    return cast_named(cast, argument_names(function), args, kwargs, cast_floating_point)


def cast_named(
    cast: InputCast,
    names: tuple[tuple[str, ...], str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    convert: Callable[[torch.dtype, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` of a function with these `argument_names`, those that ``cast`` names converted."""
    assert cast.names is not None, "names to look for"
    positional, rest = names
    of_args = [*positional, *[rest] * max(0, len(args) - len(positional))]
    new_args = tuple(
        convert(cast.dtype, value) if name in cast.names else value for name, value in zip(of_args, args, strict=False)
    )
    new_kwargs = {name: convert(cast.dtype, value) if name in cast.names else value for name, value in kwargs.items()}
    return new_args, new_kwargs


def argument_names(function: Callable[..., Any]) -> tuple[tuple[str, ...], str]:
    """Names of the positional arguments (without self), and of those that follow (``*args``)."""
    return _argument_names(getattr(function, "__func__", function), inspect.ismethod(function))


@functools.lru_cache(maxsize=1024)
def _argument_names(function: Callable[..., Any], is_method: bool) -> tuple[tuple[str, ...], str]:
    parameters = inspect.signature(function).parameters.values()
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    rest = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), "")
    return tuple(positional[is_method:]), rest


def refuse_unknown_arguments(cast: InputCast | None, modules: Sequence[nn.Module]) -> None:
    """Refuse names of inputs to cast that no forward of ``modules`` has.

    Raises:
        FSDPValueError: naming those that there are.
    """
    if cast is None or cast.names is None:
        return
    known: dict[str, None] = {}
    for module in modules:
        for each in inspect.signature(module.forward).parameters.values():
            if each.kind is each.VAR_KEYWORD:
                return
            known[each.name] = None
    for name in cast.names:
        if name not in known:
            raise FSDPValueError(
                f"cast_forward_inputs names '{name}', but forward of {type(modules[0]).__name__} has the arguments "
                f"{', '.join(known)}."
            )


def after_backward_of_inputs(
    call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arrange that ``call`` ends in backward once all that is computed from these inputs is differentiated.

    Returns:
        The inputs to use instead, or None if none of them requires a gradient (then nothing was arranged).
    """
    function = _TransformablePostBackward if _torch.functorch_is_active() else _PostBackward
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # most modules
        return (function.apply(call, args[0]), kwargs) if args[0].requires_grad else None
    inputs: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            inputs.append(tensor)
        return tensor

    map_tensors(collect, (args, kwargs))  # the same walk as below, so that each input meets its own output
    if not inputs:
        return None
    outputs = iter(function.apply(call, *inputs))
    return map_tensors(lambda tensor: next(outputs) if tensor.requires_grad else tensor, (args, kwargs))  # type: ignore[no-any-return]


def before_backward_of_outputs(callback: Callable[[torch.Tensor], None], outputs: object) -> None:
    """Arrange that ``callback`` runs in backward as soon as the gradient of any of ``outputs`` arrives."""
    for tensor in _outputs(outputs):
        if tensor.requires_grad:
            tensor.register_hook(callback)


def _outputs(outputs: object) -> Iterable[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return (outputs,)
    found = list(tensors_in(outputs))
    # An object of a class of the user's own: what it holds directly.
    return found or list(tensors_in(getattr(outputs, "__dict__", None)))
