"""From the flat shards of all ranks to whole tensors by name, and back: parameters, and what optimizers keep of them.

What is read are files of one rank each, as torch's FSDP1 writes them:

- a LOCAL state dict: for each unit ``<unit>._flat_param``, this rank's elements; buffers and ignored parameters as
  they are. With ``use_orig_params=True`` there are the pieces under the parameters' names as well, which suffice;
- ``optimizer.state_dict()``, of flat parameters (``use_orig_params=False``) or of the 1-D pieces of parameters. It has
  numbers for names, so `OptimizerOrder` says which parameter has which.

Which elements of what a rank holds says a `FlatLayout`. Everything goes parameter by parameter, so that no more than
one is in memory beside what the caller keeps. Nothing here needs a process group, or writes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.compat.fsdp1.layout import FLAT_PARAM, PADDING_VALUE, FlatEntry, FlatLayout, FlatUnit, Piece
from fsdp2.compat.fsdp1.names import WRAPPED, clean
from fsdp2.compat.fsdp1.sharded_files import ShardedRecord

State = Mapping[str, Any]
"""A state dict, of a model or of an optimizer."""

Keep = Callable[[Tensor], Tensor]
"""Where a made tensor goes; one may put it in a file, and give back the same values without the memory."""


# ---- one parameter ----------------------------------------------------------------------------------


def whole_of(unit: FlatUnit, entry: FlatEntry, piece_on: Callable[[int, Piece], Tensor]) -> Tensor:
    """The whole parameter, in its shape and strides, from its pieces.

    Args:
        unit: The unit that it is in.
        entry: The parameter.
        piece_on: The elements of a piece that a rank holds: (piece.numel,). Asked in the order of the ranks.
    """
    parts = []
    for rank in range(unit.world_size):
        piece = unit.piece(entry, rank)
        if piece is not None:
            parts.append(piece_on(rank, piece))
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=unit.dtype)
    return entry.unflatten(flat)


def shard_of(
    unit: FlatUnit,
    rank: int,
    whole: Callable[[FlatEntry], Tensor],
    *,
    dtype: torch.dtype,
    padding: float,
    device: str = "cpu",
) -> Tensor:
    """The shard of one rank as it is in memory, (shard_numel,): gaps hold ``padding``, what is after the end zeros.

    Args:
        unit: The unit.
        rank: Whose shard.
        whole: A whole parameter. Asked for those of which the rank holds elements, in order.
        dtype: Of the shard.
        padding: What lies between parameters.
        device: Of the shard.
    """
    shard = torch.full((unit.shard_numel,), padding, dtype=dtype, device=device)
    shard[unit.saved_numel(rank) :] = 0
    for piece in unit.pieces(rank):
        shard[piece.offset_in_shard :][: piece.numel] = elements(piece, whole(piece.entry))
    return shard


def elements(piece: Piece, whole: Tensor) -> Tensor:
    """The elements of a whole parameter that a piece has: (piece.numel,)."""
    return piece.entry.flatten(whole)[piece.start : piece.end]


# ---- models -----------------------------------------------------------------------------------------


def read_model(layout: FlatLayout, states: Sequence[State]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Whole parameters from the LOCAL state dicts of all ranks, one at a time.

    Args:
        layout: Of the model that wrote them.
        states: In the order of the ranks.

    Yields:
        All names of a parameter, and the parameter whole. Then what is in no unit, buffers and ignored parameters, as
        rank 0 has it (FULL state dicts do the same).

    Raises:
        FSDPValueError: The files do not fit the layout; the message names the first unit that differs.
    """
    cleaned = [{clean(name): value for name, value in state.items()} for state in states]
    check_model(layout, cleaned)
    known: set[str] = set()
    for unit in layout.units:
        ranks = cleaned[: unit.world_size]
        shards = [_shard_in(unit, state) for state in ranks]
        known.add(unit.key)
        for entry in unit.entries:
            names = unit.names_of(entry)
            known.update(names)
            yield names, whole_of(unit, entry, _Pieces(unit, ranks, shards).on)
    for name, value in cleaned[0].items():
        if name not in known:
            yield (name,), value


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Where the pieces of a unit's parameters are: in each rank's flat shard, or under their names."""

    unit: FlatUnit
    states: Sequence[State]
    shards: Sequence[Tensor | None]

    def on(self, rank: int, piece: Piece) -> Tensor:
        """The elements of ``piece``, which is ``rank``'s."""
        shard = self.shards[rank]
        if shard is not None:
            return shard[piece.offset_in_shard :][: piece.numel]
        name = self.unit.full_name(piece.entry.fqn)
        value = self.states[rank][name]
        assert isinstance(value, Tensor)  # `check_model` has looked
        return value.detach()


