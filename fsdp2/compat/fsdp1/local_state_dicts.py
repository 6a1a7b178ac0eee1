"""LOCAL state dicts: of each unit the shard of the flat parameter that torch's FSDP1 would have, written and read.

Here a rank holds rows of every parameter, and there a piece of all of them: see `fsdp2.compat.fsdp1.exchange`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

import fsdp2
from fsdp2.compat.fsdp1 import whole
from fsdp2.compat.fsdp1.exchange import exchange_of
from fsdp2.compat.fsdp1.flat_checkpoints import write_unit
from fsdp2.compat.fsdp1.layout import FLAT_PARAM, PADDING_VALUE
from fsdp2.compat.fsdp1.names import clean
from fsdp2.compat.fsdp1.wrapped_layout import unit_of


def written(wrapper: Any, values: Mapping[str, torch.Tensor], *, offload: bool) -> dict[str, Any]:
    """What a LOCAL state dict has in the place of ``values``, this unit's parameters by all names. Collective."""
    unit = unit_of(wrapper)
    if unit is None:
        return dict(values)
    names = {name for entry in unit.entries for name in unit.names_of(entry)}
    by_name = {clean(name): value for name, value in values.items()}
    dtype = by_name[unit.entries[0].fqn].dtype
    own = {entry: by_name[entry.fqn] for entry in unit.entries}
    shard = exchange_of(wrapper, unit, values).to_shard(own, dtype=dtype, padding=PADDING_VALUE)
    local = write_unit(unit, shard.cpu() if offload else shard, wrapper.rank)
    shown = {clean(name): name for name in values}
    local = {shown.get(name, name): value for name, value in local.items()}
    return {**local, **{name: value for name, value in values.items() if clean(name) not in names}}


def read(wrapper: Any, state_dict: MutableMapping[str, Any], inner: str, shown: str) -> None:
    """Put the unit's whole parameters in the place of its flat one in ``state_dict``, if it is there. Collective.

    Raises:
        FSDPRuntimeError: it is of another wrapping, or number of ranks, or not there on every rank.
    """
    unit = unit_of(wrapper)
    if unit is None:
        return
    given = _shard(state_dict.pop(f"{inner}{FLAT_PARAM}", None))
    group, device = wrapper.process_group, wrapper.compute_device
    numel = -1 if given is None else given.numel()
    sent = torch.tensor([numel], device=device)
    numels = sent.new_empty(wrapper.world_size)
    whole.all_gather(numels, sent, group)
    found = numels.tolist()
    if found == [-1] * wrapper.world_size:
        return  # of another type: whole tensors, or what a program has put there
    expected = [unit.saved_numel(rank) for rank in range(wrapper.world_size)]
    if found != expected:
        raise fsdp2.FSDPRuntimeError(
            f"'{shown}{FLAT_PARAM}' has {found} elements on the ranks (-1: it is not there), and {expected} are those "
            f"of the parameters {[entry.fqn for entry in unit.entries]} with use_orig_params={unit.use_orig_params}. "
            "Wrap the model as it was when the state dict was written, on as many ranks, or convert the files: "
            "python -m fsdp2.compat.fsdp1.convert."
        )
    assert given is not None, "on every rank"
    shard = torch.zeros(unit.shard_numel, dtype=given.dtype, device=device)
    shard[: given.numel()] = given.detach().to(device).reshape(-1)
    parameters = wrapper._fsdp1_own_parameters()
    keys = {clean(name): f"{inner}{name}" for name in parameters}
    for entry, value in exchange_of(wrapper, unit, parameters).to_rows(shard).items():
        for name in unit.names_of(entry):
            state_dict[keys[name]] = value


def _shard(value: Any) -> torch.Tensor | None:
    """This rank's elements of a flat parameter, as a ``ShardedTensor``, a record of one, or a plain tensor."""
    shards = getattr(value, "local_shards", None)
    if shards is None:
        return value if isinstance(value, torch.Tensor) else None
    shards = shards() if callable(shards) else shards
    return shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)
