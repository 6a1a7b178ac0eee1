"""Optimizers built at any moment, before, while and after wrapping, against the same optimizer unsharded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, FSDPRuntimeError, fully_shard
from tests.harness import Reference, Tolerance, adamw, assert_trains_like, multi_rank
from tests.harness.compare import assert_sharded_same, gradients_of, parameters_of
from tests.harness.models import FROZEN, TIED, ModelCase
from tests.harness.shared.optimizers import (
    MakeOptimizer,
    Parameters,
    adagrad,
    copy_values,
    distributed_like,
    local_like,
    loss_of,
    sgd,
    sgd_momentum,
    tolerance_of,
    two_groups,
)
from tests.harness.shared.training import CASE, shard, trainable

# ---- built at any moment -------------------------------------------------------------------------
# Each function brings a new model to the end of its first backward, and builds the optimizer on the way.

Built = tuple[nn.Module, torch.optim.Optimizer]


def before_wrapping(case: ModelCase, make: MakeOptimizer) -> Built:
    model = case.build()
    optimizer = make(trainable(model))
    shard(case, model)
    loss_of(case, model).backward()
    return model, optimizer


def after_wrapping(case: ModelCase, make: MakeOptimizer) -> Built:
    model = shard(case)
    optimizer = make(trainable(model))
    loss_of(case, model).backward()
    return model, optimizer


def while_wrapping(case: ModelCase, make: MakeOptimizer) -> Built:
    """After the blocks, before the root."""
    model = case.build()
    *blocks, root = case.units(model)
    for block in blocks:
        fully_shard(block)
    optimizer = make(trainable(model))
    fully_shard(root)
    loss_of(case, model).backward()
    return model, optimizer


def after_evaluation_forward(case: ModelCase, make: MakeOptimizer) -> Built:
    model = shard(case)
    with torch.no_grad():
        loss_of(case, model, step=7)
    optimizer = make(trainable(model))
    optimizer.zero_grad()
    loss_of(case, model).backward()
    return model, optimizer


def after_inference_forward(case: ModelCase, make: MakeOptimizer) -> Built:
    model = shard(case)
    with torch.inference_mode():
        loss_of(case, model, step=7)
    optimizer = make(trainable(model))
    loss_of(case, model).backward()
    return model, optimizer


def between_forward_and_backward(case: ModelCase, make: MakeOptimizer) -> Built:
    model = shard(case)
    loss = loss_of(case, model)
    optimizer = make(trainable(model))
    optimizer.zero_grad()
    loss.backward()
    return model, optimizer


def after_backward(case: ModelCase, make: MakeOptimizer) -> Built:
    model = shard(case)
    loss_of(case, model).backward()
    return model, make(trainable(model))


def after_backward_that_keeps_parameters(case: ModelCase, make: MakeOptimizer) -> Built:
    model = shard(case)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    loss_of(case, model).backward()
    optimizer = make(trainable(model))
    model.set_reshard_after_backward(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model, optimizer


def while_two_groups_are_unsharded(case: ModelCase, make: MakeOptimizer) -> Built:
    model = shard(case)
    model.unshard()
    model[0].unshard()
    optimizer = make(trainable(model))
    loss_of(case, model).backward()
    return model, optimizer


def before_wrapping_on_meta(case: ModelCase, make: MakeOptimizer) -> Built:
    with torch.device("meta"):
        model = case.make_model()
    optimizer = make(trainable(model))
    shard(case, model)
    model.to_empty(device="cpu")
    copy_values(case.build(), model)
    loss_of(case, model).backward()
    return model, optimizer


def before_assigning(case: ModelCase, make: MakeOptimizer) -> Built:
    model = shard(case, case.build(seed=1))
    optimizer = make(trainable(model))
    model.load_state_dict(distributed_like(model, case.build()), assign=True)
    loss_of(case, model).backward()
    return model, optimizer


MOMENTS = [
    before_wrapping,
    while_wrapping,
    after_wrapping,
    after_evaluation_forward,
    after_inference_forward,
    between_forward_and_backward,
    after_backward,
    after_backward_that_keeps_parameters,
    while_two_groups_are_unsharded,
    before_wrapping_on_meta,
    before_assigning,
]


def finish_step(
    reference: Reference, model: nn.Module, optimizer: torch.optim.Optimizer, tolerance: Tolerance | None
) -> None:
    """What `assert_trains_like` does after backward."""
    record = reference.step()
    at = f"in step {record.step}"
    assert_sharded_same(f"gradients {at}", gradients_of(model), record.gradients, tolerance=tolerance)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_sharded_same(f"parameters {at}", parameters_of(model), record.parameters, tolerance=tolerance)


def check_moment(moment: Callable[..., Built], case: ModelCase, make: MakeOptimizer) -> None:
    world_size = dist.get_world_size()
    model, optimizer = moment(case, make)
    tolerance = tolerance_of(make, world_size)
    reference = Reference(case, world_size=world_size, make_optimizer=make)
    finish_step(reference, model, optimizer, tolerance)  # the optimizer is re-keyed here
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, trainable(model)))
    for step in (1, 2):
        loss_of(case, model, step).backward()
        finish_step(reference, model, optimizer, tolerance)


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", [two_groups, adagrad], ids=lambda f: f.__name__)
def test_built_at_any_moment(moment: Callable[..., Built], make: MakeOptimizer) -> None:
    """Also an optimizer that has state from its construction on; on meta that would stay, plain or not."""
    check_moment(moment, CASE, two_groups if moment is before_wrapping_on_meta else make)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("case", [TIED, FROZEN], ids=str)
@pytest.mark.parametrize(
    "moment", [before_wrapping, between_forward_and_backward, before_assigning], ids=lambda f: f.__name__
)
def test_built_at_any_moment_for_other_models(moment: Callable[..., Built], case: ModelCase) -> None:
    check_moment(moment, case, sgd_momentum)


@multi_rank(2)
def test_an_optimizer_from_before_wrapping_lets_go_of_the_whole_parameters() -> None:
    model = CASE.build()
    optimizer = adamw(trainable(model))
    originals = [weakref.ref(parameter) for parameter in model.parameters()]
    shard(CASE, model)
    loss_of(CASE, model).backward()
    optimizer.step()
    gc.collect()
    assert [original() for original in originals] == [None] * len(originals)


@multi_rank(2)
def test_a_parameter_held_twice_is_an_error() -> None:
    model = CASE.build()
    before = trainable(model)
    shard(CASE, model)
    optimizer = sgd(before)
    optimizer.add_param_group({"params": trainable(model)})
    loss_of(CASE, model).backward()
    with pytest.raises(FSDPRuntimeError, match=r"'0\.weight' twice.*after fully_shard"):
        optimizer.step()


@pytest.mark.full
@multi_rank(2)
def test_parameters_added_to_the_optimizer_later() -> None:
    """Unfreezing in the middle, from unsharded parameters: the guard looks again when a group is added."""

    def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 1e-3})

    model, plain = shard(), CASE.build()
    optimizer = adamw([*model[0].parameters(), *model[2].parameters()])

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        return adamw([*plain[0].parameters(), *plain[2].parameters()])

    reference = Reference(CASE, world_size=2, model=plain, make_optimizer=make)
    assert_trains_like(reference, model, optimizer, steps=1)
    model.zero_grad()  # the optimizer did not, for parameters that it does not have
    model.unshard()
    assert not isinstance(model[4].weight, DTensor)
    unfreeze(model, optimizer)
    unfreeze(plain, reference.optimizer)
    model.reshard()
    assert_trains_like(reference, model, optimizer, steps=2)


# ---- schedules -----------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("moment", [before_wrapping, between_forward_and_backward], ids=lambda f: f.__name__)
@pytest.mark.parametrize("flat", [None, False, True], ids=["plain", "each", "flat"])
def test_learning_rate_schedules(flat: bool | None, moment: Callable[..., Built]) -> None:
    schedules: list[torch.optim.lr_scheduler.LRScheduler] = []

    def make(parameters: Parameters, flat: bool | None = None) -> torch.optim.Optimizer:
        optimizer = two_groups(parameters)
        if flat is not None:
            optimizer = local_like(optimizer, flat=flat)
        schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        return optimizer

    model, optimizer = moment(CASE, partial(make, flat=flat))
    reference = Reference(CASE, world_size=2, make_optimizer=make)
    finish_step(reference, model, optimizer, None)
    for step in range(3):
        for each in schedules:
            each.step()
        assert optimizer.param_groups[1]["lr"] == 3e-3 / 2 ** (step + 1), "the schedule moved"
        assert_trains_like(reference, model, optimizer, steps=1)
