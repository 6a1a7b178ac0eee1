"""`PostForwardShards`: where parameters rest between forward and backward if they are resharded to fewer ranks.

Each of them keeps a larger part of every parameter, so that the all-gather in backward stays among neighbours: more
memory for less communication over slow links.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.core.buffers import Allocate, DtypeBuffers, Resizable, storage_alias
from fsdp2.core.gather import RESTS, Gather, Source
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import FSDPParam
from fsdp2.core.sharding import Partition, in_memory_order, local_shard, parameter_at_offset, post_forward_placement


class PostForwardShards:
    """The parts of a group's parameters that this rank keeps between forward and backward.

    Attributes:
        mesh: of the neighbours; also replicated over all such neighbourhoods.
        gather: from the parts to the unsharded buffers; None before `prepare`.
    """

    def __init__(self, mesh: DataParallelMesh) -> None:
        self.mesh = mesh
        self.gather: Gather | None = None
        self._sources: list[Source] = []
        self._parts: list[Resizable] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._params: list[FSDPParam] = []
        self._versions: list[tuple[int, int]] = []

    def prepare(self, buffers: Sequence[DtypeBuffers], device: torch.device, allocate: Allocate | None) -> None:
        """Lay out the parts, left without memory, and the parameters on them. The unsharded buffers have memory."""
        self._parts, self._copies, self._params, self._sources = [], [], [], []
        for each in buffers:
            layout = each.layout.over(self.mesh.shard_size, each.plan.param_dtype.itemsize)
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
        self.set_allocate(allocate, device)
        self.free()

    def let_go(self) -> None:
        """Forget the buffers, until the next `prepare`. Nothing rests here."""
        self._parts, self._copies, self._params, self._sources, self._versions = [], [], [], [], []
        self.gather = None

    def set_allocate(self, allocate: Allocate | None, device: torch.device) -> None:
        """Let the buffers of gathers come from ``allocate`` from now on. The unsharded buffers have memory."""
        sources, empty = self._sources, [part for part in self._parts if not part.storage.nbytes()]
        if allocate is not None:
            sources = [Source(each.buffers, each.shard, each.layout.all_packed()) for each in sources]
        for part in empty:
            part.allocate()
        self.gather = Gather(sources, self.mesh.shard_size, self.mesh.shard_rank, device, allocate)
        self.gather.free()
        for part in empty:
            part.free()

    def _parameter(self, local: torch.Tensor, param: FSDPParam, partition: Partition) -> nn.Parameter:
        sharded = param.sharded
        mesh, placements = post_forward_placement(param.sharding, partition, self.mesh.device_mesh)
        spec = _torch.make_spec(mesh, placements, sharded.shape, sharded.stride(), local.dtype)
        return parameter_at_offset(local, spec, requires_grad=sharded.requires_grad)

    def take(self) -> None:
        """Copy this rank's parts out of the unsharded buffers. On the current stream, which has read them.

        The gather from the parts follows: the unsharded buffers are freed next, for which it waits in any case.
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
        """A parameter that was written while it rested here, if there is one. After `take`."""
        for param, before, now in zip(self._params, self._versions, self._current_versions(), strict=True):
            if before != now:
                return param
        return None

    def free(self) -> None:
        """Free the parts, once they have been gathered."""
        for part in self._parts:
            part.free()


RESTS.fill(PostForwardShards)
