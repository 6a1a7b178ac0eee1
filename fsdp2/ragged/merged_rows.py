"""`MergedRows`: what `fully_shard` makes of a `BlockShard`, this package's or torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.sharding import OTHER_PLACEMENTS, PartitionKey, RowPlacement, Wanted
from fsdp2.errors import FSDPNotImplementedError, FSDPValueError
from fsdp2.ragged.dtensor import refuse_beside_blocks
from fsdp2.ragged.placement import BlockShard, is_block_shard, own_block_shard


@dataclass(frozen=True, slots=True)
class MergedRows(RowPlacement):
    """A parameter whose leading dims are merged to rows, which are sharded: see `BlockShard`.

    Attributes:
        placement: the placement that was asked for.
        leading: how many dims are merged; 0 as long as the parameter is not known.
    """

    form = "BlockShard.split_leading(shape, k)"
    placement: BlockShard
    leading: int = 0

    @property
    def partition_key(self) -> PartitionKey:
        """The leading dims, as one."""
        return PartitionKey(0, leading=self.leading)

    def checked_for(self, parameter: nn.Parameter, fqn: str, mesh: DataParallelMesh) -> Wanted:
        """This placement with its number of leading dims; or dim 0, where the mesh shards nothing."""
        try:
            leading = self.placement.leading(parameter.shape)
        except (FSDPValueError, FSDPNotImplementedError) as error:
            raise type(error)(f"the placement for parameter '{fqn}': {error}") from error
        if not _torch.plain_of(parameter.detach()).is_contiguous():
            raise FSDPValueError(
                f"parameter '{fqn}' of shape {tuple(parameter.shape)} is not contiguous (its strides are "
                f"{parameter.stride()}), so that {self.placement} cannot merge its first {leading} dims: return "
                "Shard(i) or None for it, or make it contiguous before fully_shard."
            )
        if mesh.shard_group is None:  # nothing is sharded: every rank has the whole anyway
            return 0
        return MergedRows(self.placement, leading)

    def refuse_cut(self, parameter: DTensor, where: str) -> None:
        """Raise if another mesh dim cuts it, except evenly in dim 0 (experts): each rank's part is merged then."""
        where = f"{where}, which is to be {self.placement},"
        refuse_beside_blocks(parameter.device_mesh, parameter.placements, parameter.shape, where)


def _merged_rows(answer: Any) -> MergedRows | None:
    return MergedRows(own_block_shard(answer)) if is_block_shard(answer) else None


OTHER_PLACEMENTS.append(_merged_rows)
