"""Whole parameters out of a sharded model, in bounded memory: `iter_full_parameters`.

What travels is decided by names, shapes and dtypes, which the ranks compare before anything is sent. `travelling` hands
out whole tensors to whoever writes them.

[Note: a batch of whole tensors]
Large tensors whose ranks' rows follow each other arrive where they stay, each in memory of its own, so that what was
received is what is handed out. Small ones arrive packed, and are copied out one at a time, when they are asked for. All
of a batch that is of one mesh is one exchange; what it takes is the received bytes that were not handed out yet, and
the copy that is being made. `_Batch` adds that up before it takes one more. A tensor that is cut at another dim than
the first arrives in runs of rows if it and its copy are more than the budget.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.arguments import Rule, checked
from fsdp2.checkpoint.copies import agree_on_copies
from fsdp2.checkpoint.held import Held, company_of, held_by, refuse_unreadable, settle
from fsdp2.checkpoint.ranks import Ranks
from fsdp2.checkpoint.rules import BYTES_RULE, is_int
from fsdp2.core.agreement import disagreement
from fsdp2.core.gather import Transfer
from fsdp2.core.layout import PACKED_ALIGNMENT_BYTES, align
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import FSDPParam
from fsdp2.core.places import label
from fsdp2.core.sharding import in_memory_order, in_shape, local_shard, place_rows
from fsdp2.core.streams import device_for
from fsdp2.core.transport import transport_of
from fsdp2.errors import FSDPError, FSDPValueError
from fsdp2.plugs.parameters.whole_tensors import unsharded_like

_RANK_OR_NONE = Rule(
    "a rank >= 0, or None",
    lambda value: value is None or (is_int(value) and value >= 0),
    lambda value: value is None or is_int(value),
)

_PACKED_BYTES = 256 << 10
"""Smaller tensors are packed: a message of their own would take longer than the copy."""

_ITERATES = "iter_full_parameters()"


@checked(budget_bytes=BYTES_RULE, rank=_RANK_OR_NONE)
def iter_full_parameters(
    model: nn.Module, *, budget_bytes: int = 256 << 20, dtype: torch.dtype | None = None, rank: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole parameters of ``model`` one after the other, with their names, several gathered at a time.

    For an inference engine, a file, a hash. Tied parameters come once, under their first name, in the order of the
    model, with names that no wrapper (torch.compile, activation checkpointing) has added to; those that nothing shards,
    too. Each is a plain tensor in memory of its own, on the device that its mesh computes on.

    Collective: all ranks must call it and iterate to the same place, outside of forward and backward. Arguments are
    checked, and ranks compared, in the call. Values are those of when they are gathered: write the parameters after.

    Takes no more memory than the budget beside the shards, or the largest parameter if that is larger, as long as the
    caller keeps none of those before; an eighth more for a large one that is cut at another dim than the first, and
    twice the parameter where tensor parallelism cuts it. As many parameters as fit travel in one exchange (for each
    mesh; `Owned` ones in a second); of the larger ones each has its own, and one that is cut by tensor parallelism.

    Args:
        model: sharded, or with sharded modules below, or neither.
        budget_bytes: of all that is gathered at a time.
        dtype: of floating-point parameters, which are cast before they are sent.
        rank: the only rank of all that is given parameters; the iterators of the others are empty, but send theirs
            when they are asked. None: all are.

    Raises:
        FSDPTypeError: not a module, an int or a dtype.
        FSDPValueError: a ``rank`` that does not hold ``model``, a budget of nothing, a ``dtype`` of no floats.
        FSDPRuntimeError: inside of a forward or backward, or of `full_parameters`; something on meta; the ranks differ.
            On all ranks alike.
        FSDPNotImplementedError: a parameter that is a tensor subclass.

    Stream: the current one.
    """
    refuse_dtype(dtype, _ITERATES)
    error = settle(model, _ITERATES, frees=False)
    held = [each for each in held_by(model) if not each.is_buffer]
    _, ranks = company_of(held)
    if error is None:
        error = _refusal(held, rank, ranks)
    lines = [f"{_ITERATES} with budget_bytes={budget_bytes}, dtype={dtype}, rank={rank}"]
    lines += [f"{each.name} {each.described}" for each in held]
    agree_on_copies(held, ranks, error, lines, _ITERATES)
    return travelling([(each.name, each) for each in held], budget_bytes, dtype=dtype, rank=rank)


