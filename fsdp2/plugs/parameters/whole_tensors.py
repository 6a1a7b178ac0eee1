"""Full tensors from this rank's shards, many at once: for what happens rarely, outside of any plan.

One exchange gathers all of them. Large tensors that are split evenly arrive in place, the others packed as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.buffers import on_the_wire
from fsdp2.core.gather import Transfer
from fsdp2.core.layout import DIRECT_THRESHOLD_BYTES, PACKED_ALIGNMENT_BYTES, Region, align, byte_start
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import Link
from fsdp2.core.sharding import Partition, Sharding, in_memory_order, local_shard, place_rows
from fsdp2.core.streams import device_for
from fsdp2.core.transport import transport_of


class Part(NamedTuple):
    """This rank's shard of a tensor.

    Attributes:
        local: its entries of the dim that is cut; the last ranks have fewer, or none.
        partition: how the full tensor is split.
    """

    local: torch.Tensor
    partition: Partition

    def room(self, world_size: int) -> int:
        """How many elements every rank sends: as many as the first rank has, or the owner of an owned tensor."""
        partition = self.partition
        return partition.outer * partition.rows(world_size) * partition.row_numel

    def is_sent_by_owner(self) -> bool:
        """Whether one rank has all of it, and it is worth a message of its own."""
        nbytes = self.partition.numel * self.local.element_size()
        return self.partition.owner is not None and nbytes >= DIRECT_THRESHOLD_BYTES

    def arrives_in_place(self, world_size: int, itemsize: int) -> bool:
        """Whether it is large, and the ranks' shards, one after the other, are the full tensor in memory."""
        partition = self.partition
        return (
            partition.numel * itemsize >= DIRECT_THRESHOLD_BYTES
            and partition.arrives_in_order
            and partition.owner is None
            and not partition.order
            and partition.rows(world_size) * world_size == partition.size
        )


def whole_tensors(
    parts: Sequence[Part], mesh: DataParallelMesh, *, device: torch.device | None = None, only: int | None = None
) -> list[torch.Tensor]:
    """Gather every tensor in full, in the dtype of its part, into memory of its own. One exchange for all of them.

    Collective: all ranks that ``mesh`` shards over must call it, with parts of the same tensors.

    Args:
        parts: one for each tensor.
        mesh: the mesh that they are sharded over.
        device: the device of the results; by default the device of each part.
        only: only this one of these ranks gets them. The others get an empty list, and allocate nothing but what they
            send, and large tensors that one rank owns, which are broadcast.
    """
    if mesh.shard_size == 1:
        return [_alone(part).to(device or part.local.device, copy=True) for part in parts]
    wholes = {index: _from_owner(part, mesh) for index, part in enumerate(parts) if part.is_sent_by_owner()}
    if only is not None:
        rest = _on_one([part for index, part in enumerate(parts) if index not in wholes], mesh, device, only)
        return _in_order(parts, wholes, rest, device) if mesh.shard_rank == only else []
    members: list[Transfer] = []
    for index, part in enumerate(parts):
        if part.arrives_in_place(mesh.shard_size, part.local.element_size()):
            wholes[index] = _empty(part, mesh.device)
            sent_whole = part.local.to(mesh.device).contiguous().view(-1)
            members.append((on_the_wire(wholes[index].view(-1)), on_the_wire(sent_whole)))
    packed = [part for index, part in enumerate(parts) if index not in wholes]
    sent, offsets = _pack(packed, mesh)
    received = sent.new_empty(mesh.shard_size * sent.numel())
    if packed:
        members.append((received, sent))
    # Without streams collectives are asynchronous works, which are waited for below.
    works: list[Any] | None = None if device_for(mesh.device).has_streams else []
    transport_of(mesh.shard_group, mesh.device).all_gather(members, works)
    for work in works or ():
        work.wait()
    return _in_order(parts, wholes, _unpack(packed, received, offsets, mesh, device), device)


def _in_order(
    parts: Sequence[Part], wholes: Mapping[int, torch.Tensor], rest: Sequence[torch.Tensor], device: torch.device | None
) -> list[torch.Tensor]:
    others = iter(rest)
    return [
        wholes[index].to(device or part.local.device) if index in wholes else next(others)
        for index, part in enumerate(parts)
    ]


def _from_owner(part: Part, mesh: DataParallelMesh) -> torch.Tensor:
    """A broadcast: an all-gather would take as much from every rank."""
    whole, owner = _empty(part, mesh.device), part.partition.owner
    if mesh.shard_rank == owner:
        whole.copy_(part.local.view(whole.shape))
    flat = in_memory_order(whole, part.partition).view(-1)
    dist.broadcast(on_the_wire(flat), group=mesh.shard_group, group_src=owner)
    return whole


def _on_one(
    parts: Sequence[Part], mesh: DataParallelMesh, device: torch.device | None, place: int
) -> list[torch.Tensor]:
    sent, offsets = _pack(parts, mesh)
    gets = mesh.shard_rank == place
    received = sent.new_empty(mesh.shard_size * sent.numel() if gets else 0)
    into = list(received.view(mesh.shard_size, -1).unbind()) if gets else None
    dist.gather(sent, into, group=mesh.shard_group, group_dst=place)
    return [] if into is None else _unpack(parts, received, offsets, mesh, device)


def _alone(part: Part) -> torch.Tensor:
    """The full tensor, for a part of which this rank has all."""
    return part.local.view(part.partition.shape) if part.partition.leading > 1 else part.local


