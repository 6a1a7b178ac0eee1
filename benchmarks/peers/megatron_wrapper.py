"""Megatron-FSDP, by its `fully_shard`."""

from __future__ import annotations

import torch
from megatron_fsdp import fully_shard
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.implementations import ShardingOptions
from benchmarks.models import Block, StackedBlocks
from benchmarks.training import MakeOptimizer, StepOfBatch


def program(
    name: str, model: StackedBlocks, *, mesh: DeviceMesh, options: ShardingOptions, make_optimizer: MakeOptimizer
) -> StepOfBatch:
    """ZeRO-3 over the mesh, each block a unit."""
    named = DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh=mesh.mesh, mesh_dim_names=("shard",))
    sharded, optimizer = fully_shard(
        model,
        make_optimizer(model.parameters()),
        device_mesh=named,
        dp_shard_dim="shard",
        fsdp_unit_modules=[Block],
        device=torch.device(mesh.device_type),
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = sharded(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
