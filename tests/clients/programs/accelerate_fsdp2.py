"""Accelerate's FSDP2 plugin: prepare, accumulate, clip, save and load.

Usage:
    torchrun --nproc-per-node 2 accelerate_fsdp2.py FOLDER [--ram-efficient] [--bf16]
"""

from __future__ import annotations

import argparse
from copy import deepcopy

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from trial import Report, batch, build, finish, implementation, mean_over_ranks, mean_squared_error, part

STEPS, MICROBATCHES, MAX_NORM = 4, 2, 0.5


def main() -> None:
    """Train, save in the middle and come back to it, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--ram-efficient", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    allow_sharding_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=options.ram_efficient,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=MICROBATCHES,
        mixed_precision="bf16" if options.bf16 else "no",
    )
    model: nn.Module = build()
    reference = deepcopy(model)
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    # As users of Accelerate write it: the optimizer before the model is sharded.
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    report = Report(implementation(model))
    for step in range(STEPS):
        microbatches = [batch(MICROBATCHES * step + index) for index in range(MICROBATCHES)]
        loss, norm = train(accelerator, model, optimizer, microbatches)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            losses = [mean_squared_error(reference, *each) for each in microbatches]
        sum(losses, torch.zeros(())).div(MICROBATCHES).backward()
        report.add("loss", loss, sum(each.item() for each in losses) / MICROBATCHES)
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        report.add("gradient norm", norm, expected_norm.item())
        expected_optimizer.step()
        expected_optimizer.zero_grad()
        if step == 1:
            accelerator.save_state(options.folder)
            train(accelerator, model, optimizer, microbatches)  # to be forgotten
            accelerator.load_state(options.folder)
    report.add_parameters(model, reference)
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in reference.state_dict().items():
            report.add("gathered state", whole[name].norm().item(), value.norm().item())
    finish(report)


def allow_sharding_on_cpu() -> None:
    """Accelerate shards only where it has found GPUs: say so, after it has chosen gloo and the CPU."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: list[tuple[Tensor, Tensor]],
) -> tuple[float, float]:
    """One step; its loss and the norm of its gradient before clipping."""
    losses, norm = [], torch.zeros(())
    for inputs, targets in microbatches:
        with accelerator.accumulate(model):
            rows = (part(each, accelerator.process_index, accelerator.num_processes) for each in (inputs, targets))
            with accelerator.autocast():
                loss = mean_squared_error(model, *rows)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return sum(losses) / len(losses), norm.item()


if __name__ == "__main__":
    main()
