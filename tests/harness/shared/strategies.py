"""Trains a model under a strategy and in microbatches, beside the reference: shared by the tests of strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from tests.harness.compare import Tolerance
from tests.harness.models import ModelCase
from tests.harness.reference import Accumulation, Reference, adamw
from tests.harness.shared.training import loss_on, trainable
from tests.harness.training import assert_trains_like

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
SHARDING = STRATEGIES[1:]
HOW = {
    "one": (1, Accumulation.REDUCE_EACH),
    "no_sync": (3, Accumulation.REDUCE_LAST),
    "each": (3, Accumulation.REDUCE_EACH),
}


def shard(case: ModelCase, strategy: str | None, model: Any = None, **options: Any) -> Any:
    """``model``, or a new one, sharded bottom-up as ``case`` says."""
    model = case.build() if model is None else model
    for unit in case.units(model):
        fully_shard(unit, strategy=strategy, **options)  # type: ignore[arg-type]
    return model


def run_microbatches(case: ModelCase, model: Any, how: str, step: int, rank: int) -> None:
    """The forwards and backwards of one step, ``how`` being one of `HOW`."""
    count, accumulation = HOW[how]
    for micro in range(count):
        model.set_requires_gradient_sync(accumulation is Accumulation.REDUCE_EACH or micro == count - 1)
        loss_on(case, model, step, rank, micro).backward()


def reference_for(case: ModelCase, world_size: int, how: str, **options: Any) -> Reference:
    """A reference of as many microbatches."""
    count, accumulation = HOW[how]
    return Reference(case, world_size=world_size, microbatches=count, accumulation=accumulation, **options)


def train(
    reference: Reference,
    model: Any,
    *,
    how: str,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
    tolerance: Tolerance | None = None,
    rank: int | None = None,
    before: Callable[[int], None] = lambda step: None,
) -> torch.optim.Optimizer:
    """Train ``model`` beside ``reference``, which accumulates ``how`` it does; ``before`` each step."""
    optimizer = adamw(trainable(model)) if optimizer is None else optimizer
    count, accumulation = HOW[how]

    def before_forward(micro: int) -> None:
        if micro == 0:
            before(reference.steps_done - 1)
        model.set_requires_gradient_sync(accumulation is Accumulation.REDUCE_EACH or micro == count - 1)

    def after_backward(micro: int) -> None:
        at_rest = all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert at_rest or micro < count - 1

    assert_trains_like(
        reference,
        model,
        optimizer,
        steps=steps,
        tolerance=tolerance,
        before_forward=before_forward,
        after_backward=after_backward,
        compares_losses=reference.param_dtype is None,
        rank=rank,
    )
    return optimizer
