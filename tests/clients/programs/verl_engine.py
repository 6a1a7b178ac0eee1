"""verl's FSDP engine: what its trainers call on a policy between rollouts, with and without LoRA.

Usage:
    torchrun --nproc-per-node 2 verl_engine.py FOLDER [--lora] [--offload] [--bf16] [--replicate 2] [--fsdp1]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers_trainer import VOCABULARY, make_whole
from trial import Report, finish, implementation, mean_over_ranks, part, train_unsharded
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform

STEPS, MICROBATCHES, ROWS, LENGTH, RATE, MAX_NORM = 3, 2, 4, 12, 0.1, 1.0
ADAPTERS = ("r", "lora_alpha", "target_modules", "bias", "task_type")


class Host(str):
    """The name of a device without an index, where verl puts together "device:index" too."""

    def __format__(self, spec: str) -> str:
        return "0"


class PlatformCPU(PlatformBase):
    """verl knows accelerators only. All that it asks of one on the way."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(empty_cache=lambda: None, is_available=lambda: True)

    def current_device(self) -> Any:
        return Host("cpu")

    def communication_backend_name(self) -> str:
        return "gloo"


for name in PlatformBase.__abstractmethods__ - set(vars(PlatformCPU)):
    setattr(PlatformCPU, name, lambda self, *arguments: None)
PlatformCPU.__abstractmethods__ = frozenset()
set_platform(PlatformCPU())

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import fsdp_utils  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402

# Reports of a GPU's memory, and packing of sequences, which wants another version of TRL.
transformer_impl.log_gpu_memory_usage = lambda *arguments, **options: None
transformer_impl.apply_monkey_patch = lambda *arguments, **options: None


class Engine(transformer_impl.FSDPEngine):
    """verl's engine, with the loss of next tokens."""

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        return loss_function(self.module, micro_batch), {}


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """The language model's own."""
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss


