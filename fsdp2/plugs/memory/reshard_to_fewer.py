"""`PostForwardShards`: the shards between forward and backward, if parameters are resharded to fewer ranks.

Each of these neighbours keeps a larger part of every parameter, so that the all-gather in backward stays among them:
more memory for less communication over slow links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from fsdp2 import _torch
from fsdp2.core.buffers import Allocate, DtypeBuffers, Resizable, storage_alias
from fsdp2.core.gather import RESTS, Gather, Source, gather_between
from fsdp2.core.layout import BufferLayout, Slot, padded_row, shard_start, slot_in_region
from fsdp2.core.mesh import DataParallelMesh, HSDPMeshInfo
from fsdp2.core.param import FSDPParam
from fsdp2.core.sharding import (
    Partition,
    Sharding,
    in_memory_order,
    local_shard,
    parameter_at_offset,
    placement_of,
    strided_placement,
)
from fsdp2.errors import FSDPNotImplementedError

_SMALLER: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], DeviceMesh]] = WeakKeyDictionary()


def smaller_mesh(mesh: DataParallelMesh, size: int) -> DataParallelMesh:
    """The mesh of groups of ``size`` neighbours in ``mesh``, for resharding to fewer ranks after forward.

    Makes process groups, once for each process group of ``mesh`` and size. All ranks must call this, also those of
    other slices of the mesh that ``mesh`` is a slice of. Its dims that are not data parallel become the last dims of
    the mesh that the result is a slice of.

    Raises:
        FSDPNotImplementedError: ``mesh`` is a slice with flattened dims.
    """
    assert mesh.shard_group is not None, "something is sharded"
    known = _SMALLER.setdefault(mesh.shard_group, {})
    key = (mesh.replicate_size, size)
    if key not in known:
        known[key] = _neighbours(mesh.device_mesh, size)
    return DataParallelMesh.from_info(HSDPMeshInfo(known[key], shard_mesh_dim=1, replicate_mesh_dim=0))


def _neighbours(mesh: DeviceMesh, size: int) -> DeviceMesh:
    root, names = _torch.root_mesh(mesh), mesh.mesh_dim_names
    if root is None or root.size() == mesh.size():  # `mesh` has all ranks, so nothing else is to be sliced
        return DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size), mesh_dim_names=("replicate", "shard"))
    if names is None or root.mesh_dim_names is None or any(name not in root.mesh_dim_names for name in names):
        raise FSDPNotImplementedError(
            f"reshard_after_forward as an int is not supported on {mesh}, of which a dim was flattened from several of "
            f"{root}; pass True or False."
        )
    # The new mesh has all ranks of the root mesh, as every rank must take part when process groups are made.
    others = [name for name in root.mesh_dim_names if name not in names]
    order = [root.mesh_dim_names.index(name) for name in (*names, *others)]
    ranks = root.mesh.permute(order).reshape(-1, size, *(root.size(index) for index in order[len(names) :]))
    ours = (f"{names[-1]}_groups", f"{names[-1]}_neighbours")
    return DeviceMesh(root.device_type, ranks, mesh_dim_names=(*ours, *others))[ours]


class PostForwardShards:
    """The parts of a group's parameters that this rank keeps between forward and backward.

    Attributes:
        mesh: the neighbours, as shard dim; the neighbourhoods are its replicate dim.
        gather: the all-gather from these shards into the unsharded buffers; None before `prepare`.
    """

    def __init__(self, whole: DataParallelMesh, size: int) -> None:
        """Shard over ``size`` neighbours of ``whole``. Makes process groups: all ranks call it, see `smaller_mesh`."""
        self.mesh = smaller_mesh(whole, size)
        self.gather: Gather | None = None
        self._sources: list[Source] = []
        self._parts: list[Resizable] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._params: list[FSDPParam] = []
        self._versions: list[tuple[int, int]] = []

    def prepare(self, buffers: Sequence[DtypeBuffers], device: torch.device, allocate: Allocate | None) -> None:
        """Lay out these shards, without memory, and the parameters on them. The unsharded buffers must have memory."""
        self._parts, self._copies, self._params, self._sources = [], [], [], []
        for each in buffers:
            layout = layout_over(each.layout, self.mesh.shard_size, each.plan.param_dtype.itemsize)
            part = Resizable(torch.empty(layout.shard_numel, dtype=each.plan.param_dtype, device=device))
            for param, slot in zip(each.params, layout.slots, strict=True):
                partition, shape = slot.partition, slot.local_shape(self.mesh.shard_rank)
                local = storage_alias(part.flat, slot.shard_offset, shape, partition.stride(shape))
                whole = storage_alias(
                    each.unsharded.flat, slot.unsharded_offset, partition.shape, partition.stride(partition.shape)
                )
                if partition.dim is not None:
                    whole = local_shard(whole, partition, slot.rows, self.mesh.shard_rank)
                self._copies.append((in_memory_order(local, partition), in_memory_order(whole, partition)))
                self._params.append(param)
                param.rest_as(self._parameter(local, param, partition))
            self._sources.append(Source(each, part.flat, layout))
            self._parts.append(part)
        self.gather_with(allocate, device)
        self.free()

    def let_go(self) -> None:
        """Forget the buffers until the next `prepare`. No parameter is sharded here now."""
        self._parts, self._copies, self._params, self._sources, self._versions = [], [], [], [], []
        self.gather = None

    def gather_with(self, allocate: Allocate | None, device: torch.device) -> None:
        """Make the all-gather anew, with buffers from ``allocate``. The unsharded buffers must have memory."""
        # Making the gather takes views of the shards, which need memory for as long.
        empty = [part for part in self._parts if not part.storage.nbytes()]
        for part in empty:
            part.allocate()
        self.gather = gather_between(self.mesh, self._sources, device, allocate=allocate)
        self.gather.free()
        for part in empty:
            part.free()

    def _parameter(self, local: torch.Tensor, param: FSDPParam, partition: Partition) -> nn.Parameter:
        sharded = param.sharded
        mesh, placements = _rests_on(param.sharding, partition, self.mesh.device_mesh)
        spec = _torch.make_spec(mesh, placements, sharded.shape, sharded.stride(), local.dtype)
        return parameter_at_offset(local, spec, requires_grad=sharded.requires_grad)

    def take(self) -> None:
        """Copy this rank's shards out of the unsharded buffers. On the current stream, that of compute.

        The all-gather of backward needs no wait for these copies: its stream frees the unsharded buffers next, and
        waits for compute before it does.
        """
        for part in self._parts:
            part.allocate()
        if not self._copies:
            return
        with _torch.without_grad():
            _torch.foreach_copy([local for local, _ in self._copies], [whole for _, whole in self._copies])
        self._versions = self._current_versions()

    def _current_versions(self) -> list[tuple[int, int]]:
        version_of = _torch.version_of
        return [
            (version_of(param.post_forward), version_of(local))
            for param, (local, _) in zip(self._params, self._copies, strict=True)
            if param.post_forward is not None
        ]

    def changed(self) -> FSDPParam | None:
        """A parameter that was written since `take`, while it was sharded here; None if there is none."""
        for param, before, now in zip(self._params, self._versions, self._current_versions(), strict=True):
            if before != now:
                return param
        return None

    def free(self) -> None:
        """Free these shards, once backward has gathered them."""
        for part in self._parts:
            part.free()


def _rests_on(
    sharding: Sharding, partition: Partition, neighbours: DeviceMesh
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of a parameter of ``sharding`` between forward and backward.

    ``partition``: how it is sharded over the second dim of ``neighbours``, (groups, neighbours).
    """
    spec, names, size = sharding.unsharded_spec, neighbours.mesh_dim_names, neighbours.size(1)
    alone = (Replicate(), placement_of(partition, size))
    if spec is None:
        return neighbours, alone
    whole = _torch.root_mesh(neighbours)
    assert whole is not None and whole.mesh_dim_names is not None and names is not None, "named dims"
    # Dims of tensor parallelism stay as they are, behind (groups, neighbours).
    others = [name for name in spec.mesh.mesh_dim_names if name in whole.mesh_dim_names]
    kept = tuple(spec.placements[spec.mesh.mesh_dim_names.index(name)] for name in others)
    if not others:
        return neighbours, alone
    mesh = whole[tuple([*names, *others])]
    return mesh, (Replicate(), strided_placement(partition, size, mesh[tuple(others)], kept), *kept)


