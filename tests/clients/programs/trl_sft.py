"""TRL's `SFTTrainer`, sharded by Accelerate's FSDP2 plugin.

Usage:
    torchrun --nproc-per-node 2 trl_sft.py FOLDER [--lora]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate_fsdp2 import allow_sharding_on_cpu
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers_trainer import (
    LENGTH,
    MAX_NORM,
    MICROBATCHES,
    RATE,
    ROWS,
    STEPS,
    VOCABULARY,
    Recorder,
    make_whole,
    samples,
    train_unsharded,
)
from trial import Report, finish, implementation
from trl import SFTConfig, SFTTrainer

LORA = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One that the trainer wants to have; the samples are token ids already."""
    words = {f"w{index}": index for index in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_trainer(folder: Path, ids: Tensor, recorder: Recorder, lora: bool) -> Any:
    """As a script makes it, with FSDP in its arguments."""
    arguments = SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICROBATCHES,
        gradient_checkpointing=False,
        max_grad_norm=MAX_NORM,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        bf16=False,
        max_length=LENGTH,
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        save_strategy="steps",
        save_steps=STEPS,
        disable_tqdm=True,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    allow_sharding_on_cpu()
    return SFTTrainer(
        model=make_whole(),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=make_tokenizer(),
        peft_config=LORA if lora else None,
        callbacks=[recorder],
    )


def main() -> None:
    """Train both, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    recorder = Recorder()
    ids = samples()
    torch.manual_seed(1)
    trainer = make_trainer(options.folder, ids, recorder, options.lora)
    reference: Any = make_whole()
    if options.lora:
        reference = get_peft_model(reference, LORA)
        reference.load_state_dict(trainer.model.state_dict())
    trainer.train()
    report = Report(implementation(trainer.model_wrapped))
    for logs, (loss, norm) in zip(recorder.steps, train_unsharded(reference, ids), strict=True):
        report.add("loss", float(logs["loss"]), loss)
        report.add("gradient norm", float(logs["grad_norm"]), norm)
    report.add_parameters(trainer.model_wrapped, reference)
    trainer.save_model(str(options.folder / "exported"))
    dist.barrier()
    exported = sorted((options.folder / "exported").glob("*.safetensors"))
    report.save({name: value for path in exported for name, value in load_file(path).items()})
    finish(report)


if __name__ == "__main__":
    main()
