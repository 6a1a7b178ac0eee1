"""Shards a model case and trains it beside an unsharded copy: what most tests of `tests/multi_rank` begin with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import fully_shard
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of, parameters_of, tolerance_for
from tests.harness.models import UNEVEN_MLP, ModelCase
from tests.harness.reference import adamw

STEPS = 10

# The root owns the parameters of "4", so that it has a group that stays unsharded between forward and backward.
CASE = dataclasses.replace(UNEVEN_MLP, name="root_owns_the_last_layer", unit_names=("0", "2"))


def shard(
    case: ModelCase = CASE, model: nn.Module | None = None, *, reshard_after_forward: bool | None = None
) -> nn.Module:
    """``model``, or a new one, sharded bottom-up as ``case`` says."""
    model = case.build() if model is None else model
    for unit in case.units(model):
        fully_shard(unit, reshard_after_forward=reshard_after_forward)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is given."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_custom(
    case: ModelCase,
    world_size: int,
    loss_of: Callable[[nn.Module, int, int], Tensor],
    *,
    steps: int = STEPS,
    wrap: Callable[[ModelCase, nn.Module], nn.Module] = shard,
    exact: bool = True,
) -> None:
    """Compare with a reference whose loss is ``loss_of(model, step, rank)``; bitwise on 2 ranks if ``exact``."""
    model, plain = wrap(case, case.build()), case.build()
    optimizer, reference_optimizer = adamw(trainable(model)), adamw(trainable(plain))
    tolerance = tolerance_for(world_size) if exact else SUM_ORDER
    for step in range(steps):
        loss_of(model, step, dist.get_rank()).backward()
        parameters = dict(plain.named_parameters())
        totals: dict[str, Tensor | None] = dict.fromkeys(parameters)
        for rank in range(world_size):
            plain.zero_grad()
            loss_of(plain, step, rank).backward()
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    total = totals[name]
                    totals[name] = parameter.grad if total is None else total + parameter.grad
        for name, total in totals.items():
            parameters[name].grad = None if total is None else total / world_size
        expected = {name: parameter.grad for name, parameter in parameters.items()}
        assert_sharded_same(f"gradients in step {step}", gradients_of(model), expected, tolerance=tolerance)
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
        assert_sharded_same(
            f"parameters after step {step}",
            parameters_of(model),
            {name: parameter.detach() for name, parameter in parameters.items()},
            tolerance=tolerance,
        )


def loss_on(case: ModelCase, model: nn.Module, step: int, rank: int, micro: int = 0) -> Tensor:
    """The loss of ``case`` for the batch of that step, rank and microbatch."""
    return case.loss(model, case.batch(0, step, rank, micro))
