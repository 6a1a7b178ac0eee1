"""LOCAL state dicts: of each unit the shard of the flat parameter that torch's FSDP1 would have, written and read.

Here a rank holds rows of every parameter, and there a piece of all of them: one unit is gathered at a time, and each
rank keeps (or takes) what is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.compat.fsdp1 import whole
from fsdp2.compat.fsdp1.flat_checkpoints import whole_of, write_model
from fsdp2.compat.fsdp1.flat_layout import FLAT_PARAM, FlatEntry, FlatLayout, FlatUnit, Piece, flat_layout, units_of


def layout_of(wrapper: Any) -> FlatLayout | None:
    """The flat parameter of the wrapper's unit; None if it has no parameters.

    Raises:
        FSDPNotImplementedError: parameters are tensor parallel too.
        FSDPValueError: torch's FSDP1 has no flat parameter of such parameters.
    """
    module, below = wrapper._fsdp_wrapped_module, wrapper._wrappers_below()
    own = wrapper.own_parameters()
    taken = {parameter for each in below for parameter in each.own_parameters().values()}  # ties: the first has them
    for name, parameter in own.items():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > wrapper._device_mesh.ndim:
            raise fsdp2.FSDPNotImplementedError(
                f"LOCAL_STATE_DICT of '{name}', which is tensor parallel: use SHARDED_STATE_DICT, whose tensors say "
                "how they are cut."
            )
    units = units_of(
        module,
        [module, *below],
        use_orig_params=wrapper._use_orig_params,
        ignored={*module.parameters()} - {*own.values()} | taken,
        compute_dtype=wrapper.mixed_precision.param_dtype,
    )
    unit = next(each for each in units if not each.name)
    if not unit.parameters:
        return None
    return flat_layout([unit], use_orig_params=wrapper._use_orig_params, world_size=wrapper.world_size)


def written(wrapper: Any, values: Mapping[str, torch.Tensor], *, offload: bool) -> dict[str, Any]:
    """What a LOCAL state dict has in the place of ``values``, this unit's parameters by all names. Collective."""
    layout = layout_of(wrapper)
    if layout is None:
        return dict(values)
    (unit,) = layout.units
    names = {name for entry in unit.entries for name in unit.names_of(entry)}
    gathered = {unit.names_of(entry)[0]: whole.whole(values[entry.fqn], offload=offload) for entry in unit.entries}
    local = write_model(layout, gathered, wrapper.rank)
    return {**local, **{name: value for name, value in values.items() if name not in names}}


def read(wrapper: Any, state_dict: MutableMapping[str, Any], inner: str, shown: str) -> None:
    """Put the unit's whole parameters in the place of its flat one in ``state_dict``, if it is there. Collective.

    Raises:
        FSDPRuntimeError: it is of another wrapping, or number of ranks, or not there on every rank.
    """
    layout = layout_of(wrapper)
    if layout is None:
        return
    (unit,) = layout.units
    given = _shard(state_dict.pop(f"{inner}{FLAT_PARAM}", None))
    group, device = wrapper.process_group, wrapper.compute_device
    numel = -1 if given is None else given.numel()
    sent = torch.tensor([numel], device=device)
    numels = sent.new_empty(wrapper.world_size)
    dist.all_gather_into_tensor(numels, sent, group=group)
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
    sent = torch.zeros(unit.shard_numel, dtype=given.dtype, device=device)
    sent[: given.numel()] = given.detach().to(device).reshape(-1)
    received = sent.new_empty(wrapper.world_size * unit.shard_numel)
    dist.all_gather_into_tensor(received, sent, group=group)
    shards = received.view(wrapper.world_size, -1)
    for entry in unit.entries:
        value = _whole_of(unit, entry, shards)
        for name in unit.names_of(entry):
            state_dict[f"{inner}{name}"] = value


def _whole_of(unit: FlatUnit, entry: FlatEntry, shards: torch.Tensor) -> torch.Tensor:
    def piece_on(rank: int, piece: Piece) -> torch.Tensor:
        return shards[rank, piece.offset_in_shard : piece.offset_in_shard + piece.numel]

    return whole_of(unit, entry, piece_on)


def _shard(value: Any) -> torch.Tensor | None:
    """This rank's elements of a flat parameter, as a ``ShardedTensor``, a record of one, or a plain tensor."""
    shards = getattr(value, "local_shards", None)
    if shards is None:
        return value if isinstance(value, torch.Tensor) else None
    shards = shards() if callable(shards) else shards
    return shards[0].tensor if shards else torch.empty(0, dtype=value.dtype)
