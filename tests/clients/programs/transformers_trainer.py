"""transformers' Trainer, on a Llama that `from_pretrained` shards while loading it.

Usage:
    torchrun --nproc-per-node 2 transformers_trainer.py FOLDER [--replicate 2] [--bf16]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig
from trial import Report, finish, implementation

STEPS, MICROBATCHES, ROWS, LENGTH, VOCABULARY, MAX_NORM, RATE = 3, 2, 2, 12, 51, 0.5, 0.3


def make_whole() -> LlamaForCausalLM:
    """A Llama of two layers, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=42,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def samples() -> Tensor:
    """Token ids (samples, LENGTH) of all ranks, microbatches and steps."""
    count = STEPS * MICROBATCHES * ROWS * dist.get_world_size()
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))


class Recorder(TrainerCallback):
    """Keeps what the Trainer logs after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Called on every rank."""
        if "grad_norm" in logs:
            self.steps.append(logs)


def train(model: nn.Module, folder: Path, ids: Tensor) -> list[dict[str, float]]:
    """Losses and gradient norms by step, as the Trainer logs them."""
    recorder = Recorder()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=MICROBATCHES,
            max_grad_norm=MAX_NORM,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            train_sampling_strategy="sequential",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[recorder],
    )
    trainer.train()
    return recorder.steps


def train_unsharded(model: nn.Module, ids: Tensor, momentum: float = 0.0) -> list[tuple[float, float]]:
    """The same, in one process on all rows of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    found = []
    for rows in ids.chunk(STEPS):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        found.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def main() -> None:
    """Save, load sharded, train both, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    reference = make_whole()
    if dist.get_rank() == 0:
        reference.save_pretrained(options.folder / "whole")
    dist.barrier()
    distributed = DistributedConfig(
        fsdp_size=dist.get_world_size() // options.replicate,
        dp_replicate_size=options.replicate,
        fsdp_mixed_precision=options.bf16,
    )
    model = LlamaForCausalLM.from_pretrained(options.folder / "whole", distributed_config=distributed)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    ids = samples()
    report = Report(implementation(model))
    found = train(model, options.folder, ids)
    for logs, (loss, norm) in zip(found, train_unsharded(reference, ids), strict=True):
        report.add("loss", float(logs["loss"]), loss)
        report.add("gradient norm", float(logs["grad_norm"]), norm)
    report.add_parameters(model, reference)
    finish(report)


if __name__ == "__main__":
    main()
