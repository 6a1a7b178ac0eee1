"""Composer's way to FSDP2: `parallelize_composer_model`, with weights of rank 0 or of every rank.

Usage:
    torchrun --nproc-per-node 2 composer_prepare.py FOLDER [--from-rank-0]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from absent import stand_in_for
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from trial import (
    Model,
    Report,
    batch,
    build,
    finish,
    gradient_norm,
    implementation,
    mean_over_ranks,
    part,
    train_unsharded,
)

stand_in_for("coolname", "cpuinfo", "mcli", "torch_optimizer", "torchvision")

from composer.core import Precision  # noqa: E402
from composer.distributed.prepare_distributed import parallelize_composer_model  # noqa: E402
from composer.models import ComposerModel  # noqa: E402
from composer.utils.parallelism import FSDP2Config  # noqa: E402

STEPS, RATE = 4, 0.2


class Wrapped(ComposerModel):
    """The model, as Composer wants it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        for block in model.blocks:
            block._fsdp_wrap = True

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


def main() -> None:
    """Train both, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from-rank-0", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = build()
    model: Any = build()
    if options.from_rank_0 and rank > 0:
        model = model.to("meta")
    model = Wrapped(model)
    # Built before the model is sharded: Composer hands over the sharded parameters by their names.
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    parallelize_composer_model(model, optimizer, FSDP2Config(verbose=True), precision=Precision.FP32)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    report = Report(implementation(model))
    batches = [batch(step) for step in range(STEPS)]
    losses, norms = train_unsharded(
        reference,
        torch.optim.SGD(reference.parameters(), lr=RATE, momentum=0.5),
        batches,
        lambda whole, inputs, targets: nn.functional.mse_loss(whole(inputs), targets),
    )
    for (inputs, targets), expected, norm in zip(batches, losses, norms, strict=True):
        loss = model.loss(model(part(inputs, rank, size)), part(targets, rank, size))
        loss.backward()
        report.add("loss", mean_over_ranks(loss), expected)
        report.add("gradient norm", gradient_norm(model), norm)
        optimizer.step()
        optimizer.zero_grad()
    report.add_parameters(model.model, reference)
    report.save({name: value.full_tensor() for name, value in model.state_dict().items()})
    finish(report)


if __name__ == "__main__":
    main()
