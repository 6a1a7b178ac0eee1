"""transformers' Trainer that wraps the model by FSDP1, saves, and goes on from what it saved in another Trainer.

Usage:
    torchrun --nproc-per-node 2 transformers_fsdp1.py FOLDER [--lora] [--state-dict SHARDED]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate_fsdp2 import allow_sharding_on_cpu
from peft_lora import make as with_adapters
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainingArguments
from transformers_trainer import (
    MAX_NORM,
    MICROBATCHES,
    RATE,
    ROWS,
    STEPS,
    Recorder,
    make_whole,
    samples,
    train_unsharded,
)
from trial import Report, finish, implementation

SAVED = 2  # the step after which there is a checkpoint


def make(options: argparse.Namespace) -> Any:
    """The model, with adapters if it is to have some."""
    whole = make_whole()
    return with_adapters(whole) if options.lora else whole


def make_trainer(options: argparse.Namespace, recorder: Recorder) -> Trainer:
    """As a script makes it, with FSDP1 in its arguments."""
    arguments = TrainingArguments(
        output_dir=str(options.folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICROBATCHES,
        max_grad_norm=MAX_NORM,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        optim_args="momentum=0.5",
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        save_strategy="steps",
        save_steps=SAVED,
        disable_tqdm=True,
        use_cpu=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": 1,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "backward_prefetch": "backward_pre",
            "sync_module_states": False,  # Accelerate looks for an accelerator first
            "state_dict_type": f"{options.state_dict}_STATE_DICT",
        },
    )
    allow_sharding_on_cpu()
    ids = samples()
    return Trainer(
        model=make(options),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[recorder],
    )


def main() -> None:
    """Train, resume, export, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--state-dict", default="FULL", choices=["FULL", "SHARDED"])
    options = parser.parse_args()
    dist.init_process_group("gloo")
    recorder, again = Recorder(), Recorder()
    trainer = make_trainer(options, recorder)
    trainer.train()
    # PEFT 0.21.2 finds the names of adapters in `state_dict()`, which Accelerate leaves empty on all ranks but the
    # first while it loads FULL ones: the others would keep the adapters that they had, with torch's FSDP1 too.
    resumes = not options.lora or options.state_dict == "SHARDED"
    if resumes:
        trainer = make_trainer(options, again)
        trainer.train(resume_from_checkpoint=str(options.folder / "out" / f"checkpoint-{SAVED}"))
    wrapped: Any = trainer.model_wrapped
    assert isinstance(wrapped, FullyShardedDataParallel) and len(wrapped.fsdp_modules(wrapped)) > 2
    reference = make(options)
    report = Report(implementation(wrapped))
    expected = train_unsharded(reference, samples(), momentum=0.5)
    for name, steps, wanted in (
        ("", recorder.steps, expected),
        (" after resuming", again.steps, expected[SAVED:] if resumes else []),
    ):
        for logs, (loss, norm) in zip(steps, wanted, strict=True):
            report.add(f"loss{name}", float(logs["loss"]), loss)
            report.add(f"gradient norm{name}", float(logs["grad_norm"]), norm)
    if options.state_dict == "FULL":
        trainer.save_model(str(options.folder / "exported"))
    dist.barrier()
    if dist.get_rank() == 0 and options.state_dict == "FULL":
        check_exported(report, options.folder / "exported", reference)
    finish(report)


def check_exported(report: Report, folder: Path, reference: Any) -> None:
    """What the Trainer saved for others: the whole model, or the adapters."""
    plain = {name.replace(".default", ""): value for name, value in reference.state_dict().items()}
    exported = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    assert exported.keys() == {name for name in plain if "lora" in name or not hasattr(reference, "peft_config")}
    for name, value in exported.items():
        report.add("exported difference", (value - plain[name]).abs().max().item(), 0.0)
        report.add("exported norm", value.norm().item(), plain[name].norm().item())


if __name__ == "__main__":
    main()
