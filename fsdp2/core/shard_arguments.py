"""`ShardArguments`: the arguments of a `fully_shard` call on a module, and what differs in those of another call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fsdp2.core.buffers import Offloading
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.options import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, PolicyFunction

Strategy = Literal["replicate", "zero1", "zero2", "zero3"]
"""A ZeRO stage by name; ``"replicate"`` is distributed data parallelism."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardArguments:
    """The validated arguments of one `fully_shard` call.

    Attributes:
        mesh: with ``dp_mesh_dims`` worked in.
        reshard_after_forward: whether, and to how many ranks if not to all.
        shard_placement_fn: as it was passed.
        mp_policy: ours, also where torch's was passed.
        offload_policy: the same.
        ignored_params: those below the module.
        strategy: as it was passed.
        replicate_below: as it was passed.
        grouping: of a model that `auto_shard` was called on: how it chose groups, its arguments by name. No argument of
            `fully_shard`.
    """

    mesh: DataParallelMesh
    reshard_after_forward: tuple[bool | None, int | None]
    shard_placement_fn: Any
    mp_policy: MixedPrecisionPolicy | PolicyFunction
    offload_policy: OffloadPolicy
    ignored_params: frozenset[nn.Parameter]
    strategy: Strategy | None = None
    replicate_below: int = 0
    grouping: tuple[tuple[str, str | int], ...] = ()

    @property
    def offloading(self) -> Offloading:
        """Where shards live."""
        offloading = self.offload_policy
        if not isinstance(offloading, CPUOffloadPolicy):
            return Offloading(self.mesh.device)
        return Offloading(
            self.mesh.device,
            offloaded=offloading.parameters,
            pinned=offloading.pin_memory,
            sums_on_host=bool(offloading.gradients),
            state_on_host=bool(offloading.optimizer_state),
        )

    def difference(self, other: ShardArguments) -> str | None:
        """The name of the first argument that is not the same in ``other``; None if all are.

        Meshes are the same if they are equal or communicate over the same process groups; functions if they are equal.
        """
        if self.strategy != other.strategy:
            return "strategy"
        if self.replicate_below != other.replicate_below:
            return "replicate_below"
        mine, theirs = self.mesh, other.mesh
        if mine.dims != theirs.dims or mine.spmd_mesh != theirs.spmd_mesh:
            passed = [each.device_mesh if each.spmd_mesh is None else each.spmd_mesh for each in (mine, theirs)]
            return "dp_mesh_dims" if passed[0] == passed[1] else "mesh"
        if mine.device != theirs.device or (mine.device_mesh != theirs.device_mesh and mine.key != theirs.key):
            return "mesh"
        for name in ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params"):
            if getattr(self, name) != getattr(other, name):
                return name
        return None
