"""Trees of tensors, as modules take and return them: walking, replacing, casting.

This file knows nothing of autograd or of sharding.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp2.core.options import InputCast
from fsdp2.errors import FSDPTypeError, FSDPValueError

_SEQUENCES = frozenset({list, tuple, torch.Size})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, UserDict})


def _is_record(kind: type) -> bool:
    """Whether ``kind`` is a dataclass and no other kind of container. (Outputs of transformers are dicts as well.)"""
    return dataclasses.is_dataclass(kind) and not issubclass(kind, (nn.Module, list, tuple, torch.Tensor))


def _items(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """The keys and values of a container; None for anything else, which is neither read nor written.

    Containers are known by their exact type: a class of the program may do anything when it is read or written.
    """
    kind = type(tree)
    if kind in _SEQUENCES or (kind.__bases__ == (tuple,) and hasattr(kind, "_fields")):
        return enumerate(tree)
    if kind in _MAPPINGS:
        return tree.items()  # type: ignore[no-any-return]
    if not _is_record(kind):
        return None
    if issubclass(kind, dict):
        return tree.items()  # type: ignore[no-any-return]
    names = (entry.name for entry in dataclasses.fields(tree))
    return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """All tensors in ``tree``, through its containers, each of them once, in order."""
    return _tensors_in(tree, set())


def _tensors_in(tree: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif id(tree) not in seen:
        seen.add(id(tree))
        for _, value in _items(tree) or ():
            yield from _tensors_in(value, seen)


_LEAVES = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, nn.Module, types.ModuleType)
_MOST_VISITED = 10_000


def tensors_anywhere_in(output: object, most: int = _MOST_VISITED) -> list[torch.Tensor]:
    """All tensors that ``output`` leads to, also through sets, attributes, ``__slots__``, closures and partials.

    It does not look into modules, nor into more than ``most`` objects.

    Raises:
        FSDPTypeError: it is a generator or a coroutine, whose code is still to run.
    """
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, map, filter)):
        raise FSDPTypeError(
            f"forward returned a {type(output).__name__}, whose code runs when it is iterated over: the parameters "
            "are resharded by then. Return a list or a tuple of what it makes."
        )
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting: deque[object] = deque([output])
    while waiting and len(seen) < most:
        each = waiting.popleft()
        if isinstance(each, _LEAVES) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found.append(each)
        else:
            waiting.extend(_parts(each))
    return found


def _parts(value: Any) -> Iterable[object]:
    """The objects that ``value``, which is no tensor, refers to."""
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
    for kind in kinds:
        if isinstance(value, kind):
            yield from kind.__iter__(value)  # a subclass of the program may iterate otherwise
    if isinstance(value, dict):
        yield from dict.values(value)
    elif isinstance(value, types.MappingProxyType):
        yield from value.values()
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        yield value.__self__
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is still empty
                continue
        return
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            yield getattr(value, name, None)


class Replaced:
    """The replacements of tensors in the caller's own lists, dicts and objects, until a forward is over.

    A module may write into what it is passed, and the caller reads it there: so the containers stay the same objects.
    After the forward, replacements that are still in them, and were not written, are taken out again. If the module has
    written into the cast of a tensor, as into a cache, the values are copied back.

    Attributes:
        containers: the containers that were changed, by identity.
        casts: for each cast of a tensor, the cast, its version when it was made, and the original.
    """

    __slots__ = ("_originals", "casts", "containers")

    def __init__(self) -> None:
        self.containers: dict[int, Any] = {}
        self._originals: dict[int, tuple[Any, int, Any]] = {}
        self.casts: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def cast(self, original: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``original`` in another ``dtype``."""
        if torch.is_inference_mode_enabled():  # inference tensors have no version that would count writes
            with torch.inference_mode(False), torch.no_grad():
                replacement = original.to(dtype)
        else:
            replacement = original.to(dtype)
        self.casts.append((replacement, replacement._version, original))
        return replacement

    def put(self, container: Any, key: Any, original: Any, replacement: Any) -> None:
        """Put ``replacement`` where ``original`` is in ``container``, at ``key``."""
        self.containers[id(container)] = container
        self._originals[id(replacement)] = (replacement, _version_of(replacement), original)
        _set(container, key, replacement)

    def take_out(self) -> None:
        """Put the originals back, and copy back what was written into casts."""
        for container in self.containers.values():
            for key, value in list(_items(container) or ()):
                found = value
                while id(value) in self._originals:  # a replacement may have been replaced once more, by a later cast
                    replacement, version, original = self._originals[id(value)]
                    if _version_of(replacement) != version:
                        break
                    value = original
                if value is not found:
                    _set(container, key, value)
        for replacement, version, original in self.casts:
            # If the original requires a gradient, a write into its cast is part of the graph, and no cache.
            if replacement._version != version and not original.requires_grad:
                original.copy_(replacement)