def refuse_dtype(dtype: torch.dtype | None, caller: str) -> None:
    """Only floating-point tensors are cast, to a dtype of the same kind.

    Raises:
        FSDPValueError: to another.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise FSDPValueError(f"{caller} casts floating-point tensors to another such dtype, got dtype={dtype}.")


def _refusal(held: Sequence[Held], rank: int | None, ranks: Ranks) -> FSDPError | None:
    try:
        refuse_unreadable(held, _ITERATES, meta=True)
        if rank is not None and rank not in ranks.numbers:
            raise FSDPValueError(f"{_ITERATES} got rank={rank}, and the model is on the ranks {ranks.numbers}.")
    except FSDPError as error:
        return error
    return None


def travelling(
    wanted: Sequence[tuple[str, Held]], budget_bytes: int, *, dtype: torch.dtype | None, rank: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole of every tensor with the name it is given, as `iter_full_parameters` has it; nothing is compared.

    Collective: all ranks that hold them must iterate to the same place.
    """
    gets = rank is None or not dist.is_initialized() or dist.get_rank() == rank
    routes = [_route(name, held, dtype, budget_bytes) for name, held in wanted]
    _meet(routes, rank)
    for batch in _batches(routes, budget_bytes):
        received = _received(batch, rank)
        for route in batch:
            whole = _handed_out(route, received.pop(route, None), rank, gets=gets)
            if whole is not None:
                name = route.name
                yield name, whole
            del whole


_MET: WeakSet[dist.ProcessGroup] = WeakSet()


def _meet(routes: Sequence[_Route], rank: int | None) -> None:
    """All ranks of a process group take part in what is exchanged there first.

    NCCL makes its communicator then, and waits for all of them; messages are for those that have rows. Collective over
    each of the groups, once.
    """
    sent = [route for route in routes if route.way is _Way.SENT and _receiver(route, rank).is_here]
    for mesh in {route.mesh.key: route.mesh for route in sent}.values():
        if mesh.shard_group is not None and mesh.shard_group not in _MET:
            disagreement("", mesh.shard_group, mesh.device, "who exchanges whole tensors")
            _MET.add(mesh.shard_group)


class _Way(enum.Enum):
    """How a tensor becomes whole on this rank."""

    HERE = enum.auto()  # every rank has the whole
    DTENSOR = enum.auto()  # by DTensor: no group owns it
    DIRECT = enum.auto()  # with the batch, in memory of its own
    PACKED = enum.auto()  # with the batch, beside others
    SENT = enum.auto()  # with the batch, in messages from the ranks that have rows
    PIECES = enum.auto()  # some rows of all ranks at a time


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """How one tensor travels.

    Attributes:
        name: that it is handed out with.
        dtype: in which it travels.
        way: how.
        nbytes: of the whole, or of its part under tensor parallelism.
        slot_bytes: that every rank sends.
        piece_bytes: of all ranks together that are received at a time, if it travels in pieces.
        joins: tensor parallelism cuts it as well: it is made whole over those ranks, on all of them.
    """

    name: str
    held: Held
    dtype: torch.dtype
    way: _Way
    nbytes: int
    slot_bytes: int = 0
    piece_bytes: int = 0
    joins: bool = False

    @property
    def param(self) -> FSDPParam:
        """The sharded parameter, of what travels."""
        assert self.held.param is not None, "others do not travel"
        return self.held.param

    @property
    def mesh(self) -> DataParallelMesh:
        """Over which it travels."""
        return self.param.sharding.mesh

    @property
    def is_view(self) -> bool:
        """Whether what arrives is what is handed out."""
        in_order = self.way is _Way.DIRECT and self.param.sharding.partition.arrives_in_order
        return in_order or self.way is _Way.SENT

    @property
    def received_bytes(self) -> int:
        """With the batch, in memory of its own."""
        if self.way is _Way.SENT:
            return self.nbytes
        return self.mesh.shard_size * self.slot_bytes if self.way is _Way.DIRECT else 0

    @property
    def copied_bytes(self) -> int:
        """That are taken when it is handed out."""
        whole = self.held.tensor.numel() * self.dtype.itemsize
        copied = 0 if self.is_view else self.nbytes + self.piece_bytes
        return copied + 2 * whole if self.joins or self.way is _Way.DTENSOR else copied