def _shard_in(unit: FlatUnit, state: State) -> Tensor | None:
    """This rank's elements of the flat parameter; None if the state dict has only pieces."""
    value = state.get(unit.key)
    if isinstance(value, ShardedRecord):
        return value.local_shards[0].tensor if value.local_shards else torch.empty(0, dtype=value.dtype)
    return value.detach() if isinstance(value, Tensor) else None


def check_model(layout: FlatLayout, states: Sequence[State]) -> None:
    """Compare LOCAL state dicts of all ranks (clean names) with the layout.

    Raises:
        FSDPValueError: They differ; the message names the first unit that does, and what else would fit.
    """
    if len(states) != layout.world_size:
        raise fsdp2.FSDPValueError(
            f"{len(states)} state dicts, for a layout of {layout.world_size} ranks; give those of all ranks of one "
            "sharding group (of HYBRID_SHARD: of one replica), in their order"
        )
    keys = {unit.key for unit in layout.units}
    for rank, state in enumerate(states):
        for unit in layout.units:
            if rank < unit.world_size:
                _check_unit(unit, rank, state, known=keys)
        further = [name for name in state if name.rpartition(".")[2] == FLAT_PARAM and name not in keys]
        if further:
            raise fsdp2.FSDPValueError(
                f"rank {rank} has '{further[0]}', and the layout has no such unit, but {sorted(keys)}; give the units "
                "that the model was wrapped into"
            )


def _check_unit(unit: FlatUnit, rank: int, state: State, known: Collection[str]) -> None:
    value = state.get(unit.key)
    if value is None:
        for piece in unit.pieces(rank):
            _check_piece(unit, piece, rank, state, known)
        return
    sizes = {unit.saved_numel(rank), unit.shard_numel}
    if isinstance(value, ShardedRecord):
        if value.world_size != unit.world_size or value.rank != rank:
            raise fsdp2.FSDPValueError(
                f"'{unit.key}' was written by rank {value.rank} of {value.world_size}, and is read as rank {rank}'s of "
                f"{unit.world_size}; give the files of all ranks in their order"
            )
        found, expected = value.shape[0], unit.numel
    else:
        found = value.numel()
        expected = found if value.ndim == 1 and found in sizes else unit.saved_numel(rank)
    if found != expected:
        raise fsdp2.FSDPValueError(
            f"'{unit.key}' has {found} elements on rank {rank}, and {expected} in the layout, which is for "
            f"use_orig_params={unit.use_orig_params} and the parameters {[entry.fqn for entry in unit.entries]}. Give "
            "the model, the units, use_orig_params and, with use_orig_params=True, the dtype and the param_dtype of "
            "MixedPrecision that it was written with"
        )


def _check_piece(unit: FlatUnit, piece: Piece, rank: int, state: State, known: Collection[str]) -> None:
    name = unit.full_name(piece.entry.fqn)
    value = state.get(name)
    if not isinstance(value, Tensor):
        there = sorted(name for name in state if name.rpartition(".")[2] == FLAT_PARAM)
        raise fsdp2.FSDPValueError(
            f"rank {rank} has neither '{unit.key}' nor '{name}'. Its flat parameters are {there}, those of the layout "
            f"{sorted(known)}; give the units that the model was wrapped into"
        )
    if value.shape != (piece.numel,):
        raise fsdp2.FSDPValueError(
            f"'{name}' has the shape {tuple(value.shape)} on rank {rank}; of its {piece.entry.numel} elements the rank "
            f"holds {piece.numel}. Give the units, use_orig_params and param_dtype that it was written with"
        )


