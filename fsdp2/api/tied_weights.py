"""Weights tied across `fully_shard` calls: the first call shards and owns a parameter, modules of later calls use it.

The owner's group becomes part of the unit of each later call as well: see `FSDPParamGroup.sharers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from fsdp2.core.buffers import Offloading
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.param import FSDPParam, fsdp_param_of, replacement_of
from fsdp2.core.sharding import partition_key_of, requested_placement
from fsdp2.core.state import ShardArguments
from fsdp2.errors import FSDPValueError

Use = tuple[nn.Module, str, str]
"""A module, the name of one of its own parameters, and that parameter's fully qualified name."""


class Tied(NamedTuple):
    """A parameter that an earlier call has sharded, and that modules of this call hold too."""

    original: nn.Parameter
    uses: list[Use]
    owner: FSDPParam


def _owner(parameter: nn.Parameter) -> FSDPParam | None:
    """The `FSDPParam` whose sharded parameter, or whose original, ``parameter`` is; None if it is not sharded."""
    successor = replacement_of(parameter)
    return fsdp_param_of(parameter if successor is None else successor)


def _dtypes(policy: MixedPrecisionPolicy) -> tuple[Any, ...]:
    return policy.param_dtype, policy.reduce_dtype, policy.grad_dtype


def take_tied(
    found: dict[nn.Parameter, list[Use]],
    ignored: frozenset[nn.Parameter],
    managed: Sequence[nn.Module],
    module: nn.Module,
) -> list[Tied]:
    """Take the tied parameters out of ``found``, and return them.

    Raises:
        FSDPValueError: a parameter was sharded before in this very place, or is tied and ignored.
    """
    tied: list[Tied] = []
    for parameter, uses in list(found.items()):
        where = f"parameter '{uses[0][2]}' of {type(module).__name__}"
        owner = _owner(parameter)
        if owner is None:
            continue
        if any(use[:2] in owner.uses for use in uses):
            raise FSDPValueError(
                f"{where} is already sharded, as '{owner.path}' in the group of {owner.group_name}. Call "
                "fully_shard bottom-up: on submodules before the module that contains them."
            )
        tied.append(Tied(parameter, found.pop(parameter), owner))
    for each in managed:
        for name, registered in each._parameters.items():
            if registered is not None and registered in ignored and _owner(registered) is not None:
                raise FSDPValueError(
                    f"parameter '{name}' of {type(each).__name__} is in ignored_params, but is tied to one that "
                    "another call has sharded; ignore it in all calls, or in none."
                )
    return tied


def check_tied(
    tied: Sequence[Tied],
    arguments: ShardArguments,
    policies: Sequence[MixedPrecisionPolicy],
    places: Sequence[Offloading],
    name: str,
) -> None:
    """Refuse a call that would shard a tied parameter differently from the first call, which has sharded it.

    Raises:
        FSDPValueError: an argument differs; the message names it.
    """
    for each, policy, place in zip(tied, policies, places, strict=True):
        owner, fqn = each.owner, each.uses[0][2]
        wanted, mesh = requested_placement(arguments.shard_placement_fn, each.original, fqn, arguments.mesh)
        first = owner.group.sharers[0].arguments
        communicates_otherwise = mesh.key != owner.sharding.mesh.key
        partitions = (partition_key_of(wanted), owner.sharding.partition.partition_key)
        differs = {
            "strategy": communicates_otherwise and arguments.strategy != first.strategy,
            "mesh": communicates_otherwise,
            "shard_placement_fn": partitions[0] != partitions[1],
            "mp_policy": _dtypes(policy) != _dtypes(owner.policy),
            "offload_policy": place != owner.group.storage.offloading,
        }
        for argument, does in differs.items():
            if does:
                raise FSDPValueError(
                    f"parameter '{fqn}' of {name} is tied to '{owner.path}' of {owner.group_name}, which "
                    f"fully_shard has sharded with another '{argument}'; pass the same in both calls."
                )