def _route(name: str, held: Held, dtype: torch.dtype | None, budget: int) -> _Route:
    dtype = dtype if dtype is not None and held.tensor.dtype.is_floating_point else held.tensor.dtype
    param = held.param
    if param is None:
        cut = isinstance(held.tensor, DTensor)
        return _Route(name, held, dtype, _Way.DTENSOR if cut else _Way.HERE, held.local.numel() * dtype.itemsize)
    partition, mesh, spec = param.sharding.partition, param.sharding.mesh, param.sharding.unsharded_spec
    joins = spec is not None and any(
        not placement.is_replicate() and spec.mesh.size(dim) > 1 for dim, placement in enumerate(spec.placements)
    )
    size, nbytes = mesh.shard_size, partition.numel * dtype.itemsize
    slot = partition.outer * partition.rows(size) * partition.row_numel * dtype.itemsize
    piece = 0
    if size == 1 or partition.dim is None or not nbytes:
        way = _Way.HERE
    elif nbytes <= _PACKED_BYTES and size * slot <= budget // 16:
        way = _Way.PACKED
    elif partition.owner is not None:
        way = _Way.SENT
    elif partition.arrives_in_order:
        padding = size * slot - nbytes
        way = _Way.DIRECT if 8 * padding <= nbytes else _Way.SENT
    elif size * slot + nbytes <= budget:
        way = _Way.DIRECT
    else:
        way, piece = _Way.PIECES, max(budget - nbytes, nbytes // 8)
    return _Route(name, held, dtype, way, nbytes, slot, piece, joins)


class _Batch:
    """Tensors that travel together. See [Note: a batch of whole tensors].

    Attributes:
        routes: in the order in which they are handed out.
    """

    def __init__(self, budget: int) -> None:
        self.routes: list[_Route] = []
        self._budget = budget
        self._packed: dict[Any, int] = {}
        self._received = self._handed_out = self._peak = 0

    def takes(self, route: _Route) -> bool:
        """Take it, if all fit into the budget then; the first always."""
        received = route.received_bytes
        slot = align(route.slot_bytes, PACKED_ALIGNMENT_BYTES) if route.way is _Way.PACKED else 0
        grown = received + slot * (route.mesh.shard_size if slot else 0)
        live = self._received + grown - self._handed_out
        peak = max(self._peak + grown, live + route.copied_bytes)
        if self.routes and peak > self._budget:
            return False
        self.routes.append(route)
        self._received, self._peak = self._received + grown, peak
        self._handed_out += received
        return True


def _batches(routes: Iterable[_Route], budget: int) -> Iterator[list[_Route]]:
    batch = _Batch(budget)
    for route in routes:
        if not batch.takes(route):
            yield batch.routes
            batch = _Batch(budget)
            batch.takes(route)
    if batch.routes:
        yield batch.routes


class _Arrived(NamedTuple):
    """What came of one tensor: from byte ``offset`` on of each row of ``of_ranks`` (world_size, n)."""

    of_ranks: torch.Tensor
    offset: int


def _received(batch: Sequence[_Route], rank: int | None) -> dict[_Route, _Arrived]:
    """Exchange what travels together: one exchange for each mesh. Empty on ranks that get nothing."""
    by_mesh: dict[Any, list[_Route]] = {}
    for route in batch:
        if route.way in (_Way.DIRECT, _Way.PACKED, _Way.SENT):
            by_mesh.setdefault((route.mesh.key, route.joins), []).append(route)
    arrived: dict[_Route, _Arrived] = {}
    for routes in by_mesh.values():
        members = [[(route, 0)] for route in routes if route.way is _Way.DIRECT]
        end, packed = 0, list[tuple[_Route, int]]()
        for route in routes:
            if route.way is _Way.PACKED:
                packed.append((route, end))
                end += align(route.slot_bytes, PACKED_ALIGNMENT_BYTES)
        sizes = [member[0][0].slot_bytes for member in members]
        if packed:
            members.append(packed)
            sizes.append(end)
        sent = [(nbytes, _filling(member)) for nbytes, member in zip(sizes, members, strict=True)]
        outputs = _exchange(routes[0].mesh, sent, _receiver(routes[0], rank)) if sent else []
        for member, output in zip(members, outputs, strict=False):
            arrived.update({route: _Arrived(output, offset) for route, offset in member})
        arrived |= _sent_together([route for route in routes if route.way is _Way.SENT], rank)
    return arrived


def _sent_together(routes: Sequence[_Route], rank: int | None) -> dict[_Route, _Arrived]:
    """Of one mesh: all messages at a time."""
    arrived: dict[_Route, _Arrived] = {}
    messages: list[_Message] = []
    with torch.inference_mode(False), torch.no_grad():
        for route in routes:
            receiver = _receiver(route, rank)
            if receiver.is_here:
                whole, own = _sent(route, receiver)
                messages += own
                if whole is not None:
                    arrived[route] = _Arrived(whole, 0)
        if messages and routes[0].mesh.shard_group is not None:
            _deliver(messages, routes[0].mesh.shard_group)
    return arrived


def _filling(member: Sequence[tuple[_Route, int]]) -> Callable[[torch.Tensor], None]:
    """What writes this rank's parts to where the member lies in what it sends."""

    def fill(slot: torch.Tensor) -> None:
        for route, offset in member:
            local, partition = route.held.local, route.param.sharding.partition
            lies = slot[offset : offset + local.numel() * route.dtype.itemsize].view(route.dtype)
            lies.as_strided(local.shape, partition.stride(local.shape), lies.storage_offset()).copy_(local)

    return fill


class _Receiver(NamedTuple):
    """Who gets what is exchanged over a process group.

    Attributes:
        place: of the rank in the group; None: all do.
        is_here: whether the exchange takes place over this rank's group.
    """

    place: int | None
    is_here: bool = True


def _receiver(route: _Route, rank: int | None) -> _Receiver:
    group = route.mesh.shard_group
    if rank is None or route.joins or group is None:
        return _Receiver(None)
    ranks = dist.get_process_group_ranks(group)
    return _Receiver(ranks.index(rank)) if rank in ranks else _Receiver(None, is_here=False)


def _exchange(
    mesh: DataParallelMesh, members: Sequence[tuple[int, Callable[[torch.Tensor], None]]], receiver: _Receiver
) -> list[torch.Tensor]:
    """Gather members of so many bytes of each rank, which a function writes: (world_size, n) of each, to who gets it.

    Collective over the shards of ``mesh``.
    """
    group, size, place = mesh.shard_group, mesh.shard_size, mesh.shard_rank
    if not receiver.is_here or group is None:
        return []
    gets = receiver.place in (None, place)
    outputs, transfers = [], list[Transfer]()
    with torch.inference_mode(False), torch.no_grad():
        for nbytes, fill in members:
            output = torch.empty((size if gets else 1, nbytes), dtype=torch.uint8, device=mesh.device)
            own = output[place if gets else 0]
            fill(own)
            outputs.append(output)
            transfers.append((output.view(-1), own))
        if receiver.place is None:
            works: list[Any] | None = None if device_for(mesh.device).has_streams else []
            transport_of(group, mesh.device, label=label("an exchange of whole tensors")).all_gather(transfers, works)
            for work in works or ():
                work.wait()
        elif gets:
            sources = [each for each in range(size) if each != place]
            _deliver([_Message(output[each], each, True) for output in outputs for each in sources], group)
        else:
            _deliver([_Message(output[0], receiver.place, False) for output in outputs], group)
    return outputs if gets else []


class _Message(NamedTuple):
    """What is sent to the rank ``peer`` of a process group, or ``arrives`` from it."""

    tensor: torch.Tensor
    peer: int
    arrives: bool


def _deliver(messages: Sequence[_Message], group: dist.ProcessGroup) -> None:
    """Send and receive all of them, and wait. Two ranks have those between them in the same order."""
    operations = [
        dist.P2POp(dist.irecv if arrives else dist.isend, tensor, group=group, group_peer=peer)
        for tensor, peer, arrives in messages
        if tensor.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _handed_out(route: _Route, arrived: _Arrived | None, rank: int | None, *, gets: bool) -> torch.Tensor | None:
    """The whole; None on ranks that get nothing. Collective, where it did not travel with the batch."""
    receiver = _receiver(route, rank) if route.held.param is not None else _Receiver(None)
    with torch.inference_mode(False), torch.no_grad():
        if route.way is _Way.HERE:
            whole = _copied(route) if gets or route.joins else None
        elif route.way is _Way.DTENSOR:
            whole = _full(route.held.tensor.detach(), route.dtype)
        elif route.way is _Way.PIECES:
            whole = _in_pieces(route, receiver)
        else:
            whole = None if arrived is None else _unpacked(route, arrived)
        if route.joins:
            assert whole is not None, "all have their parts"
            whole = _full(unsharded_like(whole, route.param.sharding), route.dtype)
    return whole if gets else None


def _full(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole of a DTensor, in memory of its own."""
    tensor = tensor.to(dtype)
    assert isinstance(tensor, DTensor), "others are whole"
    whole = tensor.full_tensor()
    local = _torch.local_of(tensor)
    return whole.clone() if whole.data_ptr() == local.data_ptr() else whole


def _copied(route: _Route) -> torch.Tensor:
    local, param = route.held.local, route.held.param
    device = local.device if param is None else param.sharding.mesh.device
    shape = tuple(local.shape)
    if param is not None:
        shape, stride = param.sharding.partition.shape, param.sharding.partition.stride(param.sharding.partition.shape)
    else:
        stride = torch.empty_like(local, device="meta").stride()  # without gaps
    whole = torch.empty_strided(shape, stride, dtype=route.dtype, device=device)
    return whole.copy_(local.reshape(shape)) if whole.numel() else whole


def _unpacked(route: _Route, arrived: _Arrived) -> torch.Tensor:
    """From (world_size, n) of all ranks; a view of them if that is what was received for it alone."""
    partition, size, itemsize = route.param.sharding.partition, route.mesh.shard_size, route.dtype.itemsize
    if route.way is _Way.SENT:
        return in_shape(arrived.of_ranks, partition)
    of_ranks = arrived.of_ranks[:, arrived.offset : arrived.offset + route.slot_bytes].view(route.dtype)
    rows = partition.rows(size)
    if route.way is _Way.DIRECT and route.is_view:
        return place_rows(of_ranks, partition, rows)
    stride = partition.stride(partition.shape)
    whole = torch.empty_strided(partition.shape, stride, dtype=route.dtype, device=of_ranks.device)
    for place in range(size):
        shape = partition.local_shape(rows, place)
        start, stop = partition.part(rows, place)
        if stop > start and partition.dim is not None:
            row = of_ranks[place]
            part = row.as_strided(shape, partition.stride(shape), row.storage_offset())
            local_shard(whole, partition, rows, place).copy_(part)
    assert of_ranks.element_size() == itemsize, "it was sent in this dtype"
    return whole


def _sent(route: _Route, receiver: _Receiver) -> tuple[torch.Tensor | None, list[_Message]]:
    """Memory for the whole, in memory order, on ranks that get it; and the messages that fill it.

    Each rank's rows go from it to who gets them, to where they stay: they follow each other, or one rank has all.
    """
    mesh, partition = route.mesh, route.param.sharding.partition
    rows, place = partition.rows(mesh.shard_size), mesh.shard_rank
    gets = receiver.place in (None, place)
    local = in_memory_order(route.held.local, partition).reshape(-1)
    bounds = [
        [each * partition.outer * partition.row_numel for each in partition.part(rows, peer)]
        for peer in range(mesh.shard_size)
    ]
    if not gets:
        own = local.to(mesh.device, route.dtype).view(torch.uint8)
        return None, [_Message(own, receiver.place or 0, arrives=False)]
    whole = torch.empty(partition.numel, dtype=route.dtype, device=mesh.device)
    start, stop = bounds[place]
    whole[start:stop].copy_(local)
    parts = [whole[first:last].view(torch.uint8) for first, last in bounds]
    others = [peer for peer in range(mesh.shard_size) if peer != place]
    messages = [_Message(parts[peer], peer, arrives=True) for peer in others]
    if receiver.place is None:
        messages += [_Message(parts[place], peer, arrives=False) for peer in others]
    return whole, messages


def _in_pieces(route: _Route, receiver: _Receiver) -> torch.Tensor | None:
    """Of a tensor that is cut at a dim behind others: some entries of these at a time, of all ranks."""
    mesh, partition, itemsize = route.mesh, route.param.sharding.partition, route.dtype.itemsize
    if not receiver.is_here:
        return None
    size, outer, rows = mesh.shard_size, partition.outer, partition.rows(mesh.shard_size)
    width = rows * partition.row_numel
    together = max(1, route.piece_bytes // (size * width * itemsize))
    gets = receiver.place in (None, mesh.shard_rank)
    whole = torch.empty(partition.numel if gets else 0, dtype=route.dtype, device=mesh.device)
    lines = whole.view(outer, -1) if gets else whole
    local = in_memory_order(route.held.local, partition).reshape(outer, -1)
    for start in range(0, outer, together):
        stop = min(start + together, outer)

        def fill(slot: torch.Tensor, start: int = start, stop: int = stop) -> None:
            own = local[start:stop]
            slot[: own.numel() * itemsize].view(route.dtype).view(own.shape).copy_(own)

        outputs = _exchange(mesh, [((stop - start) * width * itemsize, fill)], receiver)
        if outputs:
            _put(outputs[0], lines[start:stop], route)
        del outputs  # before the next are received
    return in_shape(whole, partition) if gets else None


def _put(of_ranks: torch.Tensor, lines: torch.Tensor, route: _Route) -> None:
    """Copy what all ranks have sent, (world_size, bytes), to some ``lines`` (n, entries behind) of the whole."""
    partition, size = route.param.sharding.partition, route.mesh.shard_size
    rows = partition.rows(size)
    for place in range(size):
        first, last = (each * partition.row_numel for each in partition.part(rows, place))
        nbytes = lines.shape[0] * (last - first) * route.dtype.itemsize
        if nbytes:
            lines[:, first:last].copy_(of_ranks[place, :nbytes].view(route.dtype).view(lines.shape[0], -1))