def write_model(layout: FlatLayout, whole: State, rank: int, keep: Keep = lambda made: made) -> dict[str, Any]:
    """The LOCAL state dict of one rank, with the keys, sizes and ``ShardedTensor``s that torch's FSDP1 has.

    Args:
        layout: Of the model that is to read it.
        whole: Whole parameters, buffers and all, by name.
        rank: Which rank.
        keep: Called with each flat shard that is made; what it returns is in the result.

    Returns:
        Save it by `torch.save`: torch loads it on as many ranks, in a process group.

    Raises:
        FSDPValueError: A parameter is missing or has another shape.
    """
    check_whole(layout, whole)
    local: dict[str, Any] = {}
    in_units: set[str] = set()
    for unit in layout.units:
        names = {entry: unit.names_of(entry) for entry in unit.entries}
        in_units.update(name for each in names.values() for name in each)
        if rank >= unit.world_size:
            continue
        values = {entry: _first(whole, each) for entry, each in names.items()}
        dtype = values[unit.entries[0]].dtype
        local |= write_unit(
            unit, keep(shard_of(unit, rank, values.__getitem__, dtype=dtype, padding=PADDING_VALUE)), rank
        )
    return local | {name: value for name, value in whole.items() if name not in in_units}


def write_unit(unit: FlatUnit, shard: Tensor, rank: int) -> dict[str, Any]:
    """What of one unit the LOCAL state dict of ``rank`` has, whose shard is ``shard`` (as in memory)."""
    local = {unit.key: _record(unit, shard[: unit.saved_numel(rank)], rank)}
    return local | _pieces_by_name(unit, shard, rank) if unit.use_orig_params else local


def _record(unit: FlatUnit, shard: Tensor, rank: int) -> Any:
    return ShardedRecord.of_flat(
        shard,
        numel=unit.numel,
        chunk=unit.shard_numel,
        rank=rank,
        world_size=unit.world_size,
        requires_grad=unit.requires_grad,
    )


def _pieces_by_name(unit: FlatUnit, shard: Tensor, rank: int) -> dict[str, Tensor]:
    """The pieces under their names, as torch saves them beside the flat parameter: views of it."""
    pieces = {piece.entry: piece for piece in unit.pieces(rank)}
    found = {}
    for entry in unit.entries:
        piece = pieces.get(entry)
        part = shard[:0] if piece is None else shard[piece.offset_in_shard :][: piece.numel]
        found.update(dict.fromkeys(unit.names_of(entry), part))
    return found


def _first(whole: State, names: Iterable[str]) -> Tensor:
    value = next(whole[name] for name in names if name in whole)
    assert isinstance(value, Tensor)  # `check_whole` has looked
    return value.detach()


def check_whole(layout: FlatLayout, whole: State) -> None:
    """Compare a whole state dict with the layout.

    Raises:
        FSDPValueError: A parameter is missing, has another shape, or another dtype than the others of its unit.
    """
    for unit in layout.units:
        dtype: torch.dtype | None = None
        for entry in unit.entries:
            names = unit.names_of(entry)
            values = [whole[name] for name in names if name in whole]
            if not values or not isinstance(values[0], Tensor):
                raise fsdp2.FSDPValueError(
                    f"the state dict has no parameter '{names[0]}', which '{unit.key}' consists of"
                )
            if values[0].shape != entry.shape:
                raise fsdp2.FSDPValueError(
                    f"'{names[0]}' has the shape {tuple(values[0].shape)}, and {tuple(entry.shape)} in the model"
                )
            dtype = dtype or values[0].dtype
            if values[0].dtype != dtype:
                raise fsdp2.FSDPValueError(
                    f"'{names[0]}' is {values[0].dtype}, and others of '{unit.key}' are {dtype}; a flat parameter has "
                    "one dtype"
                )