def _version_of(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _set(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (list, dict, UserDict)):
        container[key] = value
    else:
        object.__setattr__(container, key, value)  # frozen dataclasses too


def _is_mutable(tree: Any) -> bool:
    """Whether others that hold ``tree`` can see what is written into it."""
    if isinstance(tree, (list, dict, UserDict)):
        return True
    return not isinstance(tree, tuple) and not type(tree).__dataclass_params__.frozen


Known = dict[int, tuple[Any, Any]]
"""The objects that were mapped already, by identity, each with its result."""


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    tree: Any,
    replaced: Replaced | None = None,
    known: Known | None = None,
) -> Any:
    """``tree`` with every tensor replaced by ``function`` of it, which is called once for each tensor.

    Containers are copied, in their own type, only where something in them changes. With ``replaced``, those that can be
    written into stay the same objects, with other contents until ``replaced`` takes these out. ``known``: to be passed
    for several trees whose common parts must have common results.
    """
    if known is None:
        known = {}
    elif id(tree) in known:
        return known[id(tree)][1]
    if isinstance(tree, torch.Tensor):
        mapped = function(tree)
        if mapped is not tree and tree.__dict__ and type(tree) is torch.Tensor:
            mapped.__dict__.update(tree.__dict__)  # attributes that the program has set
        known[id(tree)] = (tree, mapped)
        return mapped
    items = _items(tree)
    if items is None:
        return tree
    known[id(tree)] = (tree, tree)  # a container may contain itself
    changes = []
    for key, value in list(items):
        replacement = map_tensors(function, value, replaced, known)
        if replacement is not value:
            changes.append((key, value, replacement))
    if not changes:
        return tree
    if replaced is not None and _is_mutable(tree):
        for change in changes:
            replaced.put(tree, *change)
        return tree
    found = _with_changes(tree, {key: replacement for key, _, replacement in changes})
    known[id(tree)] = (tree, found)
    return found


def _with_changes(tree: Any, changes: dict[Any, Any]) -> Any:
    if isinstance(tree, tuple):
        values = [changes.get(index, value) for index, value in enumerate(tree)]
        return tree._make(values) if hasattr(tree, "_make") else type(tree)(values)
    rebuilt = copy.copy(tree)
    for key, value in changes.items():
        _set(rebuilt, key, value)
    return rebuilt


def text_of(tree: Any, leaf: Callable[[Any], str]) -> str:
    """``tree`` as text, through the containers that `map_tensors` walks; ``leaf`` makes the text of anything else."""
    found = None if isinstance(tree, torch.Tensor) else _items(tree)
    if found is None:
        return leaf(tree)
    is_sequence = isinstance(tree, (list, tuple))
    items = [f"{'' if is_sequence else f'{key!r}: '}{text_of(value, leaf)}" for key, value in found]
    signs: dict[Any, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}
    opening, closing = signs.get(type(tree), (f"{type(tree).__name__}(", ")"))
    return f"{opening}{', '.join(items)}{closing}"


def map_inputs(
    function: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], replaced: Replaced
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`map_tensors` for the arguments of a call. (Tuple and dict of the arguments themselves are not the caller's.)"""
    known: Known = {}
    new_args = tuple([map_tensors(function, value, replaced, known) for value in args])
    return new_args, {name: map_tensors(function, value, replaced, known) for name, value in kwargs.items()}


def cast_floating_point(
    dtype: torch.dtype, tree: Any, replaced: Replaced | None = None, known: Known | None = None
) -> Any:
    """``tree`` with its floating-point tensors cast to ``dtype``. For ``replaced`` and ``known`` see `map_tensors`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        return tensor.to(dtype) if replaced is None else replaced.cast(tensor, dtype)

    return map_tensors(cast, tree, replaced, known)


def cast_inputs(
    cast: InputCast, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], replaced: Replaced
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` of ``function``, cast where ``cast`` names them. For ``replaced`` see `map_tensors`."""

    known: Known = {}

    def convert(dtype: torch.dtype, value: Any) -> Any:
        return cast_floating_point(dtype, value, replaced, known)

    if cast.names is None:
        new_args = tuple([convert(cast.dtype, value) for value in args])
        return new_args, {name: convert(cast.dtype, value) for name, value in kwargs.items()}
    return cast_named(cast, argument_names(function), args, kwargs, convert)


def cast_named(
    cast: InputCast,
    names: tuple[tuple[str, ...], str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    convert: Callable[[torch.dtype, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` of a function with these `argument_names`; those that ``cast`` names are converted."""
    assert cast.names is not None, "names to look for"
    positional, rest = names
    of_args = [*positional, *[rest] * max(0, len(args) - len(positional))]
    new_args = tuple(
        convert(cast.dtype, value) if name in cast.names else value for name, value in zip(of_args, args, strict=False)
    )
    new_kwargs = {name: convert(cast.dtype, value) if name in cast.names else value for name, value in kwargs.items()}
    return new_args, new_kwargs


def argument_names(function: Callable[..., Any]) -> tuple[tuple[str, ...], str]:
    """The names of the positional arguments (without self), and the name of ``*args`` ("" if there is none)."""
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
        FSDPValueError: there is such a name; the message lists the arguments that there are.
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
