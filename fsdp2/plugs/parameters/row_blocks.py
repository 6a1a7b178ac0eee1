"""Rows that stay together: `RowBlocks`, for matrices that are stacks of heads, of experts, or of quantized blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.arguments import ANYTHING, checked_class
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.sharding import PartitionKey, RowPlacement, Wanted, cuts
from fsdp2.errors import FSDPTypeError, FSDPValueError


@checked_class(rows=ANYTHING)
@dataclass(frozen=True, slots=True)
class RowBlocks(RowPlacement):
    """What a ``shard_placement_fn`` may return: shard dim 0 so that no block of ``rows`` rows is cut.

    n rows make ``ceil(n / rows)`` blocks, the last one maybe short. Each of W ranks has ``ceil(blocks / W)``, the last
    ranks fewer or none. Where ``torch.chunk`` would give every rank the same rows, the sharded parameter is the
    usual DTensor with ``Shard(0)``, else a `RaggedDTensor` with a `RaggedShard`. Every rank keeps room for as many rows
    as rank 0 has, so there should be at least as many blocks as ranks.

    Attributes:
        rows: the rows of a block, at least 1.

    Raises:
        FSDPTypeError: ``rows`` is no int.
        FSDPValueError: ``rows`` is less than 1.
    """

    form = "RowBlocks(rows)"
    rows: int

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or isinstance(self.rows, bool):
            raise FSDPTypeError(f"RowBlocks takes the rows of a block, an int, got {self.rows!r}.")
        if self.rows < 1:
            raise FSDPValueError(f"RowBlocks takes the rows of a block, at least 1, got {self.rows}.")

    @property
    def partition_key(self) -> PartitionKey:
        """Dim 0, in blocks."""
        return PartitionKey(0, block_rows=self.rows)

    def checked_for(self, parameter: nn.Parameter, fqn: str, mesh: DataParallelMesh) -> Wanted:
        """This placement, for any parameter that has rows."""
        if not parameter.dim():
            raise FSDPValueError(f"parameter '{fqn}' has no dims, so no rows that {self} could keep together.")
        return self

    def refuse_cut(self, parameter: DTensor, where: str) -> None:
        """Raise if tensor parallelism cuts dim 0 of ``parameter``: it may have cut a block."""
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if cuts(placement, 0) and mesh.size(axis) > 1:
                raise FSDPValueError(
                    f"{where} has placement {placement} in mesh dim {axis} of {mesh}: tensor parallelism has cut the "
                    f"rows that {self} is to keep together. Use RowBlocks for parameters that it cuts in another dim."
                )