def layout_over(layout: BufferLayout, world_size: int, itemsize: int) -> BufferLayout:
    """The layout of the same unsharded buffer, sharded over ``world_size`` ranks: a divisor of ``layout.world_size``.

    One rank then owns what several owned before.
    """
    moved: dict[int, Slot] = {}
    offset = packed_numel = 0
    # Packed slots come first, then direct ones, each kind in the order of the unsharded buffer.
    for wanted in (False, True):
        for index, slot in sorted(enumerate(layout.carried), key=lambda pair: pair[1].unsharded_offset):
            if slot.direct is wanted:
                shard = replace(slot, rows=slot.partition.rows(world_size))
                offset = shard_start(offset, shard.shard_numel, direct=wanted, itemsize=itemsize)
                moved[index] = replace(shard, shard_offset=offset)
                offset += shard.shard_numel
        if not wanted:
            packed_numel = offset = padded_row(offset, itemsize)
    carried = iter([moved[index] for index in range(len(moved))])
    # Owned parameters share a region, which is the last slot that is carried.
    region = None if layout.region is None else moved[len(moved) - 1]
    placed = []
    for slot in layout.slots:
        if region is not None and slot.partition.owner is not None:
            partition = slot.partition.over_fewer(layout.world_size, world_size)
            placed.append(slot_in_region(partition, region, slot.unsharded_offset))
        else:
            placed.append(next(carried))
    return BufferLayout(
        world_size, tuple(placed), packed_numel, padded_row(offset, itemsize), layout.unsharded_numel, region
    )


RESTS.fill(PostForwardShards)
