"""Optimizers' own state dicts as they are under torch's FSDP1, of flat parameters or of their pieces: read and written.

``optimizer.state_dict()`` has numbers for names there, and this rank's elements of flat parameters. Here the optimizer
keeps DTensors of every parameter. What belongs to what is decided on outlines (tensors on the meta device) by the same
code as the converter's; then the values of each unit are exchanged, one all-to-all for each kind of state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fsdp2
from fsdp2.compat.fsdp1.exchange import exchange_of
from fsdp2.compat.fsdp1.flat_checkpoints import (
    NamedState,
    OptimizerOrder,
    is_optimizer_state,
    read_optimizer,
    write_optimizer,
)
from fsdp2.compat.fsdp1.layout import FlatEntry, FlatLayout, FlatUnit
from fsdp2.compat.fsdp1.names import named_parameters
from fsdp2.compat.fsdp1.wrapped_layout import flat_layout, wrappers_of


def flat_optim_state_dict(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """What ``optim.state_dict()`` is under torch's FSDP1, with the same wrapping, on this rank.

    Collective: all ranks must call it.

    Args:
        model: the wrapped model; its wrappers' ``use_orig_params`` says of which kind.
        optim: of its parameters.

    Raises:
        FSDPValueError: with ``use_orig_params=False``, the parameters of one unit are in several groups, or their
            scalars differ.
    """
    fsdp2.optim.guard.rekey(optim)
    layout, wrappers, root = _wrapped(model)
    names = _names(model)
    kept = {names[parameter]: entry for parameter in _parameters(optim) if (entry := optim.state.get(parameter))}
    groups = [
        {**_settings(group), "params": [names[parameter] for parameter in group["params"]]}
        for group in optim.param_groups
    ]
    places = {name: (unit, entry) for unit in layout.units for entry in unit.entries for name in unit.names_of(entry)}

    def outline_of(name: str) -> dict[str, Any]:
        shape = places[name][1].shape if name in places else None
        return {key: _meta(each) if _is_per_element(each, shape) else each for key, each in kept[name].items()}

    outline = NamedState(tuple(kept), outline_of, groups)
    order = OptimizerOrder.of_model(model, layout)
    written = write_optimizer(layout, outline, root.rank, order)
    shards: dict[tuple[str, str], Tensor] = {}
    for unit in layout.units:
        values = _by_key(unit, kept)
        wrapper = wrappers[unit.name]
        exchange = exchange_of(wrapper, unit, wrapper._fsdp1_own_parameters()) if values else None
        for key, own in values.items():
            assert exchange is not None
            dtype = next(iter(own.values())).dtype
            shards[unit.key, key] = exchange.to_shard(own, dtype=dtype, padding=0)
    table = order.names_in(written, "the optimizer state")
    for number, entry_state in written["state"].items():
        for key, value in entry_state.items():
            if isinstance(value, Tensor) and value.is_meta:
                entry_state[key] = _filled(table[number], key, places, shards, root.rank)
            elif isinstance(value, Tensor):
                entry_state[key] = value.clone()
    return written


def _filled(
    name: str,
    key: str,
    places: Mapping[str, tuple[FlatUnit, FlatEntry]],
    shards: Mapping[tuple[str, str], Tensor],
    rank: int,
) -> Tensor:
    """The elements of a flat parameter, or of the piece of one, that this rank keeps."""
    if name not in places:
        return shards[name, key]
    unit, entry = places[name]
    piece = unit.piece(entry, unit.rank_of(rank))
    assert piece is not None, "else nothing is kept of it"
    found = shards[unit.key, key][piece.offset_in_shard :][: piece.numel].clone()
    return entry.unflatten(found) if unit.keeps_shapes else found


def flat_optim_state_dict_to_load(model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any]) -> Any:
    """What ``optim.load_state_dict()`` takes, from what it returned on this rank under torch's FSDP1.

    Collective: all ranks must call it, as many as have written, each with its own.

    Args:
        model: wrapped as it was then.
        optim: of its parameters, in the order of then.
        optim_state_dict: of flat parameters or of their pieces, as the wrappers' ``use_orig_params`` says.

    Raises:
        FSDPValueError: the state does not fit the wrapping; the message names the parameter and the key.
    """
    fsdp2.optim.guard.rekey(optim)
    layout, wrappers, root = _wrapped(model)
    names = _names(model)
    order = OptimizerOrder.of_model(model, layout)
    gathered: list[Any] = [None] * root.world_size
    is_one = is_optimizer_state(optim_state_dict)
    mine = _outline_of(optim_state_dict) if is_one else f"a {type(optim_state_dict).__name__}"
    dist.all_gather_object(gathered, mine, group=root.process_group)
    for rank, each in enumerate(gathered):
        if isinstance(each, str):  # said on all ranks
            raise fsdp2.FSDPValueError(
                f"rank {rank} was given {each}, which is no state dict of an optimizer ('state' and 'param_groups')."
            )
    named = read_optimizer(layout, gathered, order)
    table = order.names_in(optim_state_dict, "the optimizer state")
    own = {table[number]: entry for number, entry in optim_state_dict["state"].items()}
    in_units = {unit.full_name(entry.fqn) for unit in layout.units for entry in unit.entries}
    state = {name: named.of(name) if name in in_units else _copied(own[name]) for name in named.names}
    for unit in layout.units:
        wrapper, found = wrappers[unit.name], _by_key(unit, state)
        exchange = exchange_of(wrapper, unit, wrapper._fsdp1_own_parameters()) if found else None
        for key, values in found.items():
            assert exchange is not None
            dtype = next(iter(values.values())).dtype
            shard = _shard_of(unit, own, key, dtype, unit.rank_of(root.rank), wrapper.compute_device)
            rows = exchange.to_rows(shard)
            for entry in values:
                state[unit.full_name(entry.fqn)][key] = rows[entry]
    numbers = {names[p]: number for number, p in enumerate(_parameters(optim))}
    alias = {name: numbers[names[p]] for name, p in named_parameters(model) if names[p] in numbers}
    placed = {alias[name]: entry for name, entry in state.items() if name in alias}
    groups = [
        {**_settings(group), **_settings(found), "params": [numbers[names[p]] for p in group["params"]]}
        for group, found in zip(optim.param_groups, _matching(optim, named.param_groups, names), strict=True)
    ]
    return {"state": placed, "param_groups": groups}


def _matching(optim: Optimizer, saved: list[dict[str, Any]], names: Mapping[nn.Parameter, str]) -> Iterable[Any]:
    """For each group of the optimizer, the saved one that its first parameter was in; else the one in its place."""
    of = {name: group for group in saved for name in group["params"]}
    for index, group in enumerate(optim.param_groups):
        found = [of[names[each]] for each in group["params"] if names[each] in of]
        yield found[0] if found else saved[index] if index < len(saved) else {}


def _shard_of(
    unit: FlatUnit, own: Mapping[str, Any], key: str, dtype: torch.dtype, rank: int, device: torch.device
) -> Tensor:
    """This rank's elements of the unit, from what its optimizer has kept."""
    shard = torch.zeros(unit.shard_numel, dtype=dtype, device=device)
    if not unit.use_orig_params:
        value = own.get(unit.key, {}).get(key)
        if value is not None:
            shard[: value.numel()] = value.to(device)
        return shard
    for piece in unit.pieces(rank):
        entry = piece.entry
        kept: Mapping[str, Any] = next((own[name] for name in unit.names_of(entry) if name in own), {})
        if key in kept:
            value = entry.flatten(kept[key]) if unit.keeps_shapes else kept[key]
            shard[piece.offset_in_shard :][: piece.numel] = value.to(device)
    return shard


