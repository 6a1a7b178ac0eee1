"""What a checkpoint holds: the names under which a model, its optimizers and a program's own values are saved.

    model.<parameter or buffer>
    optimizer.state.<parameter>.<state>      optimizer.param_groups.<index>.<hyperparameter>
    shared.<name>                            per_rank.<rank>.<name>
    shared.<name>.<...>                      a sharded tensor in it; structure.shared.<name> is then the rest
    step

This is what programs with plain `torch.distributed.checkpoint` mostly write, too; where they have other names in front,
`source.py` finds them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2 import _torch
from fsdp2.checkpoint.errors import CheckpointError
from fsdp2.checkpoint.names import Names, is_wrapped, names_of
from fsdp2.checkpoint.optimizers import NamedOptimizers, Optimizers, is_sharded, refuse_state_of_a_shard
from fsdp2.core.trees import tensors_anywhere_in

MODEL, OPTIMIZER, SHARED, PER_RANK, STEP = "model", "optimizer", "shared", "per_rank", "step"
STRUCTURE = "structure"
STATE, GROUPS = f"{OPTIMIZER}.state", f"{OPTIMIZER}.param_groups"

Values = MutableMapping[str, Any]
Path = tuple[str | int, ...]


@runtime_checkable
class Stateful(Protocol):
    """What knows its own state: schedulers, loaders, models, `RandomState`."""

    def state_dict(self) -> Any:
        """What is saved."""

    def load_state_dict(self, state: Any) -> Any:
        """Take it again."""


class Contents:
    """A model and what belongs to it, at rest.

    Collective where a state dict is: all ranks make it together.

    Args:
        model: sharded, a plain one, or one that contains sharded ones.
        optimizers: over its parameters.
        shared: what is the same on all ranks.
        per_rank: what each rank has for itself.

    Attributes:
        model: as passed.
        state: what its ``state_dict`` says, by our names: tensors on the memory of the model, but for `copies`.
        names: of the model.
        optimizers: by name.
        shared: as passed.
        per_rank: as passed.
    """

    def __init__(
        self, model: nn.Module, optimizers: Optimizers, shared: Values | None, per_rank: Values | None
    ) -> None:
        self.model = model
        self.refresh()
        self.optimizers = NamedOptimizers(optimizers, self.names)
        self.shared: Values = {} if shared is None else shared
        self.per_rank: Values = {} if per_rank is None else per_rank
        for name in (*self.shared, *self.per_rank):
            if not isinstance(name, str) or not name or "." in name:
                raise CheckpointError(f"names in shared and per_rank are strings without dots; got {name!r}.")

    def refresh(self) -> None:
        """The model's tensors are others than before."""
        # torch's function knows the names inside of wrappers, FSDP1's too, and takes three times as long.
        found = get_model_state_dict(self.model) if is_wrapped(self.model) else self.model.state_dict()
        self.state: dict[str, Any] = found
        self.names: Names = names_of(self.model)  # at rest, as a state dict leaves the model

    @property
    def copies(self) -> set[str]:
        """Names of what is no memory of the model: as of FSDP1, or where a hook of a module has changed its state."""
        here = self.names.tensors()
        return {
            name
            for name, value in self.state.items()
            if isinstance(value, torch.Tensor)
            and _torch.plain_of(value).numel()
            and (name not in here or not _lies_on(value, here[name]))
        }

    @property
    def aliases(self) -> dict[str, str]:
        """Of tied parameters the other names, with the first of each."""
        return {
            name: first
            for name, first in self.names.first.items()
            if name != first and name in self.state and first in self.state
        }

    def to_save(self, step: int | None, rank: int) -> dict[Path, Any]:
        """Everything, by its path in the nested dict that programs with plain torch get."""
        found: dict[Path, Any] = {(MODEL, name): _of_model(name, value) for name, value in self.state.items()}
        for name, states in self.optimizers.state().items():
            of_one: dict[Path, Any] = {}
            for key, value in states.items():
                if not isinstance(key, str):
                    raise CheckpointError(
                        f"the optimizer keeps the state {key!r} of '{name}', and names in a checkpoint are strings: "
                        "call it by one."
                    )
                _spread((OPTIMIZER, "state", name, key), value, of_one)
            for path, value in of_one.items():
                refuse_state_of_a_shard(path[3:], value, name, self.optimizers.parameters[name])
            found |= of_one
        for index, group in enumerate(self.optimizers.groups):
            found |= {(OPTIMIZER, "param_groups", index, key): value for key, value in group.items()}
        for name, value in self.shared.items():
            found |= packed(value, SHARED, name)
        for name, value in self.per_rank.items():
            found |= packed(value, f"{PER_RANK}.{rank}", name)
        if step is not None:
            found[STEP,] = step
        return found


