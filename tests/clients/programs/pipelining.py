"""`torch.distributed.pipelining` over fully sharded stages: 2 pipeline ranks x 2 data-parallel ranks.

Usage:
    torchrun --nproc-per-node 4 pipelining.py 1F1B [--reshard-after-forward] [--replicate] [--defer]
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from trial import Block, Report, batch, build, finish, gradient_norm, implementation, mean_over_ranks, squared_norm

STEPS, MICROBATCHES, BLOCKS, RATE = 4, 4, 4, 0.2


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Of one microbatch."""
    return torch.nn.functional.mse_loss(output, target)


def main() -> None:
    """Train, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("schedule")
    parser.add_argument("--reshard-after-forward", action="store_true")
    parser.add_argument("--defer", action="store_true", help="reduce late, and every second call only (torch 2.15)")
    parser.add_argument("--replicate", action="store_true", help="torch's `replicate` in place of `fully_shard`")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    whole = build(BLOCKS)
    layers: list[nn.Module] = [*whole.blocks, whole.head]
    reference = nn.Sequential(*deepcopy(layers))
    schedule_class: Any = get_schedule_class(options.schedule)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    rank = mesh.get_local_rank("pp")
    if single:
        indices, count = [rank], 2
    elif issubclass(schedule_class, (ScheduleZBVZeroBubble, ScheduleDualPipeV)):
        indices, count = [rank, 3 - rank], 4
    else:
        indices, count = [rank, rank + 2], 4
    stages = make_stages(layers, mesh, indices, count, options)
    more = {"defer_reduce_grad_wait": True} if options.defer and not single else {}
    schedule = schedule_class(stages[0] if single else stages, MICROBATCHES, loss_fn=loss_of, **more)
    train(schedule, stages, reference, mesh, options.defer)


def make_stages(
    layers: list[nn.Module], mesh: DeviceMesh, indices: list[int], count: int, options: argparse.Namespace
) -> list[PipelineStage]:
    """This rank's stages, of ``count`` in all: each block a group, and their parent another,
    which has the head's parameters in the last stage and none elsewhere."""
    cut = [round(len(layers) * index / count) for index in range(count + 1)]
    made = []
    for index in indices:
        module = nn.Sequential(*layers[cut[index] : cut[index + 1]])
        for layer in [*(layer for layer in module if isinstance(layer, Block)), module]:
            if options.replicate:
                replicate(layer, mesh=mesh["dp"])
            else:
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=options.reshard_after_forward)
        made.append(PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp")))
    return made


def train(schedule: Any, stages: list[PipelineStage], reference: nn.Module, mesh: DeviceMesh, defer: bool) -> None:
    """Train beside the reference, on plain SGD: a gradient of the wrong scale shows in the next loss."""
    here = nn.ModuleList(stage.submod for stage in stages)
    optimizer = torch.optim.SGD(here.parameters(), lr=RATE)
    expected = torch.optim.SGD(reference.parameters(), lr=RATE)
    report = Report(implementation(here))
    for step in range(STEPS):
        losses: list[Tensor] = []
        expected_losses: list[float] = []
        # With --defer, two calls of the schedule for each step of the optimizer.
        for batch_number, finalizes in [(2 * step, False), (2 * step + 1, True)] if defer else [(step, True)]:
            inputs, targets = batch(batch_number, size=16)
            loss = loss_of(reference(inputs), targets)
            loss.backward()
            expected_losses.append(loss.item())
            more = {} if finalizes else {"finalize_gradients": False}
            run_schedule(schedule, stages, inputs, targets, losses, mesh.get_local_rank("dp"), more)
        squares = torch.tensor([squared_norm(parameter.grad for parameter in here.parameters())])
        dist.all_reduce(squares, group=mesh.get_group("pp"))
        found = torch.stack(losses).mean() if losses else torch.zeros(())
        # Two of the four ranks have the last stage.
        report.add("loss", 2 * mean_over_ranks(found), sum(expected_losses) / len(expected_losses))
        report.add("gradient norm", squares.item() ** 0.5, gradient_norm(reference))
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    finish(report)


def run_schedule(
    schedule: Any,
    stages: list[PipelineStage],
    inputs: Tensor,
    targets: Tensor,
    losses: list[Tensor],
    data_rank: int,
    more: dict[str, Any],
) -> None:
    """One call of ``schedule.step``, with what this rank's stages need; adds the losses of the microbatches."""
    first = [inputs.chunk(2)[data_rank]] if any(stage.is_first for stage in stages) else []
    if any(stage.is_last for stage in stages):
        new: list[Tensor] = []
        schedule.step(*first, target=targets.chunk(2)[data_rank], losses=new, **more)
        losses += new
    else:
        schedule.step(*first, **more)


if __name__ == "__main__":
    main()
