"""What the tests of state dicts, checkpoints and conversions share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import adamw
from tests.harness.models import ModelCase
from tests.harness.pool import WorkerPools
from tests.harness.shared.training import CASE

STEPS_BEFORE, STEPS_AFTER = 2, 2


def inputs(case: ModelCase = CASE, step: int = 0) -> Tensor:
    """Of this rank."""
    return case.batch(0, step, dist.get_rank()).inputs


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The usual one, of all parameters that are trained."""
    return adamw([parameter for parameter in model.parameters() if parameter.requires_grad])


def after_training_forward(model: nn.Module) -> object:
    """Leaves the root's own parameters unsharded; the result keeps them so."""
    return model(inputs())  # kept, so that its backward may still come


@contextmanager
def world_of_one(folder: Path) -> Iterator[None]:
    """The test process as the only rank of a gloo world."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_on(pools: WorkerPools, world_size: int, body: Callable[..., None], *args: Any) -> None:
    if world_size > 1:
        pools[world_size].run(body, *args)
        return
    with world_of_one(args[1]):
        body(*args)
