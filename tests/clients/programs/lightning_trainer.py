"""Lightning's Trainer with `ModelParallelStrategy`, through a checkpoint into a second Trainer.

Usage:
    torchrun --nproc-per-node 2 lightning_trainer.py FOLDER [--full-checkpoint]
    torchrun --nproc-per-node 4 lightning_trainer.py FOLDER --tensor-parallel
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from trial import (
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


class Training(lightning.LightningModule):
    """The model, as Lightning takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Model | None = None
        self.steps: list[tuple[float, float]] = []

    def configure_model(self) -> None:
        """Shard, bottom-up. Called after the mesh is there, and maybe again."""
        if self.model is not None:
            return
        self.model = build()
        mesh = self.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
            for block in self.model.blocks:
                parallelize_module(block, mesh["tensor_parallel"], plan)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self.model, mesh=mesh["data_parallel"])

    def training_step(self, _: Tensor) -> Tensor:
        """The loss of this rank's part of the step's batch; Lightning's own order begins anew after a checkpoint."""
        assert self.model is not None
        mesh = self.device_mesh["data_parallel"]
        rows = (part(each, mesh.get_local_rank(), mesh.size()) for each in batch(self.trainer.global_step))
        loss = mean_squared_error(self.model, *rows)
        self.last_loss = mean_over_ranks(loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After the gradients are reduced."""
        self.steps.append((self.last_loss, gradient_norm(self)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """State that a checkpoint must keep."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(options: argparse.Namespace, steps: int, checkpoint: Path | None) -> tuple[lightning.Trainer, Training]:
    """Train until ``steps`` steps have been made, all in all."""
    tensor_parallel = 2 if options.tensor_parallel else 1
    size = 2
    strategy = ModelParallelStrategy(
        data_parallel_size=size,
        tensor_parallel_size=tensor_parallel,
        save_distributed_checkpoint=not options.full_checkpoint,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size * tensor_parallel,
        strategy=strategy,
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
    return trainer, training


def main() -> None:
    """Train, save, go on in another Trainer, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--full-checkpoint", action="store_true")
    parser.add_argument("--tensor-parallel", action="store_true")
    options = parser.parse_args()
    checkpoint = options.folder / "lightning.ckpt"
    first, before = fit(options, STEPS // 2, None)
    first.save_checkpoint(checkpoint)
    _, after = fit(options, STEPS, checkpoint)
    model = after.model
    assert isinstance(model, nn.Module)
    reference = build()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    steps = [batch(step) for step in range(STEPS)]
    expected = zip(*train_unsharded(reference, optimizer, steps, mean_squared_error), strict=True)
    report = Report(implementation(model))
    for (loss, norm), (expected_loss, expected_norm) in zip(before.steps + after.steps, expected, strict=True):
        report.add("loss", loss, expected_loss)
        report.add("gradient norm", norm, expected_norm)
    report.add_parameters(model, reference)
    finish(report)


if __name__ == "__main__":
    main()
