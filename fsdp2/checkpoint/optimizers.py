"""The state of optimizers by the names of their parameters: read without a step, and written without one.

What does not exist (a parameter that no gradient has come to) is not in a checkpoint, and does not exist after a load.
Groups are known by the names of their parameters: their order, and which optimizer of several has them, do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2.checkpoint.errors import CheckpointError
from fsdp2.checkpoint.names import Names
from fsdp2.core.param import fsdp_param_of, replacement_of
from fsdp2.core.sharding import dtensor_like
from fsdp2.core.trees import tensors_anywhere_in
from fsdp2.optim.guard import rekey
from fsdp2.optim.step_targets import COUNTERS

Tail = tuple[Any, ...]
"""Where a value lies in what an optimizer has of a parameter: keys of dicts, which are strings, and places in lists."""

Optimizers = Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] | None
"""What users pass."""

NAMES = "params"
"""The key of a group's names."""

CLASS = "optimizer"
"""The key of a group's class, in manifests."""

_OF_THE_PROGRAM = ("params", "param_names")
_OF_THE_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""How an optimizer computes, not what: as the program has built it, whatever was saved."""
_KEPT = (*_OF_THE_PROGRAM, *_OF_THE_IMPLEMENTATION)


def refuse_state_of_a_shard(keys: Tail, value: Any, name: str, parameter: torch.Tensor) -> None:
    """Refuse what ranks have for themselves in the state of the parameter ``name``: one rank's would be saved.

    Args:
        keys: where it lies in the state of the parameter.
        value: a tensor that is saved, or what is pickled.
        name: of the parameter.
        parameter: itself.

    Raises:
        CheckpointError: naming it.
    """
    where = f"the optimizer's state '{'.'.join(map(str, keys))}' of '{name}'"
    if isinstance(value, DTensor):
        return
    inside = tensors_anywhere_in(value)
    if any(isinstance(each, DTensor) for each in inside):
        raise CheckpointError(
            f"{where} holds a sharded tensor inside of a {type(value).__name__}, which would be pickled with the rows "
            "of one rank: use lists, and dicts whose keys are strings."
        )
    for each in inside if is_sharded(parameter) else ():
        if each.dim() and each.numel() > 1 and each.shape != parameter.shape:
            raise CheckpointError(
                f"{where} is a plain tensor of shape {tuple(each.shape)}, and the parameter, of shape "
                f"{tuple(parameter.shape)}, is sharded: each rank may have other values in it, of which one rank's "
                "would be saved. Keep it as a DTensor that lies as the parameter does (torch.zeros_like(parameter)), "
                "or outside of the optimizer's state, and pass it in per_rank={...}."
            )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether ranks have different parts of it."""
    if not isinstance(parameter, DTensor):
        return False
    sizes = parameter.device_mesh.shape
    return any(not each.is_replicate() and size > 1 for each, size in zip(parameter.placements, sizes, strict=True))


