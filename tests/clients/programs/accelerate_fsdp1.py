"""Accelerate's FSDP1 plugin: prepare, accumulate, clip, save and load, with each type of state dict.

Usage:
    torchrun --nproc-per-node 2 accelerate_fsdp1.py FOLDER [--state-dict FULL] [--bf16 | --fp16] [--checkpointing]
"""

from __future__ import annotations

import argparse
import math
from copy import deepcopy

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs, get_grad_scaler
from accelerate_fsdp2 import MAX_NORM, MICROBATCHES, STEPS, allow_sharding_on_cpu, train
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel
from trial import Report, batch, build, finish, mean_squared_error

# The first step overflows in fp16, and is skipped; from then on the scale is one that does not.
SCALER = GradScalerKwargs(init_scale=2.0**40, backoff_factor=2.0**-30)


def main() -> None:
    """Train, save in the middle and come back to it, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--state-dict", default="FULL", choices=["FULL", "SHARDED", "LOCAL"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    allow_sharding_on_cpu()
    if options.state_dict == "LOCAL":
        allow_sharded_tensors_in_files()
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
        mixed_precision="bf16" if options.bf16 else "fp16" if options.fp16 else "no",
        kwargs_handlers=[SCALER],
    )
    if options.fp16:
        scale_on_cpu(accelerator)
    plain: nn.Module = build()
    reference = deepcopy(plain)
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    model = accelerator.prepare(plain)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert isinstance(model, FullyShardedDataParallel)
    half = torch.bfloat16 if options.bf16 else torch.float16
    scaler = torch.amp.GradScaler("cpu", **SCALER.to_kwargs(), enabled=options.fp16)
    report = Report("fsdp2" if FullyShardedDataParallel.__module__.startswith("fsdp2") else "torch")
    for step in range(STEPS):
        microbatches = [batch(MICROBATCHES * step + index) for index in range(MICROBATCHES)]
        loss, norm = train(accelerator, model, optimizer, microbatches)
        with torch.autocast("cpu", half, enabled=options.bf16 or options.fp16):
            losses = [mean_squared_error(reference, *each) for each in microbatches]
        scaler.scale(sum(losses, torch.zeros(())).div(MICROBATCHES)).backward()
        report.add("loss", loss, sum(each.item() for each in losses) / MICROBATCHES)
        scaler.unscale_(expected_optimizer)
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        report.add("gradient norm", finite(norm), finite(expected_norm.item()))
        before = scaler.get_scale()
        scaler.step(expected_optimizer)
        scaler.update()
        if accelerator.scaler is not None:
            report.add("scale", accelerator.scaler.get_scale(), scaler.get_scale())
            report.add("skipped", optimizer.step_was_skipped, scaler.get_scale() < before)
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


def scale_on_cpu(accelerator: Accelerator) -> None:
    """What Accelerate sets up for fp16, but on accelerators only; its own function chooses the scaler."""
    accelerator.native_amp = True
    accelerator.scaler = get_grad_scaler(accelerator.distributed_type, device="cpu", **SCALER.to_kwargs())


def allow_sharded_tensors_in_files() -> None:
    """Accelerate reads its files with ``weights_only=True``, which refuses those of LOCAL state dicts, torch's too."""
    classes = (ShardedTensor, ShardedTensor.ProcessGroupState, ShardedTensorMetadata, Shard, ShardMetadata)
    inside = (ChunkShardingSpec, TensorProperties, MEM_FORMAT_ENCODING, torch.distributed._remote_device, getattr)
    torch.serialization.add_safe_globals([*classes, *inside])


def finite(norm: float) -> float:
    """The norm, or -1 where it overflowed: to an infinity, or to what is not a number."""
    return norm if math.isfinite(norm) else -1.0


if __name__ == "__main__":
    main()
