"""LLaMA-Factory's `FSDP2Engine`: its three ways of making a model, LoRA, its checkpoints and its export.

Usage:
    torchrun --nproc-per-node 2 llamafactory_engine.py FOLDER default|rank0|meta [--lora] [--bf16]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.plugins.trainer_plugins.distributed.fsdp2 import FSDP2Engine
from llamafactory.v1.plugins.trainer_plugins.distributed.hub import DistributedPlugin
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers_trainer import VOCABULARY, make_whole
from trial import Report, finish, implementation, mean_over_ranks, part, train_unsharded

STEPS, ROWS, LENGTH, RATE, MAX_NORM = 3, 4, 12, 0.1, 1.0
HUB = DistributedPlugin("fsdp2")
# Renaming the weights of models that transformers has rewritten, which wants another version of it; a Llama has none.
FSDP2Engine._try_build_hf_weight_conversion_context = lambda self, model: None


def make_sharded(options: argparse.Namespace, configuration: Any) -> Any:
    """A model as `ModelEngine` makes it, handed to the engine. Collective."""
    empty = options.mode == "meta" or (options.mode == "rank0" and dist.get_rank() > 0)
    if empty:
        with init_empty_weights():
            model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(options.folder / "whole"))
    else:
        model = make_whole()
    model._init_mode = f"init_on_{options.mode}"
    model.config.name_or_path = str(options.folder / "whole")
    return HUB(adapted(model) if options.lora else model, configuration, bf16=options.bf16)


def restore_frequencies(model: Any, reference: Any) -> None:
    """Give ``model`` the buffers that no state dict has.

    The engine leaves them uninitialized in its mode ``rank0``: it restores them after `to_empty` on meta only. Losses
    then depend on what the memory held before, with any implementation.
    """
    for module, like in zip(model.modules(), reference.modules(), strict=True):
        for name in module._non_persistent_buffers_set:
            getattr(module, name).copy_(getattr(like, name))


def adapted(model: Any) -> Any:
    """With adapters, whose second factors are not zero."""
    torch.manual_seed(1)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def loss_of(model: Any, rows: Tensor, _: Tensor | None = None) -> Tensor:
    """The language model's own."""
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss


def train(model: Any, optimizer: Any, batches: list[Tensor]) -> list[tuple[float, float]]:
    """Losses and gradient norms by step, as `BaseTrainer.fit` trains."""
    found = []
    model.train()
    for rows in batches:
        loss = loss_of(model, part(rows, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append((mean_over_ranks(loss), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()))
    return found


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """Momentum, so that there is state to save."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=RATE, momentum=0.5)


def main() -> None:
    """Train both, save, load and export, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("mode", choices=["default", "rank0", "meta"])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    configuration = {"name": "fsdp2"}
    DistributedInterface(configuration)
    reference = make_whole()
    if dist.get_rank() == 0:
        reference.save_pretrained(options.folder / "whole")
    dist.barrier()
    if options.lora:
        reference = adapted(reference)
    model = make_sharded(options, configuration)
    if options.mode == "rank0":
        restore_frequencies(model, reference)
    optimizer = make_optimizer(model)
    report = Report(implementation(model))
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * dist.get_world_size()
    ids = list(torch.randint(VOCABULARY, (STEPS * rows, LENGTH), generator=generator).chunk(STEPS))
    losses, norms = train_unsharded(
        reference, make_optimizer(reference), [(each, each) for each in ids], loss_of, max_norm=MAX_NORM
    )
    for found, loss, norm in zip(train(model, optimizer, ids), losses, norms, strict=True):
        report.add("loss", found[0], loss)
        report.add("gradient norm", found[1], norm)
    report.add_parameters(model, reference)
    check_checkpoints(report, model, optimizer, ids, options)
    finish(report)


def check_checkpoints(
    report: Report, model: Any, optimizer: Any, ids: list[Tensor], options: argparse.Namespace
) -> None:
    """What the engine saved brings the former losses back; what it exported is whole. Collective."""
    checkpoint = str(options.folder / "checkpoint")
    HUB.save_checkpoint(model, optimizer, checkpoint)
    expected = train(model, optimizer, ids[:2])
    HUB.load_checkpoint(model, optimizer, checkpoint)
    for found, again in zip(train(model, optimizer, ids[:2]), expected, strict=True):
        report.add("loss after resuming", found[0], again[0])
        report.add("gradient norm after resuming", found[1], again[1])
    processor = SimpleNamespace(save_pretrained=lambda *arguments, **more: None)
    HUB.save_model(model, str(options.folder / "exported"), processor)
    dist.barrier()
    report.save(
        {
            name: value
            for path in sorted((options.folder / "exported").glob("*.safetensors"))
            for name, value in load_file(path).items()
        }
    )


if __name__ == "__main__":
    main()
