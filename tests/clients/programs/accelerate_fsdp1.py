"""Accelerate's FSDP1 plugin: prepare, accumulate, clip, save and load, with each type of state dict.

Usage:
    torchrun --nproc-per-node 2 accelerate_fsdp1.py FOLDER [--state-dict FULL] [--bf16] [--checkpointing]
"""

from __future__ import annotations

import argparse
from copy import deepcopy

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate_fsdp2 import MAX_NORM, MICROBATCHES, STEPS, allow_sharding_on_cpu, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from trial import Report, batch, build, finish, mean_squared_error


def main() -> None:
    """Train, save in the middle and come back to it, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--state-dict", default="FULL", choices=["FULL", "SHARDED"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    allow_sharding_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=options.checkpointing,
        cpu_ram_efficient_loading=False,
        state_dict_type=f"{options.state_dict}_STATE_DICT",
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=MICROBATCHES,
        mixed_precision="bf16" if options.bf16 else "no",
    )
    plain: nn.Module = build()
    reference = deepcopy(plain)
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    model = accelerator.prepare(plain)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert isinstance(model, FullyShardedDataParallel)
    report = Report("fsdp2" if FullyShardedDataParallel.__module__.startswith("fsdp2") else "torch")
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
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in reference.state_dict().items():
            report.add("gathered state", whole[name].float().norm().item(), value.norm().item())
    assert accelerator.unwrap_model(model) is not model
    finish(report)


if __name__ == "__main__":
    main()