class NamedOptimizers:
    """Optimizers over the parameters of one model.

    Args:
        optimizers: one, several, or none.
        names: of the model, at rest.

    Raises:
        CheckpointError: one holds a parameter that the model does not have, or two hold the same one.
    """

    def __init__(self, optimizers: Optimizers, names: Names) -> None:
        self._all = _listed(optimizers)
        of = {id(parameter): names.first[name] for name, parameter in names.parameters.items()}
        self._names: list[list[list[str]]] = []  # of each optimizer, of each group
        self.parameters: dict[str, torch.Tensor] = {}
        for optimizer in self._all:
            rekey(optimizer)
            self._names.append([[self._name(p, of) for p in group["params"]] for group in optimizer.param_groups])

    def _name(self, parameter: torch.Tensor, of: Mapping[int, str]) -> str:
        owner, successor = fsdp_param_of(parameter), replacement_of(parameter)
        found = successor if owner is None and successor is not None else parameter
        name = of.get(id(found))
        if name is None:
            raise CheckpointError(
                f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not have, so "
                "its state has no name in a checkpoint: pass a model that holds it too, as nn.ModuleDict({'g': g, 'd': "
                "d})."
            )
        if name in self.parameters:
            raise CheckpointError(f"the parameter '{name}' is in two groups of optimizers: a checkpoint has one state.")
        self.parameters[name] = parameter
        return name

    @property
    def classes(self) -> dict[str, str]:
        """Of each parameter, the class of its optimizer: torch's, of one that is derived from it."""
        found: dict[str, str] = {}
        for optimizer, of_groups in zip(self._all, self._names, strict=True):
            found |= dict.fromkeys((name for names in of_groups for name in names), class_of(optimizer))
        return found

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Hyperparameters of all groups, with the names of their parameters."""
        found = []
        for optimizer, of_groups in zip(self._all, self._names, strict=True):
            for group, names in zip(optimizer.param_groups, of_groups, strict=True):
                hyper = {key: value for key, value in group.items() if key not in _OF_THE_PROGRAM}
                found.append({NAMES: list(names), **hyper})
        return found

    def state(self) -> dict[str, dict[str, Any]]:
        """What there is, by name. The tensors are the optimizers' own.

        Raises:
            CheckpointError: an optimizer keeps state that is of no parameter.
        """
        found: dict[str, dict[str, Any]] = {}
        for optimizer, of_groups in zip(self._all, self._names, strict=True):
            flat = [name for names in of_groups for name in names]
            for index, state in optimizer.state_dict()["state"].items():
                if not isinstance(index, int):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps a state '{index}' that is of no parameter, which has no "
                        "name in a checkpoint: save it with shared={...}."
                    )
                found[flat[index]] = dict(state) if isinstance(state, Mapping) else {"": state}
        return found

    def destination(self, name: str, key: str, known: Any, like: torch.Tensor) -> torch.Tensor:
        """Where the state ``key`` of the parameter ``name`` is to be read to.

        Args:
            name: of the parameter.
            key: of its state.
            known: what the optimizer has there, if anything: taken again, if it fits.
            like: on meta: the shape and dtype of what was saved.
        """
        parameter = self.parameters[name]
        is_of_elements = like.shape == parameter.shape and not (like.dim() == 0 and key in COUNTERS)
        is_sharded = isinstance(parameter, DTensor) and is_of_elements
        fits = isinstance(known, torch.Tensor) and known.shape == like.shape and known.dtype == like.dtype
        if fits and isinstance(known, DTensor) == is_sharded:
            return known  # type: ignore[no-any-return]
        if is_sharded:
            return dtensor_like(parameter, torch.empty_like(parameter.to_local(), dtype=like.dtype))  # type: ignore[attr-defined]
        device = parameter.device if like.dim() or is_of_elements else torch.device("cpu")
        return torch.empty(like.shape, dtype=like.dtype, device=device)

    def load(
        self, state: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any] | None], *, casts: bool = False
    ) -> None:
        """Give the optimizers ``state``, of exactly these parameters, and hyperparameters.

        Args:
            state: by name; parameters without one have none afterwards.
            groups: for each of `groups` what was saved; None: as it is.
            casts: states become of the dtypes of their parameters, as torch has it; else they are as they were saved.
        """
        chosen = iter(groups)
        written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for optimizer, of_groups in zip(self._all, self._names, strict=True):
            before = [dict(group) for group in optimizer.param_groups]
            packed = optimizer.state_dict()["param_groups"]
            flat = [name for names in of_groups for name in names]
            for group in packed:
                saved = next(chosen) or {}
                group |= {key: value for key, value in saved.items() if key not in _KEPT or key not in group}
            of_this = {index: _unwrapped(state[name]) for index, name in enumerate(flat) if name in state}
            optimizer.load_state_dict({"state": of_this, "param_groups": packed})
            for group, here in zip(optimizer.param_groups, before, strict=True):
                group.update({key: _in_place(here.get(key), group[key], written) for key in group if key != "params"})
            if not casts:
                _keep_dtypes(optimizer, flat, state)


def class_of(optimizer: Optimizer) -> str:
    """The name of the class whose state it has: the one that `fsdp2.optim.local` was given, for example."""
    kinds = getattr(type(optimizer), "_plain", type(optimizer)).__mro__
    of_torch = next((kind for kind in kinds if kind.__module__.startswith("torch.optim.")), kinds[0])
    return kinds[0].__name__ if of_torch is Optimizer else of_torch.__name__


def _listed(optimizers: Optimizers) -> list[Optimizer]:
    if optimizers is None:
        return []
    if isinstance(optimizers, Optimizer):
        return [optimizers]
    found = list(optimizers.values()) if isinstance(optimizers, Mapping) else list(optimizers)
    for each in found:
        if not isinstance(each, Optimizer):
            raise CheckpointError(f"optimizer takes optimizers of torch, one or several; got a {type(each).__name__}.")
    return found


def _unwrapped(state: Mapping[str, Any]) -> Any:
    """A copy; what was no mapping is none again."""
    return state[""] if set(state) == {""} else dict(state)


def _in_place(here: Any, loaded: Any, written: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """``loaded``, a hyperparameter; of tensors that of the program, ``here``, with its value, or one beside it.

    ``written``: of those that were written before what, as several groups may have one.
    """
    if not (isinstance(here, torch.Tensor) and isinstance(loaded, torch.Tensor)) or here is loaded or here.is_meta:
        return loaded
    if (here.shape, here.dtype) == (loaded.shape, loaded.dtype):
        _, known = written.setdefault(id(here), (here, loaded))  # held, so that no other gets its number
        if known is loaded or torch.equal(known.cpu(), loaded.cpu()):
            with torch.inference_mode(here.is_inference()), torch.no_grad():
                here.copy_(loaded)
            return here
    return loaded.to(here.device)


def _keep_dtypes(optimizer: Optimizer, names: Sequence[str], state: Mapping[str, Mapping[str, Any]]) -> None:
    """Undo what torch's ``load_state_dict`` casts to the dtypes of parameters: states are as they were saved."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return  # it knows itself what it keeps how
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, name in zip(parameters, names, strict=True):
        saved, loaded = state.get(name, {}), optimizer.state.get(parameter)
        if not isinstance(loaded, dict):
            continue
        for key, value in saved.items():
            if key in loaded:
                loaded[key] = _as_saved(value, loaded[key])