def _of_model(name: str, value: Any) -> Any:
    """What is saved of a model under ``name``: a tensor, or what its `get_extra_state` returns."""
    if not isinstance(value, torch.Tensor) and any(map(is_sharded, tensors_anywhere_in(value))):
        raise CheckpointError(
            f"'{name}', which get_extra_state() returns, holds a sharded tensor inside of a {type(value).__name__}, "
            "which would be pickled with the rows of one rank: let it be a buffer or a parameter, or return its "
            "full_tensor()."
        )
    return value


def _lies_on(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    one, other = _torch.plain_of(value), _torch.plain_of(tensor)
    return one.is_meta or (one.shape == other.shape and one.data_ptr() == other.data_ptr())


def _spread(path: Path, value: Any, found: dict[Path, Any]) -> None:
    """Add ``value`` to ``found``; of mappings, and of lists that hold tensors or mappings, what they hold.

    (Not of mappings with other keys than strings, which would come back as such: they are a value.)
    """
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, each in value.items():
            _spread((*path, key), each, found)
    elif isinstance(value, list) and any(isinstance(each, (torch.Tensor, Mapping, list)) for each in value):
        for index, each in enumerate(value):
            _spread((*path, index), each, found)
    else:
        found[path] = value


MARK = "\0fsdp2.checkpoint: "
"""Begins what stands for a sharded tensor in a value, before its name."""


def packed(value: Any, front: str, name: str) -> dict[Path, Any]:
    """What is saved of one value, ``name`` below ``front``: an item, and one for each sharded tensor in it.

    The item is a tuple, so that torch leaves the types and keys of what is in it alone.

    Raises:
        CheckpointError: it holds what could not be given back.
    """
    state = value.state_dict() if isinstance(value, Stateful) else value
    where = f"{front.partition('.')[0]}[{name!r}]"
    if isinstance(value, Optimizer) and any(isinstance(p, DTensor) for g in value.param_groups for p in g["params"]):
        raise CheckpointError(
            f"{where} is an optimizer of sharded parameters, whose state is saved by their names: pass it with its "
            "model, as in Checkpoints(run, nn.ModuleDict({'g': g, 'd': d}), [optimizer_g, optimizer_d])."
        )
    keys = tuple(front.split("."))
    tensors: dict[Path, Any] = {}
    inside = _replaced(state, (*keys, name), tensors, where)
    if not tensors:
        return {(*keys, name): (state,)}
    if keys[0] == PER_RANK:
        raise CheckpointError(
            f"{where} has sharded tensors, of which each rank has a part of one: pass it in shared={{...}}."
        )
    return {(STRUCTURE, f"{front}.{name}"): (inside,), **tensors}


def _replaced(state: Any, path: Path, tensors: dict[Path, Any], where: str) -> Any:
    """``state`` with marks for its sharded tensors, which are added to ``tensors``."""
    if isinstance(state, DTensor):
        tensors[path] = state
        return MARK + ".".join(map(str, path))
    if type(state) in (dict, OrderedDict, defaultdict):
        return {key: _replaced(each, (*path, str(key)), tensors, where) for key, each in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_replaced(each, (*path, str(index)), tensors, where) for index, each in enumerate(state))
    if isinstance(state, (nn.Module, Optimizer, LRScheduler)):
        raise CheckpointError(
            f"{where} holds a {type(state).__name__} inside of a list, dict or tuple, which would be pickled, and "
            "not be given its state again: give it a name of its own."
        )
    if not isinstance(state, torch.Tensor) and any(isinstance(each, DTensor) for each in tensors_anywhere_in(state)):
        raise CheckpointError(
            f"{where} holds a sharded tensor inside of a {type(state).__name__}, which would be pickled with the rows "
            "of one rank: use lists, dicts or tuples."
        )
    return state


def filled(inside: Any, tensors: Mapping[str, Any]) -> Any:
    """The inverse of `packed`: ``inside`` with ``tensors``, by name, for the marks."""
    if isinstance(inside, str) and inside.startswith(MARK):
        return tensors[inside.removeprefix(MARK)]
    if type(inside) is dict:
        return {key: filled(each, tensors) for key, each in inside.items()}
    if type(inside) in (list, tuple):
        return type(inside)(filled(each, tensors) for each in inside)
    return inside


def places_of(inside: Any, live: Any) -> dict[str, Any]:
    """What lies in ``live`` where ``inside`` has marks, by name; None where there is nothing."""
    if isinstance(inside, str) and inside.startswith(MARK):
        return {inside.removeprefix(MARK): live}
    found: dict[str, Any] = {}
    if type(inside) is dict:
        for key, each in inside.items():
            found |= places_of(each, live.get(key) if isinstance(live, Mapping) else None)
    elif type(inside) in (list, tuple):
        for index, each in enumerate(inside):
            has = isinstance(live, (list, tuple)) and index < len(live)
            found |= places_of(each, live[index] if has else None)
    return found


def with_live_tensors(state: Any, live: Any) -> Any:
    """``state``, which nobody else has, with tensors of ``live``, where it has such ones in the same place.

    Such ones are of the same shape and dtype.

    Those get the values of the ones whose place they take, as the program may hold them elsewhere, too. Containers are
    those of ``state``.
    """
    return _with_live(state, live, {})


def _with_live(state: Any, live: Any, seen: dict[int, Any]) -> Any:
    if isinstance(state, torch.Tensor):
        # What stands at two places of ``live`` can take one value.
        takes = isinstance(live, torch.Tensor) and seen.setdefault(id(live), state) is state
        return _written(live, state) if takes else state
    if id(state) in seen:  # it holds itself
        return state
    if isinstance(state, dict) and isinstance(live, Mapping):
        seen[id(state)] = state
        for key in [key for key in state if key in live]:
            state[key] = _with_live(state[key], live[key], seen)
    elif isinstance(state, list) and isinstance(live, (list, tuple)):
        seen[id(state)] = state
        for index, (each, here) in enumerate(zip(state, live, strict=False)):
            state[index] = _with_live(each, here, seen)
    elif isinstance(state, tuple) and isinstance(live, (list, tuple)):
        seen[id(state)] = state
        made = [_with_live(each, here, seen) for each, here in zip(state, live, strict=False)]
        made += state[len(made) :]
        if type(state) is tuple:
            return tuple(made)
        return state._make(made) if hasattr(state, "_make") else state
    return state


def _written(live: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``live`` with the values of ``state``; ``state`` where that cannot be."""
    if live is state or live.shape != state.shape or live.dtype != state.dtype or live.is_meta:
        return state  # of another dtype, too: a write would cast what was saved
    try:
        with torch.inference_mode(live.is_inference()), torch.no_grad():  # as others cannot be written to
            live.copy_(state)
    except RuntimeError:  # several elements at one place, or only one of the two is sharded
        return state
    return live


def is_of_rank_0(key: str, value: Any, names: Names) -> bool:
    """Whether ``value``, which all ranks have under the flat ``key``, is saved by the first of them.

    Values, buffers: so that all of a checkpoint are of one rank, should they differ. What is large, parameters and
    their states, is dealt out.
    """
    if is_per_rank(key) or isinstance(value, DTensor):
        return False
    if not isinstance(value, torch.Tensor):
        return True
    return key.removeprefix(f"{MODEL}.") in names.buffers or key.startswith(f"{SHARED}.")


def is_per_rank(key: str) -> bool:
    """Whether the flat ``key`` is of a value that each rank has for itself."""
    return key.startswith(f"{PER_RANK}.")
