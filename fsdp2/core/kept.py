"""Finds parameters that modules hold beside registering them: in lists, dicts and attributes, and as views.

Each such place is registered as well, or refused. Else a forward would compute there with the values from before
`fully_shard`, and gradients would be lost.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.core.param import FSDPParam, Registration, fsdp_param_of, replacement_of
from fsdp2.errors import FSDPValueError

_LONGEST = 1_000
"""Longer lists and dicts are taken for data, and not searched."""


class _Place:
    """A place in a list, a dict or a module's attributes, with the interface of a mapping that registers one parameter.

    If the program writes something else there, or removes it, this is respected.
    """

    __slots__ = ("_holder", "_key", "_parameter")

    def __init__(self, holder: Any, key: Any, parameter: nn.Parameter) -> None:
        self._holder, self._key, self._parameter = holder, key, parameter

    def __setitem__(self, name: str, parameter: nn.Parameter) -> None:
        before, self._parameter = self._parameter, parameter
        with contextlib.suppress(LookupError):  # the list is shorter by now, the dict has no such key
            if self._holder[self._key] is before:
                self._holder[self._key] = parameter

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._parameter

    def get(self, name: str) -> nn.Parameter:
        """The parameter that was registered last."""
        return self._parameter


class Outside(NamedTuple):
    """The places where modules keep parameters beside registering them.

    Attributes:
        places: the places of each parameter that is being sharded.
        of_sharded: the places of parameters that another call has sharded.
    """

    places: dict[nn.Parameter, list[Registration]]
    of_sharded: list[tuple[FSDPParam, Registration]]


def registered_outside(
    modules: Iterable[nn.Module], managed: Container[nn.Module], names: Mapping[nn.Parameter, str]
) -> Outside:
    """The places where ``modules`` keep parameters in ``names``, and ``managed`` ones also parameters sharded before.

    A plain list, dict (or `OrderedDict`, `defaultdict`) or deque in an attribute, or in another of these, is such a
    place. A tuple, a set or a class of the program cannot be written: it stays as it is, and a warning says so.

    Args:
        modules: all modules of the tree.
        managed: the modules that no other call has searched.
        names: the parameters that are being sharded, with their names.

    Raises:
        FSDPValueError: a module keeps a view of a parameter, or two parameters lie in the same memory.
    """
    lying = _refuse_shared_memory(names)
    found = Outside({}, [])
    for module in modules:
        for name, value in vars(module).items():
            if name in _OF_MODULES or not isinstance(value, _HOLDING):
                continue
            stay: dict[str, str] = {}
            for holder, key, tensor in _tensors_kept(vars(module), name, value, set()):
                param: FSDPParam | None = None
                if not isinstance(tensor, nn.Parameter) or tensor not in names:
                    _refuse_view(module, name, tensor, names, lying)
                    successor = replacement_of(tensor) if module in managed else None
                    param = None if successor is None else fsdp_param_of(successor)
                    if param is None:
                        continue
                if holder is None:
                    stay[names[tensor] if param is None else param.path] = key
                elif param is None:
                    found.places.setdefault(tensor, []).append((_Place(holder, key, tensor), name))
                else:
                    found.of_sharded.append((param, (_Place(holder, key, tensor), name)))
            if stay:
                _warn_of_holder(module, name, stay)
    return found


def _refuse_view(
    module: nn.Module, name: str, tensor: torch.Tensor, names: Mapping[nn.Parameter, str], lying: Mapping[int, str]
) -> None:
    """Refuse that ``tensor`` is a view of a parameter, or a detached alias."""
    base = tensor._base
    if isinstance(base, nn.Parameter) and base in names:
        viewed: str | None = names[base]
    else:
        viewed = None if isinstance(tensor, nn.Parameter) else lying.get(_torch.storage_of(tensor))
    if viewed is not None:
        raise FSDPValueError(
            f"{type(module).__name__} keeps a view of parameter '{viewed}' in its attribute '{name}', which would have "
            "the values of before for ever: make the view in forward."
        )


def _warn_of_holder(module: nn.Module, name: str, stay: Mapping[str, str]) -> None:
    (path, kind), *rest = stay.items()
    others = f" and {len(rest)} more" if rest else ""
    warnings.warn(
        f"{type(module).__name__} keeps parameter '{path}'{others} in its attribute '{name}', inside of a {kind}, "
        "where it stays what it was before fully_shard: it has the values of before, and gets no gradient. Keep it in "
        "a list or a dict, which are seen to, or take it from its module in forward.",
        stacklevel=5,
    )


_OF_MODULES = frozenset(vars(nn.Module()))
_MUTABLE = (list, dict, OrderedDict, defaultdict, deque)
_HOLDING = (torch.Tensor, list, tuple, dict, set, frozenset, deque)


def _tensors_kept(holder: Any, key: Any, value: Any, seen: set[int]) -> Iterator[tuple[Any, Any, Any]]:
    """The tensors in ``value``, which is ``holder[key]``, each with its container and its key there.

    If nothing can be written there, the container is None, and its kind takes the place of the key.
    """
    if isinstance(value, torch.Tensor):
        yield holder, key, value
        return
    if not isinstance(value, _HOLDING) or id(value) in seen or len(value) > _LONGEST:
        return
    seen.add(id(value))
    # The methods of the built-in class are used: a subclass of the program may iterate otherwise.
    kind: Any = next(each for each in _HOLDING if isinstance(value, each))
    parts = list(kind.items(value)) if hasattr(kind, "items") else list(enumerate(kind.__iter__(value)))
    for at, part in parts:
        if type(value) in _MUTABLE and holder is not None:
            yield from _tensors_kept(value, at, part, seen)
        else:
            yield from _tensors_kept(None, type(value).__name__, part, seen)
        if isinstance(at, torch.Tensor):
            yield None, "dict, as a key", at


def _refuse_shared_memory(names: Mapping[nn.Parameter, str]) -> dict[int, str]:
    """Refuse two trained parameters that lie in the same memory: their shards would not.

    Returns:
        For each storage that one parameter has for itself, by identity, the name of the parameter.
    """
    alone: dict[int, str] = {}
    lying: dict[tuple[int, int], str] = {}
    for parameter, name in names.items():
        storage = _torch.storage_of(parameter)
        if not storage or not parameter.numel():
            continue
        if _torch.plain_of(parameter).untyped_storage().nbytes() == _torch.plain_of(parameter).nbytes:
            alone[storage] = name
        if not parameter.requires_grad:
            continue
        other = lying.setdefault((storage, int(_torch.plain_of(parameter).storage_offset())), name)
        if other != name:
            raise FSDPValueError(
                f"parameters '{other}' and '{name}' are two, and share their memory, which their shards will not: tie "
                "them by registering one of them in both places (module.weight = other.weight) before fully_shard."
            )
    return alone
