"""QLoRA wrapped by FSDP1: a Llama with bitsandbytes' 4-bit weights, and adapters of PEFT beside them.

Usage:
    torchrun --nproc-per-node 2 bitsandbytes_fsdp1.py FOLDER [--policy modules] [--storage bfloat16]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes_qlora import RATE, STEPS, loss_of, make
from peft import get_peft_model_state_dict
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers_trainer import MAX_NORM, make_whole, samples
from trial import Report, finish, implementation, mean_over_ranks, part


def main() -> None:
    """Train both, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy", default="peft", choices=["peft", "modules"])
    parser.add_argument("--storage", default="float32", choices=["float32", "bfloat16", "uint8"])
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_whole().save_pretrained(options.folder / "whole")
    dist.barrier()
    storage = getattr(torch, options.storage)
    reference, plain = make(options.folder / "whole", storage), make(options.folder / "whole", storage)
    # PEFT's has a unit for each adapter; by modules, they lie with the frozen weights of their layer.
    policy = fsdp_auto_wrap_policy(plain) if options.policy == "peft" else ModuleWrapPolicy({LlamaDecoderLayer})
    model: Any = FullyShardedDataParallel(
        plain, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    assert len(model.fsdp_modules(model)) == (15 if options.policy == "peft" else 3)
    optimizers = [
        torch.optim.SGD([parameter for parameter in each.parameters() if parameter.requires_grad], lr=RATE)
        for each in (model, reference)
    ]
    report = Report(implementation(model))
    rank, size = dist.get_rank(), dist.get_world_size()
    for rows in samples().chunk(STEPS):
        loss = loss_of(model, part(rows, rank, size))
        loss.backward()
        expected = loss_of(reference, rows)
        expected.backward()
        report.add("loss", mean_over_ranks(loss), expected.item())
        norms = model.clip_grad_norm_(MAX_NORM), torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        report.add("gradient norm", norms[0].item(), norms[1].item())
        for each in optimizers:
            each.step()
            each.zero_grad()
    with torch.no_grad():
        rows = samples()[: 2 * size]
        loss = loss_of(model, part(rows, rank, size))
        report.add("loss without gradients", mean_over_ranks(loss), loss_of(reference, rows).item())
    with model.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        adapters = get_peft_model_state_dict(model)
    for name, value in get_peft_model_state_dict(reference).items():
        report.add("adapter difference", (adapters[name] - value).abs().max().item(), 0.0)
    report.save(adapters)
    finish(report)


if __name__ == "__main__":
    main()
