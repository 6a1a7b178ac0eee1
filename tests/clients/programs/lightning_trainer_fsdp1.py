"""Lightning's Trainer with `FSDPStrategy`, through a checkpoint, full or sharded, into a second Trainer.

Usage:
    torchrun --nproc-per-node 2 lightning_trainer_fsdp1.py FOLDER [full|sharded]
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader
from trial import (
    Block,
    Model,
    Report,
    batch,
    build,
    finish,
    gradient_norm,
    implementation,
    mean_over_ranks,
    mean_squared_error,
    part,
    train_unsharded,
)

STEPS = 6


class OnCPU(FSDPStrategy):
    """Lightning's connector wants a GPU for `FSDPStrategy` itself."""


class Training(lightning.LightningModule):
    """The model, as Lightning takes it; the strategy wraps it, and its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()
        self.steps: list[tuple[float, float]] = []

    def training_step(self, _: Tensor) -> Tensor:
        """The loss of this rank's part of the step's batch; Lightning's own order begins anew after a checkpoint."""
        rows = (part(each, dist.get_rank(), dist.get_world_size()) for each in batch(self.trainer.global_step))
        loss = mean_squared_error(self.model, *rows)
        self.last_loss = mean_over_ranks(loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After the gradients are reduced."""
        self.steps.append((self.last_loss, gradient_norm(self)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """State and groups that a checkpoint must keep."""
        return make_optimizer(self.model)


def make_optimizer(model: Model) -> torch.optim.Optimizer:
    """Two groups, of different rates."""
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def fit(kind: str, steps: int, checkpoint: Path | None) -> tuple[lightning.Trainer, Training]:
    """Train until ``steps`` steps have been made, all in all."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OnCPU(auto_wrap_policy={Block}, state_dict_type=kind),  # type: ignore[arg-type]
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training = Training()
    loader = DataLoader(list(range(2 * STEPS)), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(training, loader, ckpt_path=checkpoint, weights_only=False)
    wrapped = trainer.strategy.model
    assert isinstance(wrapped, FullyShardedDataParallel) and len(wrapped.fsdp_modules(wrapped)) == 4
    return trainer, training


def main() -> None:
    """Train, save, go on in another Trainer, and report."""
    folder, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "full"
    checkpoint = folder / "lightning.ckpt"
    first, before = fit(kind, STEPS // 2, None)
    first.save_checkpoint(checkpoint)
    second, after = fit(kind, STEPS, checkpoint)
    reference = build()
    steps = [batch(step) for step in range(STEPS)]
    expected = zip(*train_unsharded(reference, make_optimizer(reference), steps, mean_squared_error), strict=True)
    report = Report(implementation(second.strategy.model))  # type: ignore[arg-type]
    for (loss, norm), (expected_loss, expected_norm) in zip(before.steps + after.steps, expected, strict=True):
        report.add("loss", loss, expected_loss)
        report.add("gradient norm", norm, expected_norm)
    report.add_parameters(after.model, reference)
    finish(report)


if __name__ == "__main__":
    main()