def _as_saved(value: Any, found: Any) -> Any:
    """``found``, with ``value`` in the place of tensors that have become of another dtype; in dicts and lists too."""
    if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
        return found if found.dtype == value.dtype else value.to(found.device)
    if isinstance(value, dict) and isinstance(found, dict):
        return type(found)({key: _as_saved(value.get(key), each) for key, each in found.items()})
    if isinstance(value, list) and isinstance(found, list) and len(value) == len(found):
        return [_as_saved(*pair) for pair in zip(value, found, strict=True)]
    return found


def groups_that_match(
    wanted: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], known: set[str]
) -> tuple[list[Mapping[str, Any] | None], list[str]]:
    """For each of the groups ``wanted`` that of ``saved`` which has its parameters, and what speaks against it.

    Args:
        wanted: groups of optimizers, with names.
        saved: those of a checkpoint.
        known: the names that are in both, to compare.

    Returns:
        A group, or None, for each of ``wanted``; and lines for people.
    """
    of = {name: index for index, group in enumerate(saved) for name in group.get(NAMES, ())}
    matched: list[Mapping[str, Any] | None] = []
    lines: list[str] = []
    taken: dict[int, int] = {}
    empty = [index for index, group in enumerate(saved) if not group.get(NAMES)]
    for place, group in enumerate(wanted):
        names = [name for name in group[NAMES] if name in known]
        found = sorted({of[name] for name in names if name in of})
        if not found and not group[NAMES] and empty:
            found = [empty.pop(0)]
        if len(found) > 1:
            parts = [f"of group {index}: {shortened([n for n in names if of.get(n) == index])}" for index in found]
            lines.append("\n      ".join([f"group {place} is of several in the checkpoint", *parts]))
        elif found and found[0] in taken:
            other = wanted[taken[found[0]]][NAMES]
            parts = [
                f"group {taken[found[0]]}: {shortened([name for name in other if name in known])}",
                f"group {place}: {shortened(names)}",
            ]
            lines.append("\n      ".join([f"two groups are one in the checkpoint, its group {found[0]}", *parts]))
        if len(found) == 1:
            taken.setdefault(found[0], place)
        matched.append(saved[found[0]] if len(found) == 1 else None)
    return matched, lines


def shortened(names: Sequence[str]) -> str:
    """The first of them, for messages."""
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def nested(values: Mapping[str, Any], tails: Mapping[str, Tail | None]) -> dict[str, Any]:
    """States of a parameter in the lists and dicts that the optimizer had them in, by the names they were saved by.

    >>> nested({"step": 1, "old.0": 2, "old.1": 3}, {"step": None, "old.0": ("old", 0), "old.1": ("old", 1)})
    {'step': 1, 'old': [2, 3]}
    """
    tree: dict[Any, Any] = {}
    for key, value in values.items():
        *path, last = tails[key] or (key,)
        inside = tree
        for each in path:
            inside = inside.setdefault(each, {})
        inside[last] = value
    inner = {tail[0] for tail in tails.values() if tail is not None}
    return {key: _as_lists(value) if key in inner else value for key, value in tree.items()}


def _as_lists(value: Any) -> Any:
    """Dicts whose keys are places are lists."""
    if type(value) is not dict:
        return value
    inside = {key: _as_lists(each) for key, each in value.items()}
    if all(isinstance(key, int) for key in inside):
        return [inside[key] for key in sorted(inside)]
    return inside