def make_engine(options: argparse.Namespace) -> Engine:
    """As verl's worker makes it of its configuration."""
    dtype = "bf16" if options.bf16 else "fp32"
    model = HFModelConfig(
        path=str(options.folder / "whole"),
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "eager"},
        enable_gradient_checkpointing=True,
        lora_rank=4 if options.lora else 0,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
    )
    engine = Engine(
        model,
        FSDPEngineConfig(
            strategy="fsdp" if options.fsdp1 else "fsdp2",
            fsdp_size=dist.get_world_size() // options.replicate,
            forward_prefetch=True,
            offload_policy=options.offload and not options.fsdp1,
            param_offload=options.offload and options.fsdp1,
            optimizer_offload=options.offload and options.fsdp1,
            use_torch_compile=False,
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        FSDPOptimizerConfig(
            lr=RATE,
            optimizer="SGD",
            total_training_steps=10,
            clip_grad=MAX_NORM,
            weight_decay=0.0,
            override_optimizer_config={"momentum": 0.5},
        ),
        CheckpointConfig(save_contents=["model", "optimizer", "extra"], load_contents=["model", "optimizer", "extra"]),
    )
    torch.manual_seed(dist.get_rank())
    engine.initialize()
    return engine


def train(engine: Engine, batches: list[Tensor]) -> list[tuple[float, float]]:
    """Losses and gradient norms by step; a step is some microbatches, of which the last is reduced."""
    found = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for rows in batches:
        engine.optimizer_zero_grad()
        losses = []
        microbatches = part(rows, rank, size).chunk(MICROBATCHES)
        for index, each in enumerate(microbatches):
            with engine._gradient_sync_context(is_last_micro_batch=index == len(microbatches) - 1):
                loss, _ = engine.forward_step(each, loss_of, forward_only=False)
                (loss / MICROBATCHES).backward()
            losses.append(mean_over_ranks(loss))
        found.append((sum(losses) / MICROBATCHES, engine.optimizer_step()))
        engine.lr_scheduler_step()
    return found


def make_reference(engine: Engine, options: argparse.Namespace) -> Any:
    """The same model, with the same adapters, in one piece. Collective."""
    whole: Any = make_whole()
    if options.lora:
        config = dict(engine.module.peft_config["default"].to_dict())
        whole = get_peft_model(whole, LoraConfig(**{name: config[name] for name in ADAPTERS}))
    full = {name: value.full_tensor() for name, value in engine.module.state_dict().items()}
    whole.load_state_dict(full)
    return whole


def evaluate(engine: Engine, rows: Tensor) -> float:
    """The loss on some rows, without gradients. Collective."""
    with torch.no_grad():
        loss, _ = engine.forward_step(part(rows, dist.get_rank(), dist.get_world_size()), loss_of, forward_only=True)
    return mean_over_ranks(loss)


def merge(engine: Engine) -> dict[str, Tensor]:
    """The weights with adapters merged, by verl's own function, or what it is made of. Collective."""
    if fsdp_utils.fsdp_version(engine.module) == 2:
        return dict(fsdp_utils.collect_merged_lora_params(engine.module))
    # Of FSDP1's parameters that function takes copies by `.cpu()`, before it puts them back: on a CPU they are none.
    with fsdp_utils.merged_lora_context(engine.module, backup_adapters=True):
        weights = fsdp_utils.normalize_peft_param_name(engine.module.state_dict())
        return {name: value.full_tensor() for name, value in weights.items()}


def check_rollout_weights(report: Report, engine: Engine, reference: Any, options: argparse.Namespace) -> None:
    """The weights that an engine for rollouts is sent: whole ones, adapters, or with adapters merged. Collective."""
    sent = {}
    for summon in (False, True) if options.lora else (False,):
        weights, _ = engine.get_per_tensor_param(layered_summon=summon, base_sync_done=True)
        weights = dict(weights)
        expected = get_peft_model_state_dict(reference) if options.lora else reference.state_dict()
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            report.add("rollout weight difference", (weights[name] - value).abs().max().item(), 0.0)
        sent |= {f"{'layered ' * summon}{name}": value for name, value in weights.items()}
    if options.lora:
        sent |= {f"merged {name}": value for name, value in merge(engine).items()}
        report.add_parameters(engine.module, reference)  # as they were
        merged = reference.merge_and_unload().state_dict()
        for name, value in merged.items():
            report.add("merged weight", sent[f"merged {name}"].norm().item(), value.norm().item())
    report.save(sent)


def copy_to_host(engine: Engine) -> Callable[[], None]:
    """Keep a copy of this rank's parameters in host memory, and return what puts it back."""
    if fsdp_utils.fsdp_version(engine.module) == 1:
        kept = fsdp_utils.fsdp1_sharded_save_to_cpu(engine.module)
        return lambda: fsdp_utils.fsdp1_sharded_load_from_cpu(engine.module, kept)
    state, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(engine.module)
    state = {name: (local.clone(), each) for name, (local, each) in state.items()}
    return lambda: fsdp_utils.fsdp2_sharded_load_from_cpu(engine.module, state, spec)


def move(engine: Engine, options: argparse.Namespace) -> None:
    """To the host and back, as verl does around each rollout (its `Engine.to`, which takes a CPU for the device)."""
    if options.offload and options.fsdp1:
        fsdp_utils.offload_fsdp_model_to_cpu(engine.module)
        fsdp_utils.offload_fsdp_optimizer(engine.optimizer)
        fsdp_utils.load_fsdp_model_to_gpu(engine.module)
        fsdp_utils.load_fsdp_optimizer(engine.optimizer, "cpu")


def check_checkpoints(report: Report, engine: Engine, ids: list[Tensor], folder: Path) -> None:
    """verl's checkpoint manager, and its copy in host memory, bring the former losses back. Collective."""
    engine.save_checkpoint(str(folder / "checkpoint"))
    restore = copy_to_host(engine)
    before = evaluate(engine, ids[0])
    expected = train(engine, ids[:1])
    restore()
    report.add("loss with the copy in host memory", evaluate(engine, ids[0]), before)
    train(engine, ids[1:2])
    engine.load_checkpoint(str(folder / "checkpoint"))
    report.add("loss with the checkpoint loaded", evaluate(engine, ids[0]), before)
    for found, again in zip(train(engine, ids[:1]), expected, strict=True):
        report.add("loss after resuming", found[0], again[0])
        report.add("gradient norm after resuming", found[1], again[1])


def main() -> None:
    """Train both, hand weights over, save and load, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--fsdp1", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_whole().save_pretrained(options.folder / "whole")
    dist.barrier()
    engine = make_engine(options)
    reference = make_reference(engine, options)
    report = Report(implementation(engine.module))
    generator = torch.Generator().manual_seed(1)
    count = STEPS * ROWS * dist.get_world_size()
    ids = list(torch.randint(VOCABULARY, (count, LENGTH), generator=generator).chunk(STEPS))
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    losses, norms = train_unsharded(
        reference,
        torch.optim.SGD(trained, lr=RATE, momentum=0.5),
        [(each, each) for each in ids],
        lambda model, inputs, _: loss_of(model, inputs),
        max_norm=MAX_NORM,
    )
    for rows, loss, norm in zip(ids, losses, norms, strict=True):
        move(engine, options)
        ((found_loss, found_norm),) = train(engine, [rows])
        report.add("loss", found_loss, loss)
        report.add("gradient norm", found_norm, norm)
    report.add_parameters(engine.module, reference)
    check_rollout_weights(report, engine, reference, options)
    check_checkpoints(report, engine, ids, options.folder)
    finish(report)


if __name__ == "__main__":
    main()
