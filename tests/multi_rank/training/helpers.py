"""Gradients of a sharded model beside those of a plain one that sees the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.compare import SUM_ORDER, Tolerance, assert_sharded_same, gradients_of


def differentiate(model: nn.Module, plain: nn.Module, loss_of: Callable[[Any, int], Tensor]) -> None:
    """Adds to the gradients of ``model`` by this rank's loss, and to those of ``plain`` by the mean of all ranks'."""
    loss_of(model, dist.get_rank()).backward()
    for rank in range(dist.get_world_size()):
        (loss_of(plain, rank) / dist.get_world_size()).backward()


def assert_same_gradients(model: nn.Module, plain: nn.Module, what: str = "", tolerance: Tolerance = SUM_ORDER) -> None:
    """The gradients of all parameters; also which of them have none."""
    assert_sharded_same(f"gradients {what}", gradients_of(model), gradients_of(plain), tolerance=tolerance)