def _empty(part: Part, device: torch.device | None = None) -> torch.Tensor:
    """Memory for the full tensor."""
    partition, local = part.partition, part.local
    stride = partition.stride(partition.shape)
    return torch.empty_strided(partition.shape, stride, dtype=local.dtype, device=device or local.device)


def _pack(parts: Sequence[Part], mesh: DataParallelMesh) -> tuple[torch.Tensor, list[int]]:
    """The bytes that this rank sends, and the offset at which each part begins in them."""
    offsets, end = _offsets(parts, mesh.shard_size)
    sent = torch.zeros(end, dtype=torch.uint8, device=mesh.device)
    for part, offset in zip(parts, offsets, strict=True):
        local = part.local
        lies = _slots(sent, offset, local.numel(), local.dtype)
        lies.as_strided(local.shape, part.partition.stride(local.shape), lies.storage_offset()).copy_(local)
    return sent, offsets


def _unpack(
    parts: Sequence[Part],
    received: torch.Tensor,
    offsets: Sequence[int],
    mesh: DataParallelMesh,
    device: torch.device | None,
) -> list[torch.Tensor]:
    """The full tensors, from the bytes that all ranks have sent, one rank after the other."""
    of_ranks = received.view(mesh.shard_size, -1)
    return [
        _placed(part, _slots(of_ranks, offset, part.room(mesh.shard_size), part.local.dtype), mesh.shard_size, device)
        for part, offset in zip(parts, offsets, strict=True)
    ]


def _placed(part: Part, of_ranks: torch.Tensor, world_size: int, device: torch.device | None) -> torch.Tensor:
    """The full tensor in memory of its own, on ``device`` or that of its part, from (world_size, n) of all ranks."""
    partition, whole = part.partition, _empty(part, device)
    if not whole.numel():
        return whole
    rows = partition.rows(world_size)
    if partition.owner is not None:
        of_ranks = of_ranks[partition.owner : partition.owner + 1]
    elif partition.dim is not None and not partition.arrives_in_order:  # rank by rank, with no copy between
        for rank, row in enumerate(of_ranks):
            shape = partition.local_shape(rows, rank)
            if 0 not in shape:
                sent = row.as_strided(shape, partition.stride(shape), row.storage_offset())
                local_shard(whole, partition, rows, rank).copy_(sent)
        return whole
    return whole.copy_(place_rows(of_ranks, partition, rows))


def _offsets(parts: Sequence[Part], world_size: int) -> tuple[list[int], int]:
    """The offset of each part in what its rank sends, and the length of that, in bytes. Owned parts come last."""
    sizes = [part.room(world_size) * part.local.element_size() for part in parts]
    owners = [part.partition.owner for part in parts]
    region = Region.build(owners, sizes, world_size=world_size, alignment=PACKED_ALIGNMENT_BYTES)
    offsets, end = [0] * len(parts), 0
    for index, (owner, size) in enumerate(zip(owners, sizes, strict=True)):
        if owner is None:
            offsets[index] = byte_start(end, size, parts[index].local.element_size())
            end = offsets[index] + size
    end = align(end, PACKED_ALIGNMENT_BYTES)  # every rank's row is aligned as the first rank's is
    for index, place in enumerate(region.offsets):
        if place is not None:
            offsets[index] = end + (place % region.capacity if region.capacity else 0)
    return offsets, end + region.capacity


def _slots(flat: torch.Tensor, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """View ``numel`` elements of ``dtype`` from byte ``offset`` on, in each row of ``flat``."""
    return flat[..., offset : offset + numel * dtype.itemsize].view(dtype)


def unsharded_like(whole: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """``whole`` in the form that it had before sharding: itself, or a DTensor of tensor parallelism."""
    spec = sharding.unsharded_spec
    return whole if spec is None else _torch.make_dtensor(whole, _torch.spec_with_dtype(spec, whole.dtype))


class Former(NamedTuple):
    """How a parameter was sharded that is unsharded again: kept for optimizers that were built on the sharded one.

    Attributes:
        sharding: how it was sharded.
    """

    sharding: Sharding

    def gathered(self, state: Any, device: torch.device) -> Any:
        """Unshard an optimizer's ``state`` of the parameter: tensors that are sharded like it, on ``device``.

        Collective over the mesh of ``sharding``, if there is such a tensor.
        """
        if not isinstance(state, dict):
            return state
        sharding, spec = self.sharding, self.sharding.spec
        sharded = {
            key: value
            for key, value in state.items()
            if isinstance(value, DTensor)
            and value.shape == spec.tensor_meta.shape
            and value.device_mesh == spec.mesh
            and tuple(value.placements) == tuple(spec.placements)
        }
        parts = [Part(_torch.local_of(value), sharding.partition) for value in sharded.values()]
        wholes = whole_tensors(parts, sharding.mesh, device=device) if parts else []
        made = {key: unsharded_like(whole, sharding) for key, whole in zip(sharded, wholes, strict=True)}
        return {key: made.get(key, value) for key, value in state.items()}


def note_former_sharding(parameter: torch.Tensor, former: Former) -> None:
    """Note how ``parameter``, which belongs to no group any more, was sharded."""
    parameter._fsdp_former = Link(former)  # type: ignore[attr-defined]


def former_of(parameter: torch.Tensor) -> Former | None:
    """What `note_former_sharding` has noted on ``parameter``; None without."""
    link: Link[Former] | None = getattr(parameter, "_fsdp_former", None)
    return None if link is None else link.target
