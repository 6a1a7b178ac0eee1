"""What a checkpoint holds: the names under which a model, its optimizers and a program's own values are saved.

    model.<parameter or buffer>
    optimizer.state.<parameter>.<state>      optimizer.param_groups.<index>.<hyperparameter>
    shared.<name>                            per_rank.<rank>.<name>
    step

This is what programs with plain `torch.distributed.checkpoint` mostly write, too; where they have other names in front,
`layout.py` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.errors import CheckpointError
from fsdp2.checkpoint.names import Names, names_of
from fsdp2.checkpoint.optimizers import NamedOptimizers, Optimizers

MODEL, OPTIMIZER, SHARED, PER_RANK, STEP = "model", "optimizer", "shared", "per_rank", "step"
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
        state: what its ``state_dict`` says, by our names: tensors on the memory of the model.
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
        self.state: dict[str, Any] = self.model.state_dict()  # which brings the model to rest
        self.names: Names = names_of(self.model)
        if self.names.is_wrapped or hasattr(self.model, "state_dict_type"):  # as of FSDP1: names are others there
            self.state = get_model_state_dict(self.model)

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
        found: dict[Path, Any] = {(MODEL, name): value for name, value in self.state.items()}
        for name, states in self.optimizers.state().items():
            for key, value in states.items():
                _spread((OPTIMIZER, "state", name, key), value, found)
        for index, group in enumerate(self.optimizers.groups):
            found |= {(OPTIMIZER, "param_groups", index, key): value for key, value in group.items()}
        for name, value in self.shared.items():
            _spread((SHARED, name), packed(value), found)
        for name, value in self.per_rank.items():
            _spread((PER_RANK, str(rank), name), packed(value), found)
        if step is not None:
            found[STEP,] = step
        return found


def _spread(path: Path, value: Any, found: dict[Path, Any]) -> None:
    """Add ``value`` to ``found``; of mappings, and of lists that hold tensors or mappings, what they hold."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            _spread((*path, str(key)), each, found)
    elif isinstance(value, list) and any(isinstance(each, (torch.Tensor, Mapping, list)) for each in value):
        for index, each in enumerate(value):
            _spread((*path, index), each, found)
    else:
        found[path] = value


def packed(value: Any) -> Any:
    """What is saved of one value: whole, or by its tensors, if some of them are sharded.

    A tuple is an item of its own, in which mappings keep their types and their keys.
    """
    state = value.state_dict() if isinstance(value, Stateful) else value
    if isinstance(state, torch.Tensor):
        return state if isinstance(state, DTensor) else (state,)
    return state if isinstance(state, Mapping) and _has_dtensors(state) else (state,)


def _has_dtensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(_has_dtensors(each) for each in state.values())
    if isinstance(state, (list, tuple)):
        return any(_has_dtensors(each) for each in state)
    return isinstance(state, DTensor)


def is_of_rank_0(key: str, value: Any, names: Names) -> bool:
    """Whether ``value``, which all ranks have under the flat ``key``, is saved by the first of them.

    Values, buffers: so that all of a checkpoint are of one rank, should they differ. What is large, parameters and
    their states, is dealt out.
    """
    if key.startswith(f"{PER_RANK}.") or isinstance(value, DTensor):
        return False
    if not isinstance(value, torch.Tensor):
        return True
    return key.removeprefix(f"{MODEL}.") in names.buffers or key.startswith(f"{SHARED}.")