def _by_key(unit: FlatUnit, kept: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[FlatEntry, Tensor]]:
    """What is kept of the unit's parameters per element, by kind."""
    found: dict[str, dict[FlatEntry, Tensor]] = {}
    for entry in unit.entries:
        for name in unit.names_of(entry):
            for key, value in kept.get(name, {}).items():
                if _is_per_element(value, entry.shape):
                    found.setdefault(key, {})[entry] = value
    return found


def _is_per_element(value: Any, shape: torch.Size | None) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == shape


def _meta(value: Tensor) -> Tensor:
    return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")


def _outline_of(state: dict[str, Any]) -> dict[str, Any]:
    """What all ranks must know of this one's: single values, in host memory, and the shapes of the rest."""
    kept = {
        number: {key: _outline_of_value(value) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {"state": kept, "param_groups": state["param_groups"]}


def _outline_of_value(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.cpu() if value.numel() == 1 else _meta(value)


def _wrapped(model: nn.Module) -> tuple[FlatLayout, dict[str, Any], Any]:
    """The layout, the wrappers by name, and the first of them. Their parameters are at rest afterwards.

    Raises:
        FSDPValueError: there is none.
        FSDPNotImplementedError: they are on different ranks.
    """
    wrappers = dict(wrappers_of(model))
    if not wrappers:
        raise fsdp2.FSDPValueError(f"no FullyShardedDataParallel is in this {type(model).__name__}: wrap it first.")
    root = next(iter(wrappers.values()))
    ranks = dist.get_process_group_ranks(root.process_group)
    for name, each in wrappers.items():
        if each._fsdp1_is_sharded and dist.get_process_group_ranks(each.process_group) != ranks:
            raise fsdp2.FSDPNotImplementedError(
                f"'{name}' is sharded over other ranks than the model, and then the state of flat parameters cannot be "
                "read or written here: python -m fsdp2.compat.fsdp1.convert does it from files."
            )
    for each in wrappers.values():
        each._unit.reshard()
    return flat_layout(model), wrappers, root


def _copied(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _parameters(optim: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optim.param_groups for parameter in group["params"]]


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(parameter, name)
    return names
