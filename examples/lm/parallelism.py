"""How the ranks are arranged: a mesh of replicate x shard x tp, of which only the axes asked for exist.

Eight ranks as 2 x 2 x 2, the data-parallel ranks being those that see a batch of their own:

    rank                 0  1    2  3   |   4  5    6  7
    tp                   0  1    0  1   |   0  1    0  1    a part of each matrix, the same batch
    shard                  0      1     |     0      1      a shard of each parameter
    replicate                 0         |        1          a copy of all shards
    data-parallel rank     0      1     |     2      3
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lm.errors import UserError


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How many copies of the shards there are, and over how many ranks each matrix is split."""

    replicate: int
    tp: int
    world_size: int

    def __post_init__(self) -> None:
        product = self.replicate * self.tp
        if self.world_size % product:
            raise UserError(
                f"--replicate {self.replicate} and --tp {self.tp} need a multiple of {product} ranks, and there are "
                f"{self.world_size}: start {math.ceil(self.world_size / product) * product}, or lower either option"
            )

    @property
    def shard(self) -> int:
        """Over how many ranks parameters, gradients and optimizer state are sharded."""
        return self.world_size // (self.replicate * self.tp)

    @property
    def data_world_size(self) -> int:
        """How many ranks see a batch of their own."""
        return self.world_size // self.tp

    def data_rank(self, rank: int) -> int:
        """Return which of the data-parallel ranks `rank` is; those of one `tp` group share it."""
        return rank // self.tp

    def describe(self) -> str:
        """Return what is done with the parameters, in words."""
        words = {
            f"sharded over {self.shard} ranks": self.shard,
            f"replicated over {self.replicate}": self.replicate,
            f"split over {self.tp} tensor-parallel ranks": self.tp,
        }
        return ", ".join(word for word, count in words.items() if count > 1) or "on one rank"


@dataclass(frozen=True, slots=True)
class Meshes:
    """What the libraries are given: `data` for `fully_shard`, `tp` for `parallelize_module`."""

    data: DeviceMesh
    """One axis, ("shard",), or two, ("replicate", "shard")."""
    tp: DeviceMesh | None


def make_meshes(arrangement: Arrangement, device_type: str) -> Meshes:
    """Make the process groups of all axes. A collective: every rank calls it.

    Both meshes are parts of one, so that a parameter split by both is one DTensor over all axes.
    """
    sizes = {"shard": arrangement.shard}
    if arrangement.replicate > 1:
        sizes = {"replicate": arrangement.replicate} | sizes
    data_axes = tuple(sizes)
    if arrangement.tp > 1:
        sizes["tp"] = arrangement.tp
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if arrangement.tp == 1:
        return Meshes(data=mesh, tp=None)
    # The norm of the gradients is summed over both axes: with a group for them together that is one all-reduce in
    # place of two, of which torch warns. The method has no public name yet (torch 2.15).
    mesh["shard", "tp"]._flatten()
    return Meshes(data=mesh[data_axes], tp=mesh["tp"])
