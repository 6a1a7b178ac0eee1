"""Megatron-FSDP's second version, which is experimental there: `fully_shard` in place, block by block."""

from __future__ import annotations

import torch
from megatron_fsdp.experimental import Flat, Placements, fully_shard, fully_shard_optimizer
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.implementations import ShardingOptions
from benchmarks.models import StackedBlocks
from benchmarks.training import MakeOptimizer, StepOfBatch


def program(
    name: str, model: StackedBlocks, *, mesh: DeviceMesh, options: ShardingOptions, make_optimizer: MakeOptimizer
) -> StepOfBatch:
    """Parameters, gradients and the optimizer's state sharded."""
    named = DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh=mesh.mesh, mesh_dim_names=("shard",))
    for module in (*model.blocks, model):
        fully_shard(module, named, Placements(["shard"], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()]))
    optimizer = make_optimizer(model.parameters())
    fully_shard_optimizer(optimizer)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
