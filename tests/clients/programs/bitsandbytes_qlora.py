"""QLoRA: a Llama that transformers loads with bitsandbytes' 4-bit weights, adapters of PEFT beside them.

Usage:
    torchrun --nproc-per-node 2 bitsandbytes_qlora.py FOLDER [--reshard-after-forward]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, LlamaForCausalLM
from transformers_trainer import make_whole, samples
from trial import Report, finish, gradient_norm, implementation, mean_over_ranks, part

STEPS, RATE = 4, 0.5


def make(folder: Path, storage: torch.dtype = torch.float32) -> Any:
    """The quantized model with adapters, whose second factors are not zero."""
    # FSDP shards floating-point parameters: four bits each lie in those of the storage's dtype.
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    model: Any = LlamaForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]))
    model.train()  # in evaluation its CPU kernels repack weights in place, in blocks that these are too small for
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    assert any(isinstance(module, bnb.nn.Linear4bit) for module in model.modules())
    return model


def main() -> None:
    """Train both, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reshard-after-forward", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_whole().save_pretrained(options.folder / "whole")
    dist.barrier()
    reference, model = make(options.folder / "whole"), make(options.folder / "whole")
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
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
        report.add("gradient norm", gradient_norm(model), gradient_norm(reference))
        for each in optimizers:
            each.step()
            each.zero_grad()
    with torch.no_grad():
        rows = samples()[: 2 * size]
        loss = loss_of(model, part(rows, rank, size))
        report.add("loss without gradients", mean_over_ranks(loss), loss_of(reference, rows).item())
    adapters = get_peft_model_state_dict(model)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in adapters.items()}
    for name, value in get_peft_model_state_dict(reference).items():
        report.add("adapter difference", (whole[name] - value).abs().max().item(), 0.0)
    report.save(whole)
    finish(report)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """The language model's own."""
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss


if __name__ == "__main__":
    main()
