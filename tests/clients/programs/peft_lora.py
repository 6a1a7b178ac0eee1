"""LoRA with PEFT: frozen weights and trainable adapters in the same groups, and handed over by PEFT.

Usage:
    torchrun --nproc-per-node 2 peft_lora.py
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers_trainer import make_whole, samples
from trial import Report, finish, gradient_norm, implementation, mean_over_ranks, part

STEPS, RATE = 4, 0.5


def make(whole: Any) -> Any:
    """The model with adapters, whose second factors are not zero, so that all of them learn."""
    config = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    torch.manual_seed(1)
    model = get_peft_model(deepcopy(whole), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def trainable(model: Any) -> list[torch.nn.Parameter]:
    """The adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def main() -> None:
    """Train both, carry the adapters over to a model that is not sharded, and report."""
    dist.init_process_group("gloo")
    whole = make_whole()
    reference, model = make(whole), make(whole)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.SGD(trainable(model), lr=RATE)
    expected_optimizer = torch.optim.SGD(trainable(reference), lr=RATE)
    report = Report(implementation(model))
    rank, size = dist.get_rank(), dist.get_world_size()
    for rows in samples().chunk(STEPS):
        mine = part(rows, rank, size)
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        expected = reference(input_ids=rows, labels=rows).loss
        expected.backward()
        report.add("loss", mean_over_ranks(loss), expected.item())
        report.add("gradient norm", gradient_norm(model), gradient_norm(reference))
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
    report.add_parameters(model, reference)
    assert not any(parameter.grad is not None for parameter in model.parameters() if not parameter.requires_grad)
    check_adapters(report, model, reference, make(whole))
    finish(report)


def check_adapters(report: Report, model: Any, reference: Any, fresh: Any) -> None:
    """The adapters, gathered, make the untrained model the trained one."""
    adapters = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in get_peft_model_state_dict(model).items()
    }
    set_peft_model_state_dict(fresh, adapters)
    rows = samples()[:2]
    with torch.no_grad():
        report.add(
            "loss with adapters loaded",
            fresh(input_ids=rows, labels=rows).loss.item(),
            reference(input_ids=rows, labels=rows).loss.item(),
        )


if __name__ == "__main__":
    main()
