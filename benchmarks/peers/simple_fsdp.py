"""SimpleFSDP of torchtitan: parameters are DTensors, gathered where they are read, so that a compiler sees it all."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

from benchmarks.implementations import ShardingOptions, compile_model
from benchmarks.training import MakeOptimizer, StepOfBatch


def program(
    name: str, model: nn.Module, *, mesh: DeviceMesh, options: ShardingOptions, make_optimizer: MakeOptimizer
) -> StepOfBatch:
    """As torchtitan trains: gradients are summed over the ranks, so that the loss is divided by their number."""
    sharded = compile_model(name, data_parallel(model, mesh, mode="fully_shard"), options.backend)
    optimizer = make_optimizer(sharded.parameters())

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = sharded(batch)
        (loss / options.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
