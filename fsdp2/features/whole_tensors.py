"""Whole tensors from this rank's shards, of many tensors at once: for what happens rarely, outside any plan.

Knows that the ranks hold, in their order, the rows (or blocks of rows) of the dim that is cut, the last ones fewer; or
that one rank has the whole. One all-gather brings them. Unlike the engine's gathers it keeps no buffer and copies
everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.layout import PACKED_ALIGNMENT_BYTES, Region, align, byte_start
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import Link
from fsdp2.core.sharding import Partition, Sharding
from fsdp2.core.transport import transport_of


class Part(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        local: its entries of the dim that is cut, fewer (or none) on the last ranks.
        partition: of the whole.
    """

    local: torch.Tensor
    partition: Partition

    def padded_shape(self, world_size: int) -> tuple[int, ...]:
        """The shape of what every rank sends: the first has most. Of an owned one, what its owner sends."""
        return self.partition.local_shape(self.partition.rows(world_size), self.partition.owner or 0)


def whole_tensors(parts: Sequence[Part], mesh: DataParallelMesh) -> list[torch.Tensor]:
    """The whole of every tensor, on the device and in the dtype of its part. One all-gather of everything, as bytes.

    Collective: all ranks of ``mesh`` must call it, with parts of the same tensors.
    """
    if mesh.shard_size == 1:
        return [part.local.clone() for part in parts]
    shapes = [part.padded_shape(mesh.shard_size) for part in parts]
    offsets, end = _offsets(parts, shapes, mesh.shard_size)
    sent = torch.zeros(end, dtype=torch.uint8, device=mesh.device)
    for part, shape, offset in zip(parts, shapes, offsets, strict=True):
        dim, owner = part.partition.dim, part.partition.owner
        if owner is None or owner == mesh.shard_rank:
            slot = _slot(sent, offset, shape, part.local.dtype)
            (slot if dim is None else slot.narrow(dim, 0, part.local.shape[dim])).copy_(part.local)
    received = sent.new_empty(mesh.shard_size * end)
    transport_of(mesh.shard_group, mesh.device).all_gather([(received, sent)], None)
    of_ranks = received.view(mesh.shard_size, end).unbind()
    wholes = []
    for part, shape, offset in zip(parts, shapes, offsets, strict=True):
        partition = part.partition
        senders = of_ranks if partition.owner is None else [of_ranks[partition.owner]]
        pieces = [_slot(of_rank, offset, shape, part.local.dtype) for of_rank in senders]
        padded = pieces[0] if partition.dim is None else torch.cat(pieces, partition.dim)
        whole = torch.empty_strided(
            partition.shape, partition.stride(partition.shape), dtype=part.local.dtype, device=part.local.device
        )
        wholes.append(whole.copy_(padded if partition.dim is None else padded.narrow(partition.dim, 0, partition.size)))
    return wholes


def _offsets(parts: Sequence[Part], shapes: Sequence[tuple[int, ...]], world_size: int) -> tuple[list[int], int]:
    """Where each part begins in what its rank sends, and the length of that, in bytes; owned ones are at the end."""
    sizes = [math.prod(shape) * part.local.element_size() for part, shape in zip(parts, shapes, strict=True)]
    owners = [part.partition.owner for part in parts]
    region = Region.build(owners, sizes, world_size=world_size, alignment=PACKED_ALIGNMENT_BYTES)
    offsets, end = [0] * len(parts), 0
    for index, (owner, size) in enumerate(zip(owners, sizes, strict=True)):
        if owner is None:
            offsets[index] = byte_start(end, size, parts[index].local.element_size())
            end = offsets[index] + size
    end = align(end, PACKED_ALIGNMENT_BYTES)  # every rank's elements lie as those of the first do
    for index, place in enumerate(region.offsets):
        if place is not None:
            offsets[index] = end + (place % region.capacity if region.capacity else 0)
    return offsets, end + region.capacity


def _slot(flat: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return flat[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def unsharded_like(whole: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """``whole`` as it was before sharding: itself, or a DTensor of tensor parallelism."""
    spec = sharding.unsharded_spec
    return whole if spec is None else _torch.make_dtensor(whole, _torch.spec_with_dtype(spec, whole.dtype))


class Former(NamedTuple):
    """What is kept of a parameter that was sharded and is whole again, for optimizers that were built on it.

    Attributes:
        sharding: how it was sharded.
    """

    sharding: Sharding

    def gathered(self, state: Any) -> Any:
        """An optimizer's ``state`` of the parameter, with every tensor that is sharded like it made whole.

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
        wholes = whole_tensors(parts, sharding.mesh) if parts else []
        made = {key: unsharded_like(whole, sharding) for key, whole in zip(sharded, wholes, strict=True)}
        return {key: made.get(key, value) for key, value in state.items()}


def note_former_sharding(parameter: torch.Tensor, former: Former) -> None:
    """Note how ``parameter`` was sharded, which belongs to no group any more."""
    parameter._fsdp_former = Link(former)  # type: ignore[attr-defined]


def former_of(parameter: torch.Tensor) -> Former | None:
    """What `note_former_sharding` noted on ``parameter``, if it did."""
    link: Link[Former] | None = getattr(parameter, "_fsdp_former", None)
    return None if link is None else link.target
