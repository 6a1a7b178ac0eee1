"""The parameters of a model, remembered for its root: to walk the module tree takes longer than clipping."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from fsdp2.core.param import fsdp_param_of, replacement_of
from fsdp2.core.state import state_of


class _Known(NamedTuple):
    """The parameters below a root.

    Attributes:
        of_groups: the sharded parameters of each of its groups.
        others: parameters of no group: the ``_parameters`` dict that holds each, its name there, and the parameter.
        params: all parameters.
    """

    of_groups: list[tuple[nn.Parameter, ...]]
    others: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]
    params: tuple[torch.Tensor, ...]

    def is_still_so(self, of_groups: list[tuple[nn.Parameter, ...]]) -> bool:
        """Whether no parameter was replaced since. Modules must be the same, which the caller has checked."""
        return all(map(operator.is_, of_groups, self.of_groups)) and all(
            slots.get(name) is param for slots, name, param in self.others
        )


def parameters_below(module: nn.Module) -> Sequence[torch.Tensor]:
    """All parameters of ``module``, each once; sharded ones in place of unsharded ones and predecessors.

    The answer for a root that has run is kept until modules or parameters are added, removed or replaced.
    """
    state = state_of(module)
    root = None if state is None or len(state.modules) > 1 else state.own_root
    if state is None or root is None or root.is_disturbed or state.has_changed_structure():
        return _walk(module)
    now = [group.sharded for group in root.groups]
    known: _Known | None = root.parameters
    if known is None or not known.is_still_so(now):
        found = _walk(module)
        of_groups = {id(param) for group in now for param in group}
        if not of_groups.issubset(map(id, found)):  # tied to modules elsewhere: not all of these are below `module`
            return found
        others = {id(param): param for param in found if id(param) not in of_groups}
        places = [
            (each._parameters, name, param)
            for each in module.modules()
            for name, param in each._parameters.items()
            if id(param) in others and param is not None
        ]
        known = root.parameters = _Known(now, places, tuple(found))
    return known.params


def at_rest(parameter: nn.Parameter) -> nn.Parameter:
    """The sharded parameter that ``parameter``, unsharded or from before sharding, stands for; else itself."""
    owner = fsdp_param_of(parameter)
    if owner is not None:
        return owner.sharded
    successor = replacement_of(parameter)
    return parameter if successor is None else successor


def _walk(module: nn.Module) -> list[torch.Tensor]:
    found = {id(chosen): chosen for chosen in map(at_rest, module.parameters())}
    return list(found.values())
