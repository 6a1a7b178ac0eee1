"""Between rows of parameters, which a rank has here, and pieces of a flat parameter, which it has under torch's FSDP1.

Both are intervals of a parameter's elements in the order of its memory, so each rank sends every other one what their
intervals have in common: one all-to-all for a unit. A parameter that is not cut into intervals (transposed, or sharded
along another dim) is gathered by itself.

A unit of two ranks, with a 3-element ``a`` and a 2 x 2 ``b``::

    rows here               a a / b b b b     rank 0 has a[0:2], b[0:2] and rank 1 a[2:3], b[2:4]
    flat                    a a a b|b b b     rank 0 has a[0:3], b[0:1] and rank 1 b[1:4]
    rank 1 sends to rank 0  a[2:3]            rank 0 sends to rank 1  b[1:2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2.compat.fsdp1 import whole
from fsdp2.compat.fsdp1.layout import FlatEntry, FlatUnit
from fsdp2.compat.fsdp1.names import clean

Interval = tuple[int, int]
Intervals = Callable[[FlatEntry, int], Interval]
"""Of an entry, on a rank."""


class Exchange:
    """What one rank of a unit sends and receives.

    Args:
        unit: the unit; its ``world_size`` is the group's, or 1 (``NO_SHARD``), and then nothing is sent.
        parameters: the sharded parameters, by the names that they have in the unit.
        group: the ranks that the unit is sharded over.
        device: of the group's communication.
    """

    def __init__(
        self, unit: FlatUnit, parameters: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.unit, self._group, self._device = unit, group, device
        self._parameters = {entry: parameters[entry.fqn] for entry in unit.entries}
        self._rank = 0 if unit.world_size == 1 else dist.get_rank(group)
        is_cut = {entry: _is_cut_into_intervals(entry, each) for entry, each in self._parameters.items()}
        self._sent = [entry for entry in unit.entries if is_cut[entry]]
        self._gathered = [entry for entry in unit.entries if not is_cut[entry]]

    def to_shard(self, values: Mapping[FlatEntry, Tensor], *, dtype: torch.dtype, padding: float) -> Tensor:
        """This rank's shard of the flat parameter, as in memory: (shard_numel,). Collective over the group.

        Args:
            values: DTensors that are placed as the parameters are; entries without one are zeros.
            dtype: of the shard.
            padding: what lies between parameters.
        """
        unit = self.unit
        shard = torch.full((unit.shard_numel,), padding, dtype=dtype, device=self._device)
        shard[unit.saved_numel(self._rank) :] = 0
        for piece in unit.pieces(self._rank):
            shard[piece.offset_in_shard :][: piece.numel] = 0
        there = [entry for entry in self._sent if entry in values]
        own = {entry: self._flattened(entry, values[entry]).to(self._device, dtype) for entry in there}
        starts = {entry: self._rows(entry, self._rank)[0] for entry in there}
        parts = [
            [own[entry][a - starts[entry] : b - starts[entry]] for entry, (a, b) in each]
            for each in self._in_common(there, self._rows, self._flat)
        ]
        incoming = self._in_common(there, self._flat, self._rows)
        for entry, (a, b), part in self._exchanged(parts, incoming, dtype):
            held = unit.piece(entry, self._rank)
            assert held is not None, "else nothing is in common with it"
            shard[held.offset_in_shard + a - held.start :][: b - a] = part
        for entry in self._gathered:
            if entry in values:
                complete = entry.flatten(whole.whole(values[entry], offload=False)).to(self._device)
                held = unit.piece(entry, self._rank)
                if held is not None:
                    shard[held.offset_in_shard :][: held.numel] = complete[held.start : held.end]
        return shard

    def to_rows(self, shard: Tensor) -> dict[FlatEntry, Tensor]:
        """Values that are placed as the parameters are, from this rank's shard of them. Collective over the group.

        Args:
            shard: (shard_numel,), as in memory.
        """
        unit, dtype = self.unit, shard.dtype
        shard = shard.to(self._device)
        own = {entry: self._rows(entry, self._rank) for entry in self._sent}
        rows = {entry: shard.new_empty(end - start) for entry, (start, end) in own.items()}
        parts = []
        for each in self._in_common(self._sent, self._flat, self._rows):
            pieces = [(unit.piece(entry, self._rank), common) for entry, common in each]
            parts.append([shard[p.offset_in_shard + a - p.start :][: b - a] for p, (a, b) in pieces if p is not None])
        incoming = self._in_common(self._sent, self._rows, self._flat)
        for entry, (a, b), part in self._exchanged(parts, incoming, dtype):
            rows[entry][a - own[entry][0] : b - own[entry][0]] = part
        found = {entry: self._placed(entry, flat) for entry, flat in rows.items()}
        if self._gathered:
            shards = shard.new_empty(unit.world_size * unit.shard_numel)
            whole.all_gather(shards, shard.contiguous(), self._group)
            for entry in self._gathered:
                complete = self._whole_of(entry, shards.view(unit.world_size, -1))
                found[entry] = whole.like(complete, self._parameters[entry])
        return {entry: found[entry] for entry in unit.entries}

    def _exchanged(
        self, parts: list[list[Tensor]], incoming: list[list[tuple[FlatEntry, Interval]]], dtype: torch.dtype
    ) -> Iterator[tuple[FlatEntry, Interval, Tensor]]:
        """What arrives, for the parts that go to each rank."""
        expected = [(entry, common) for each in incoming for entry, common in each]
        counts = [sum(b - a for _, (a, b) in each) for each in incoming]
        sent = torch.cat([part for each in parts for part in each]) if any(parts) else None
        if sent is None:
            sent = torch.empty(0, dtype=dtype, device=self._device)
        received = sent
        if self.unit.world_size > 1:
            received = sent.new_empty(sum(counts))
            given = [sum(part.numel() for part in each) for each in parts]
            dist.all_to_all_single(received, sent, counts, given, group=self._group)
        for (entry, (a, b)), part in zip(expected, received.split([b - a for _, (a, b) in expected]), strict=True):
            yield entry, (a, b), part

    def _in_common(
        self, entries: Sequence[FlatEntry], mine: Intervals, theirs: Intervals
    ) -> list[list[tuple[FlatEntry, Interval]]]:
        """For each rank, what its intervals have in common with this one's."""
        return [
            [(e, common) for e in entries if (common := _common(mine(e, self._rank), theirs(e, rank))) is not None]
            for rank in range(self.unit.world_size)
        ]

    def _flat(self, entry: FlatEntry, rank: int) -> Interval:
        """The elements in the flat shard of ``rank``."""
        piece = self.unit.piece(entry, rank)
        return (0, 0) if piece is None else (piece.start, piece.end)

    def _rows(self, entry: FlatEntry, rank: int) -> Interval:
        """The elements of the rows that ``rank`` has."""
        if self.unit.world_size == 1:
            return 0, entry.numel
        size = entry.shape[0]
        chunk = -(-size // self.unit.world_size)
        each = entry.numel // max(size, 1)
        return min(rank * chunk, size) * each, min((rank + 1) * chunk, size) * each

    @staticmethod
    def _flattened(entry: FlatEntry, value: Tensor) -> Tensor:
        return entry.flatten(value.to_local() if isinstance(value, DTensor) else value.detach())

    def _placed(self, entry: FlatEntry, flat: Tensor) -> Tensor:
        """This rank's elements, as its part of a tensor that is placed as the parameter is."""
        parameter = self._parameters[entry]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        made = entry.with_rows(local.shape[0]).unflatten(flat).to(local.device)
        return whole.placed_as(parameter, made)

    def _whole_of(self, entry: FlatEntry, shards: Tensor) -> Tensor:
        pieces = [(rank, self.unit.piece(entry, rank)) for rank in range(self.unit.world_size)]
        parts = [shards[rank, p.offset_in_shard :][: p.numel] for rank, p in pieces if p is not None]
        return entry.unflatten(torch.cat(parts) if parts else shards.new_empty(0))


def _common(a: Interval, b: Interval) -> Interval | None:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else None


def _is_cut_into_intervals(entry: FlatEntry, parameter: Tensor) -> bool:
    """Whether a rank's rows follow each other in memory: they are of dim 0, and that is the outermost one."""
    if isinstance(parameter, DTensor):
        *rest, last = parameter.placements
        if any(each != Replicate() for each in rest) or type(last) not in (Shard, Replicate):
            return False
        if isinstance(last, Shard) and last.dim != 0:
            return False
    return entry.is_outermost(0)


def exchange_of(wrapper: object, unit: FlatUnit, parameters: Mapping[str, Tensor]) -> Exchange:
    """For a unit of ``wrapper``, whose parameters are ``parameters``, by names in state dicts.

    Raises:
        FSDPRuntimeError: one is not there.
    """
    parameters = {clean(name): parameter for name, parameter in parameters.items()}
    missing = [entry.fqn for entry in unit.entries if entry.fqn not in parameters]
    if missing:
        raise fsdp2.FSDPRuntimeError(f"the unit '{unit.name}' has no parameter '{missing[0]}' any more.")
    return Exchange(unit, parameters, wrapper.process_group, wrapper.compute_device)  # type: ignore[attr-defined]
