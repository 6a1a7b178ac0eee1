"""`Fixed`: what a recorded step has read on the host once and for all, so that a replay would not notice a change.

Kernels were launched with numbers and addresses. Whatever may change between two replays is looked at before each. A
change is an error that names it: a replay that went on would train something else.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch
from fsdp2.core.state import FSDPState
from fsdp2.core.structure import Structure

Found = tuple[tuple[str, ...], Any]
"""Words that say what something is, and the thing itself. (The words are joined only if it has changed.)"""


_OF_THE_GRAPH = object()
"""Stands for a tensor that each replay makes or fills itself."""


class Fixed:
    """The state of modules, optimizers and settings. Keeps the tensors alive that the graph reads and writes.

    Args:
        modules: the roots; all modules below them count.
        states: the states of the sharded ones among them.
        optimizers: the optimizers that the step steps.
        device: the device of the graph.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        states: Sequence[FSDPState],
        optimizers: Sequence[Optimizer],
        device: torch.device,
    ) -> None:
        self._roots = modules
        self._structure = Structure(modules)
        self._places = _places(modules)
        self._modules = [named for module in modules for named in module.named_modules()]
        self._states = states
        self._optimizers = optimizers
        self._device = device
        self._stepped = list(self._read_stepped())
        self._is_recorded = False
        self._denominators = list(self._read_denominators())
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._names = [[name for name in group if name != "params"] for group in groups]  # schedulers may add names
        self._tensors = list(self._read_tensors())
        self._addresses = _addresses(self._tensors)
        self._facts = list(self._read_facts())

    def take_denominators(self) -> None:
        """The step was recorded: denominators that it has set itself belong to the graph, whatever is set later."""
        pairs = zip(self._denominators, self._read_denominators(), strict=True)
        self._denominators = [
            (words, before if before is after else _OF_THE_GRAPH) for (words, before), (_, after) in pairs
        ]
        self._is_recorded = True

    def change(self) -> str | None:
        """What has changed since, as text; None if nothing has."""
        for (words, before), (_, after) in zip(self._stepped, self._read_stepped(), strict=True):
            if list(map(len, before)) != list(map(len, after)) or not _are_same(chain(*before), chain(*after)):
                return f"{_text(words)} are others"
        for (words, before), (_, after) in zip(self._denominators, self._read_denominators(), strict=True):
            if self._is_recorded and before is not after and before is not _OF_THE_GRAPH:
                return f"{_text(words)} is another tensor"
        # Identity first, then addresses: a tensor that was replaced has a clearer message than one that moved.
        tensors = list(self._read_tensors())
        if len(tensors) != len(self._tensors) or not _are_same(*map(_values, (tensors, self._tensors))):
            return self._replaced(tensors)
        if self._structure.has_changed():
            moved_module = self._moved_module()
            if moved_module is not None:
                return moved_module
        addresses = _addresses(tensors)
        if addresses != self._addresses:
            moved = zip(self._tensors, self._addresses, addresses, strict=True)
            return next(f"{_text(words)} lies elsewhere" for (words, _), before, after in moved if before != after)
        for (words, before), (_, after) in zip(self._facts, self._read_facts(), strict=True):
            difference = _difference(before, after)
            if difference is not None:
                return f"{_text(words)} is {difference}"
        return None

    def _read_tensors(self) -> Iterator[Found]:
        """The tensors whose addresses the graph has."""
        for path, module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield ("parameter", path, name), _torch.plain_of(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield ("buffer", path, name), _torch.plain_of(buffer)
        for optimizer in self._optimizers:
            which = type(optimizer).__name__
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield ("the state of", which, name), _torch.plain_of(value)
        for which, name, value in self._read_hyperparameters():
            if self._is_read_by_kernels(value):
                yield ("the hyperparameter of", which, name), value

    def _read_stepped(self) -> Iterator[tuple[tuple[str, ...], list[list[torch.Tensor]]]]:
        """What each optimizer steps, by its parameter groups."""
        for optimizer in self._optimizers:
            yield (
                ("the parameters of", type(optimizer).__name__),
                [group["params"][:] for group in optimizer.param_groups],
            )

    def _read_denominators(self) -> Iterator[Found]:
        """The tensors that gradients are divided by. A step may make a new one each time, inside of the graph."""
        for state in self._states:
            for group in state.unit:
                found = group.settings.denominator
                found = found if isinstance(found, torch.Tensor) else None
                yield ("the denominator of set_gradient_reduction() of", group.name), found

    def _is_read_by_kernels(self, value: Any) -> bool:
        """Whether ``value`` may change in place: kernels read it. A tensor elsewhere was passed to them as a number."""
        return isinstance(value, torch.Tensor) and value.device.type == self._device.type

    def _read_facts(self) -> Iterator[Found]:
        """What the step has asked on the host, and a replay does not ask again."""
        for path, module in self._modules:
            yield ("whether it trains, of module", path), module.training
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield ("requires_grad of", path, name), parameter.requires_grad
        for state in self._states:
            resharding = state.reshard_after_forward, state.reshard_after_backward
            yield ("the resharding of", state.name), resharding
            yield ("a setting of the root", state.name), state.root_settings
            for group in state.unit:
                yield ("a setting of", group.name), group.settings
        for which, name, value in self._read_hyperparameters():
            if not self._is_read_by_kernels(value):
                plain = value.tolist() if isinstance(value, torch.Tensor) else value
                yield ("the hyperparameter of", which, name), plain

    def _read_hyperparameters(self) -> Iterator[tuple[str, str, Any]]:
        groups = ((type(each).__name__, group) for each in self._optimizers for group in each.param_groups)
        for (which, group), names in zip(groups, self._names, strict=False):
            for name in names:
                yield which, name, group.get(name)

    def _moved_module(self) -> str | None:
        """A submodule that is not where it was, or one that is new, of which the graph knows nothing."""
        places = _places(self._roots)
        for place, module in self._places.items():
            if places.get(place) is not module:
                return f"{_text(('module', place[1]))} is another one, or is not there any more"
        return next((f"{_text(('module', path))} is new" for root, path in places.keys() - self._places.keys()), None)

    def _replaced(self, tensors: Sequence[Found]) -> str:
        present, known = ({id(each) for each in _values(some)} for some in (tensors, self._tensors))
        for words, tensor in self._tensors:
            if id(tensor) not in present:
                return f"{_text(words)} is another tensor, or is not there any more"
        return f"{next(_text(words) for words, tensor in tensors if id(tensor) not in known)} is new"


class Kept:
    """What a recording may change on the host, though nothing of it runs on the device.

    These are buffers of ``modules``, and states and hyperparameters of ``optimizers``.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._buffers = [(each._buffers, dict(each._buffers)) for module in modules for each in module.modules()]
        # Shallow copies will do: recording runs no kernel, so entries may be new or replaced, but values stay.
        self._states = [(each, {key: copy.copy(state) for key, state in each.state.items()}) for each in optimizers]
        groups = (group for each in optimizers for group in each.param_groups)
        self._hyperparameters = [(group, dict(group)) for group in groups]

    def put_back(self) -> None:
        """Restore what there was when this was made."""
        for mapping, before in (*self._buffers, *self._hyperparameters):
            mapping.clear()
            mapping.update(before)
        for optimizer, states in self._states:
            optimizer.state.clear()
            optimizer.state.update(states)


def host_state(optimizers: Sequence[Optimizer], device: torch.device) -> list[Found]:
    """What a step of ``optimizers`` on ``device`` counts on the host, where a replay does not count on."""
    found: list[Found] = []
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                words = (type(optimizer).__name__, name)
                if not isinstance(value, torch.Tensor):
                    found.append((words, value))
                elif value.device.type != device.type:
                    found.append((words, _torch.version_of(value)))
    return found


def _difference(before: Any, after: Any) -> str | None:
    """How ``after`` differs from ``before``; in settings, which field does. Denominators are not compared."""
    # Tensors among settings are denominators, which are compared apart.
    if before is after or isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return None
    if not dataclasses.is_dataclass(before) or type(before) is not type(after):
        return None if before == after else f"{after!r}, and was {before!r}"
    for name in (field.name for field in dataclasses.fields(before)):
        difference = _difference(getattr(before, name), getattr(after, name))
        if difference is not None:
            return f"{name}={difference}"
    return None


def _are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(operator.is_, some, others))


def _values(found: Sequence[Found]) -> list[Any]:
    return [value for _, value in found]


def _places(roots: Sequence[nn.Module]) -> dict[tuple[int, str], nn.Module]:
    """All modules by the index of their root and their path below it, each as often as it is there."""
    return {
        (index, path): module
        for index, root in enumerate(roots)
        for path, module in root.named_modules(remove_duplicate=False)
    }


def _addresses(tensors: Sequence[Found]) -> list[int]:
    return [tensor.data_ptr() for _, tensor in tensors]


def _text(words: tuple[str, ...]) -> str:
    what, *path = words
    return f"{what} '{'.'.join(filter(None, path))}'"
