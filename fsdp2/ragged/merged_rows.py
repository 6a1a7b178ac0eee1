"""What `fully_shard` makes of a `BlockShard`, this package's or torch's: rows of merged dims, for stacks of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.sharding import OTHER_PLACEMENTS, PartitionKey, RowPlacement, Wanted
from fsdp2.errors import FSDPNotImplementedError, FSDPValueError
from fsdp2.ragged.placement import BlockShard, is_block_shard, own_block_shard


@dataclass(frozen=True, slots=True)
class MergedRows(RowPlacement):
    """The rows of the leading dims, merged: see `BlockShard`.

    Attributes:
        placement: that was asked for.
        leading: how many dims; 0 as long as no parameter is known.
    """

    form = "BlockShard.split_leading(shape, k)"
    placement: BlockShard
    leading: int = 0

    @property
    def partition_key(self) -> PartitionKey:
        """The leading dims together."""
        return PartitionKey(0, leading=self.leading)

    def checked_for(self, parameter: nn.Parameter, fqn: str, mesh: DataParallelMesh) -> Wanted:
        """This, if something is sharded at all."""
        try:
            leading = self.placement.leading(parameter.shape)
        except (FSDPValueError, FSDPNotImplementedError) as error:
            raise type(error)(f"the placement for parameter '{fqn}': {error}") from error
        if not _torch.plain_of(parameter.detach()).is_contiguous():
            raise FSDPValueError(
                f"parameter '{fqn}' of shape {tuple(parameter.shape)} is not contiguous (its strides are "
                f"{parameter.stride()}), so that its first {leading} dims cannot be merged to rows, as {self.placement} "
                "asks for: return Shard(i) or None for it, or make it contiguous before fully_shard."
            )
        if mesh.shard_group is None:  # nothing is sharded: every rank has the whole anyway
            return 0
        return MergedRows(self.placement, leading)

    def refuse_cut(self, parameter: DTensor, where: str) -> None:
        """Experts may have been dealt out evenly: then the rows of each rank's are."""
        mesh = parameter.device_mesh
        for axis, each in enumerate(parameter.placements):
            size = mesh.size(axis)
            if size == 1 or each.is_replicate():
                continue
            first = _torch.is_shard(each) and each.dim == 0  # type: ignore[attr-defined]
            if not first or hasattr(each, "split_factor") or parameter.shape[0] % size:
                raise FSDPValueError(
                    f"{where}, of shape {tuple(parameter.shape)}, has placement {each} in mesh dim {axis} of {mesh}, and "
                    f"is to be {self.placement}: beside that, another mesh dim may only have a Shard(0) that divides "
                    "dim 0 evenly, as of experts. Return Shard(i) or None for this parameter."
                )


def _merged_rows(answer: Any) -> MergedRows | None:
    return MergedRows(own_block_shard(answer)) if is_block_shard(answer) else None


OTHER_PLACEMENTS.append(_merged_rows)