# ---- optimizers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptimizerOrder:
    """Which parameters an optimizer has, in the order of their numbers in its state dict.

    Attributes:
        names: Names in the model; with ``use_orig_params=False`` a unit's is that of its flat parameter.
        trainable: Those of them that require gradients: many programs give the optimizer no others.
        is_given: Whether the user says so; otherwise it is the order of ``model.parameters()``.
    """

    names: tuple[str, ...]
    trainable: tuple[str, ...]
    is_given: bool = False

    @classmethod
    def of_model(cls, root: nn.Module, layout: FlatLayout) -> OptimizerOrder:
        """The order of ``model.parameters()``, as it is once torch's FSDP1 has wrapped the model ``root``."""
        flat = {} if layout.use_orig_params else {unit.name: unit for unit in layout.units}
        gone = {name for unit in flat.values() for entry in unit.entries for name in unit.names_of(entry)}
        names, trainable, seen = [], [], set()
        for prefix, module in root.named_modules():
            if WRAPPED in module._modules:
                continue  # a wrapper is no module of the model
            for param_name, parameter in module._parameters.items():
                name = clean(f"{prefix}.{param_name}" if prefix else param_name)
                if parameter is None or id(parameter) in seen or name in gone:
                    continue
                seen.add(id(parameter))
                names.append(name)
                trainable += [name] if parameter.requires_grad else []
            unit = flat.pop(clean(f"{prefix}.").removesuffix("."), None)
            if unit is not None:  # it is registered when what it consists of is gone, so it is the module's last
                names.append(unit.key)
                trainable += [unit.key] if unit.requires_grad else []
        return cls(tuple(names), tuple(trainable))

    @classmethod
    def given(cls, names: Iterable[str]) -> OptimizerOrder:
        """The order that a user says the optimizer's parameters have."""
        found = tuple(clean(name) for name in names)
        return cls(found, found, is_given=True)

    def sort(self, names: Collection[str]) -> list[str]:
        """``names`` in this order.

        Raises:
            FSDPValueError: One is not in it.
        """
        places = {name: place for place, name in enumerate(self.names)}
        for name in names:
            if name not in places:
                raise fsdp2.FSDPValueError(
                    f"the optimizer has '{name}', and the parameters to write it for are {list(self.names)}; give the "
                    "names in the order of the optimizer's parameters (--optimizer-order)"
                )
        return sorted(names, key=places.__getitem__)

    def names_in(self, state: State, where: str) -> dict[int, str]:
        """The name of each number in an optimizer's state dict.

        Args:
            state: ``optimizer.state_dict()``.
            where: What it is, for messages.

        Raises:
            FSDPValueError: It cannot be known.
        """
        groups = state["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        if all("param_names" in group for group in groups):
            named = [clean(name) for group in groups for name in group["param_names"]]
            return dict(zip(numbers, named, strict=True))
        if len(groups) > 1 and not self.is_given:
            raise fsdp2.FSDPValueError(
                f"{where} has {len(groups)} parameter groups, and nothing in it says which parameters are in which. "
                "Give the names in the order of the optimizer's parameters, group after group (--optimizer-order)"
            )
        for names in (self.names, self.trainable):
            if len(names) == len(numbers):
                return dict(zip(sorted(numbers), names, strict=True))
        raise fsdp2.FSDPValueError(
            f"{where} has {len(numbers)} parameters; the model has {len(self.names)}, of which {len(self.trainable)} "
            f"require gradients: {list(self.names)}. Give the names in the order of the optimizer's parameters "
            "(--optimizer-order)"
        )


@dataclass(frozen=True, slots=True)
class NamedState:
    """What an optimizer keeps, by the names of parameters.

    Attributes:
        names: The parameters of which it keeps something.
        of: What it keeps of one: whole tensors and scalars, by key.
        param_groups: Its groups, with names in ``params``.
    """

    names: tuple[str, ...]
    of: Callable[[str], dict[str, Any]]
    param_groups: list[dict[str, Any]]


def is_optimizer_state(value: object) -> bool:
    """Whether it is what ``optimizer.state_dict()`` gives, or FSDP1's ``optim_state_dict``."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def read_optimizer(layout: FlatLayout, states: Sequence[State], order: OptimizerOrder) -> NamedState:
    """What an optimizer of flat parameters, or of their pieces, keeps, from its ``state_dict()`` on all ranks.

    A value is per element if it is 1-D and has as many elements as the rank holds; the others must be scalars, and the
    same on all ranks. With ``use_orig_params=False`` a scalar is the unit's, and becomes that of each parameter.

    Args:
        layout: Of the model that the optimizer was made for.
        states: In the order of the ranks.
        order: Which parameter has which number.

    Raises:
        FSDPValueError: The files do not fit, or ranks disagree; the message names the parameter and the key. (Of what
            is read later, `NamedState.of` raises.)
    """
    if len(states) != layout.world_size:
        raise fsdp2.FSDPValueError(
            f"{len(states)} optimizer states, for a layout of {layout.world_size} ranks; give those of all ranks of "
            "one sharding group, in their order"
        )
    tables = [order.names_in(state, f"the optimizer state of rank {rank}") for rank, state in enumerate(states)]
    _check_same_names(tables)
    by_name = [
        {table[number]: kept for number, kept in state["state"].items()}
        for table, state in zip(tables, states, strict=True)
    ]
    reader = _OptimizerReader(layout, by_name)
    groups: list[dict[str, Any]] = []
    for group in states[0]["param_groups"]:
        names = [name for number in group["params"] for name in reader.parameters_of(tables[0][number])]
        groups.append({**{key: value for key, value in group.items() if key != "param_names"}, "params": names})
    names_in_order = [name for _, name in sorted(tables[0].items())]
    kept = (each for name in names_in_order for each in reader.parameters_of(name) if reader.keeps(name))
    return NamedState(tuple(kept), reader.state_of, groups)


def _check_same_names(tables: Sequence[Mapping[int, str]]) -> None:
    for rank, table in enumerate(tables):
        if table != tables[0]:
            raise fsdp2.FSDPValueError(
                f"the optimizers of rank 0 and rank {rank} have other parameters: {list(tables[0].values())} and "
                f"{list(table.values())}"
            )


class _OptimizerReader:
    """What `read_optimizer` looks up: where each parameter is, and each rank's values by name."""

    def __init__(self, layout: FlatLayout, by_name: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        self.units = {unit.key: unit for unit in layout.units}
        self.places = {unit.full_name(entry.fqn): (unit, entry) for unit in layout.units for entry in unit.entries}
        self.aliases = {
            name: unit.full_name(entry.fqn)
            for unit in layout.units
            for entry in unit.entries
            for name in unit.names_of(entry)
        }
        self.by_name = [{self.aliases.get(name, name): kept for name, kept in state.items()} for state in by_name]
        self.kept = {name for state in self.by_name for name, kept in state.items() if kept}

    def parameters_of(self, name: str) -> list[str]:
        """The parameters that the optimizer has under ``name``: those of a unit, or the one of this name."""
        unit = self.units.get(name)
        if unit is None:
            return [self.aliases.get(name, name)]
        return [unit.full_name(entry.fqn) for entry in unit.entries]

    def keeps(self, name: str) -> bool:
        """Whether any rank keeps anything under ``name``."""
        return self.aliases.get(name, name) in self.kept

    def state_of(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps of one parameter, whole."""
        place = self.places.get(name)
        if place is None:  # ignored by FSDP1: every rank has it whole
            return dict(self.by_name[0][name])
        unit, entry = place
        own = unit.key if unit.key in self.kept else name
        values = [state.get(own, {}) for state in self.by_name[: unit.world_size]]
        holders = [rank for rank in range(unit.world_size) if unit.piece(entry, rank) is not None]
        without = [rank for rank in holders if not values[rank]]
        if without:
            raise fsdp2.FSDPValueError(
                f"rank {without[0]} keeps nothing of '{name}', of which it holds elements, and other ranks do; the "
                "order of the optimizer's parameters is another, or the files are of several moments"
            )
        keys = dict.fromkeys(key for kept in values for key in kept)
        return {key: self._value(unit, entry, key, [kept.get(key) for kept in values], holders) for key in keys}

    def _value(self, unit: FlatUnit, entry: FlatEntry, key: str, found: Sequence[Any], holders: Sequence[int]) -> Any:
        """One value, from those of all ranks; ``holders`` are the ranks that hold elements of the parameter."""
        fits = [_is_per_element(unit, entry, rank, found[rank]) for rank in holders]
        name = unit.full_name(entry.fqn)
        if all(fits) and (holders or any(isinstance(value, Tensor) and value.ndim == 1 for value in found)):
            is_outline = any(isinstance(value, Tensor) and value.is_meta for value in found)

            def piece_on(rank: int, piece: Piece) -> Tensor:
                part = _piece_of(unit, piece, found[rank])
                return part.to("meta") if is_outline else part

            return whole_of(unit, entry, piece_on)
        if not any(isinstance(value, Tensor) and value.numel() > 1 for value in found):
            said = [found[rank] for rank in holders] or [each for each in found if each is not None] or [None]
            return _agreed(name, key, said, "ranks")
        rank = holders[fits.index(False)] if holders else 0
        value = f"of shape {tuple(found[rank].shape)}" if isinstance(found[rank], Tensor) else repr(found[rank])
        piece = unit.piece(entry, rank)
        raise fsdp2.FSDPValueError(
            f"'{key}' of '{name}' is {value} on rank {rank}, which holds {piece.numel if piece else 0} of the "
            f"parameter's {entry.numel} elements. Only state per element and scalars can be read out of flat "
            "parameters; the units, use_orig_params and the order of the optimizer's parameters must be those of the "
            "program that wrote it"
        )


def _is_per_element(unit: FlatUnit, entry: FlatEntry, rank: int, value: object) -> bool:
    if isinstance(value, Tensor) and unit.keeps_shapes and value.shape == entry.shape:
        return True
    if not isinstance(value, Tensor) or value.ndim != 1:
        return False
    if not unit.use_orig_params:
        return value.numel() in (unit.shard_numel, unit.saved_numel(rank))
    piece = unit.piece(entry, rank)
    return piece is not None and value.numel() == piece.numel


def _piece_of(unit: FlatUnit, piece: Piece, value: Tensor) -> Tensor:
    if unit.keeps_shapes and value.shape == piece.entry.shape:
        return piece.entry.flatten(value)
    return (value if unit.use_orig_params else value[piece.offset_in_shard :])[: piece.numel]


def _agreed(name: str, key: str, values: Sequence[Any], between: str) -> Any:
    """A value that is not per element, if it is the same ``between`` ranks, or between the parameters of a unit."""
    first = values[0]
    for value in values:
        tensors = isinstance(first, Tensor) and isinstance(value, Tensor)
        if not (torch.equal(first, value) if tensors else first == value):
            raise fsdp2.FSDPValueError(f"'{key}' of '{name}' differs between {between}: {first} and {value}")
    return first.clone() if isinstance(first, Tensor) else first  # each parameter counts its own steps


def named_state(state: State, order: OptimizerOrder) -> NamedState:
    """The same of a whole state: FSDP1's ``optim_state_dict``, or ``optimizer.state_dict()`` of a plain model.

    Args:
        state: By names, or by numbers.
        order: Of the plain model's parameters, for numbers.
    """
    groups: list[dict[str, Any]] = [dict(group) for group in state["param_groups"]]
    if not all(isinstance(each, int) for group in groups for each in group["params"]):
        return NamedState(tuple(state["state"]), lambda name: dict(state["state"][name]), groups)
    table = order.names_in(state, "the optimizer state")
    for group in groups:
        group["params"] = [table[number] for number in group["params"]]
        group.pop("param_names", None)
    by_name = {table[number]: kept for number, kept in state["state"].items()}
    return NamedState(tuple(by_name), lambda name: dict(by_name[name]), groups)


def write_optimizer(
    layout: FlatLayout, state: NamedState, rank: int, order: OptimizerOrder, keep: Keep = lambda made: made
) -> dict[str, Any]:
    """The ``optimizer.state_dict()`` that one rank has under torch's FSDP1.

    Groups and their order stay. Of a unit's parameters without state, beside others that have some, the flat parameter
    has zeros, which is what it would have if they had never had a gradient.

    Args:
        layout: Of the model whose optimizer is to read it.
        state: What it keeps, by name.
        rank: Which rank.
        order: Of that optimizer's parameters: theirs within each group.
        keep: Called with each tensor that is made; what it returns is in the result.

    Raises:
        FSDPValueError: A parameter is not in ``order``; or, with ``use_orig_params=False``, those of one unit are in
            several groups, or their scalars differ.
    """
    target = _OptimizerWriter(layout, state, rank, keep)
    numbers: dict[str, int] = {}
    groups = []
    for group in state.param_groups:
        names = order.sort({target.name_for(name) for name in group["params"]})
        for name in names:
            if name in numbers:
                raise fsdp2.FSDPValueError(
                    f"the parameters of '{name}' are in several groups of the optimizer; with use_orig_params=False "
                    "they are one. Use use_orig_params=True, or other units"
                )
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in names]})
    kept = {numbers[name]: values for name in numbers if (values := target.values_of(name))}
    return {"state": kept, "param_groups": groups}


class _OptimizerWriter:
    """What `write_optimizer` looks up: where each parameter is, and what is kept of it."""

    def __init__(self, layout: FlatLayout, state: NamedState, rank: int, keep: Keep) -> None:
        self.state, self.rank, self.keep = state, rank, keep
        self.units = {unit.key: unit for unit in layout.units if not unit.use_orig_params}
        self.has_state = set(state.names)
        self.places = {
            name: (unit, entry) for unit in layout.units for entry in unit.entries for name in unit.names_of(entry)
        }

    def name_for(self, name: str) -> str:
        """What FSDP1's optimizer has for a parameter: itself, or the flat parameter that it is in."""
        place = self.places.get(name)
        if place is None or place[0].use_orig_params:
            return name
        return place[0].key

    def values_of(self, name: str) -> dict[str, Any]:
        """What this rank keeps under ``name``; nothing, if it holds no element of it."""
        unit = self.units.get(name)
        if unit is not None:
            return self._flat(unit)
        if name not in self.has_state:
            return {}
        place = self.places.get(name)
        if place is None:
            return self.state.of(name)
        unit, entry = place
        piece = unit.piece(entry, unit.rank_of(self.rank)) if unit.rank_of(self.rank) < unit.world_size else None
        if piece is None:
            return {}

        def own(value: Tensor) -> Tensor:
            return value.clone() if unit.keeps_shapes else elements(piece, value).clone()

        values = self.state.of(name)
        return {
            key: self.keep(own(value)) if self._is_whole(value, entry, name, key) else value
            for key, value in values.items()
        }

    def _is_whole(self, value: object, entry: FlatEntry, name: str, key: str) -> bool:
        """Whether a value is per element; a scalar is not."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return False
        if value.shape == entry.shape:
            return True
        if value.numel() == 1:
            return False
        raise fsdp2.FSDPValueError(
            f"'{key}' of '{name}' has the shape {tuple(value.shape)}, and the parameter {tuple(entry.shape)}; flat "
            "parameters hold state per element and scalars alone"
        )

    def _flat(self, unit: FlatUnit) -> dict[str, Any]:
        states = {}
        for entry in unit.entries:
            name = next((each for each in unit.names_of(entry) if each in self.has_state), None)
            if name is not None:
                states[entry] = (name, self.state.of(name))
        if not states or unit.rank_of(self.rank) >= unit.world_size:
            return {}
        flat: dict[str, Any] = {}
        for key in dict.fromkeys(key for _, kept in states.values() for key in kept):
            values = {entry: kept[key] for entry, (_, kept) in states.items() if key in kept}
            whole = {
                entry: value for entry, value in values.items() if self._is_whole(value, entry, states[entry][0], key)
            }
            if not whole:
                same = "its parameters, and a flat parameter has one value for all"
                flat[key] = _agreed(unit.key, key, list(values.values()), same)
                continue
            flat[key] = self.keep(self._shard(unit, whole))
        return flat

    def _shard(self, unit: FlatUnit, whole: Mapping[FlatEntry, Tensor]) -> Tensor:
        first = next(iter(whole.values()))
        dtype, device = first.dtype, "meta" if first.is_meta else "cpu"

        def of(entry: FlatEntry) -> Tensor:
            found = whole.get(entry)
            return torch.zeros(entry.shape, dtype=dtype, device=device) if found is None else found

        return shard_of(unit, unit.rank_of(self.rank), of, dtype=dtype, padding=0, device=device)
