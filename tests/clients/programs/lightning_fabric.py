"""Lightning Fabric with `ModelParallelStrategy`: a model made on meta, accumulation without sync, clipping, loading.

Usage:
    torchrun --nproc-per-node 2 lightning_fabric.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trial import Report, batch, build, finish, implementation, mean_over_ranks, mean_squared_error, part

STEPS, MICROBATCHES, MAX_NORM = 4, 3, 0.5
RATE = 0.1


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What Fabric calls in `setup`."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main() -> None:
    """Load a whole checkpoint into a sharded model, train, and report."""
    strategy = ModelParallelStrategy(parallelize_fn=shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    reference = build()
    path = Path(sys.argv[1]) / "whole.pt"
    if fabric.global_rank == 0:
        path.parent.mkdir(exist_ok=True)
        torch.save(reference.state_dict(), path)
    fabric.barrier()
    with fabric.init_module(empty_init=True):
        model = type(reference)()
    model = fabric.setup(model)
    fabric.load_raw(path, model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=RATE, momentum=0.9)
    report = Report(implementation(model))
    for step in range(STEPS):
        loss, norm = train(fabric, model, optimizer, step)
        losses = []
        for index in range(MICROBATCHES):
            losses.append(mean_squared_error(reference, *batch(MICROBATCHES * step + index)))
            (losses[-1] / MICROBATCHES).backward()
        report.add("loss", loss, sum(each.item() for each in losses) / MICROBATCHES)
        report.add("gradient norm", norm, nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM).item())
        expected_optimizer.step()
        expected_optimizer.zero_grad()
    report.add_parameters(model.module, reference)
    finish(report)


def train(fabric: Any, model: Any, optimizer: torch.optim.Optimizer, step: int) -> tuple[float, float]:
    """One step; its loss and the norm of its gradient before clipping."""
    losses = []
    for index in range(MICROBATCHES):
        rows = (part(each, fabric.global_rank, fabric.world_size) for each in batch(MICROBATCHES * step + index))
        with fabric.no_backward_sync(model, enabled=index < MICROBATCHES - 1):
            loss = mean_squared_error(model, *rows)
            fabric.backward(loss / MICROBATCHES)
        early = [parameter.grad for parameter in model.parameters() if isinstance(parameter, DTensor)]
        assert index == MICROBATCHES - 1 or not any(grad is not None for grad in early), "no_sync did nothing"
        losses.append(mean_over_ranks(loss))
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses) / MICROBATCHES, (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


if __name__ == "__main__":
    main()
