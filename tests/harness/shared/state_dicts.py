"""What the tests of state dicts, checkpoints and conversions share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import adamw
from tests.harness.models import ModelCase
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
