"""Optimizers on sharded parameters: every kind, its state, clipping and scaling, against the same unsharded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tests.harness import Reference, Tolerance, adamw, assert_trains_like, multi_rank
from tests.harness.compare import assert_same, assert_sharded_same, gather, gradients_of
from tests.harness.models import MLP
from tests.harness.shared.optimizers import (
    EVERY_KIND,
    MakeOptimizer,
    Parameters,
    distributed_like,
    loss_of,
    sgd,
    sgd_momentum,
    tolerance_of,
)
from tests.harness.shared.training import CASE, shard, trainable
from tests.multi_rank.optimizers.helpers import FORMS, formed

NORMS = Tolerance(rtol=1e-5, atol=1e-6, reason="a norm over shards is summed in another order than over the whole")


# ---- every kind ----------------------------------------------------------------------------------


def rprop(parameters: Parameters) -> torch.optim.Optimizer:
    """Fails on DTensors: it writes through a mask."""
    return torch.optim.Rprop(parameters, lr=1e-2, foreach=False)


def assert_state_is_sharded(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                assert isinstance(value, DTensor), f"{name} is whole on each rank"
                assert value.placements == parameter.placements, name
                assert value.to_local().shape == parameter.to_local().shape, name


@pytest.mark.full
@multi_rank(2, 4)
@FORMS
@pytest.mark.parametrize("make", [*EVERY_KIND, rprop], ids=lambda f: f.__name__)
def test_every_optimizer_trains_like_the_reference(make: MakeOptimizer, form: str, world_size: int) -> None:
    """Rows are uneven, and some ranks hold none of the last layer."""
    model = shard()
    optimizer = formed(form, make(trainable(model)))
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance_of(make, world_size))
    assert_state_is_sharded(optimizer)


# ---- state is carried over -----------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@FORMS
@pytest.mark.parametrize("make", [make for make in EVERY_KIND if make is not sgd], ids=lambda f: f.__name__)
def test_state_from_before_wrapping_is_carried_over(make: MakeOptimizer, form: str, world_size: int) -> None:
    model = CASE.build()
    optimizer = formed(form, make(trainable(model)))
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    for record in reference.run(2):
        for name, parameter in model.named_parameters():
            parameter.grad = record.gradients[name]
        optimizer.step()
        optimizer.zero_grad()
    shard(CASE, model)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_of(make, world_size))
    assert_state_is_sharded(optimizer)


@multi_rank(2)
@pytest.mark.parametrize("make", [sgd_momentum, adamw], ids=lambda f: f.__name__)
def test_state_is_carried_over_when_parameters_are_assigned(make: MakeOptimizer) -> None:
    model = shard()
    optimizer = make(trainable(model))
    reference = Reference(CASE, world_size=2, make_optimizer=make)
    assert_trains_like(reference, model, optimizer, steps=2)
    other = CASE.build(seed=1)
    with torch.no_grad():
        for mine, value in zip(reference.model.parameters(), other.parameters(), strict=True):
            mine.copy_(value)
    model.load_state_dict(distributed_like(model, other), assign=True)
    assert_trains_like(reference, model, optimizer, steps=2)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("made", ["before_wrapping", "while_unsharded"])
def test_an_optimizer_finds_parameters_through_two_replacements(made: str) -> None:
    """What it was built on became sharded parameters, and others were assigned in their place."""
    model = CASE.build()
    originals = trainable(model)
    shard(CASE, model)
    if made == "while_unsharded":
        model.unshard()
        originals = trainable(model)
        model.reshard()
    model.load_state_dict(distributed_like(model, CASE.build()), assign=True)
    assert_trains_like(Reference(CASE, world_size=2), model, adamw(originals), steps=2)


@multi_rank(2)
@pytest.mark.parametrize("built", ["before_wrapping", "while_unsharded", "after_wrapping"])
@pytest.mark.parametrize("api", ["sharded", "full", "its own"])
def test_resuming_into_an_optimizer_that_has_not_stepped(api: str, built: str) -> None:
    """The checkpoint is loaded while the optimizer may hold parameters that are no longer the model's."""
    options = StateDictOptions(full_state_dict=api == "full")
    model = shard()
    optimizer = adamw(trainable(model))
    reference = Reference(CASE, world_size=2)
    assert_trains_like(reference, model, optimizer, steps=2)
    states = [model.state_dict(), optimizer.state_dict()]
    if api != "its own":
        states = list(copy.deepcopy(get_state_dict(model, optimizer, options=options)))
    if api == "full":  # which rank 0 alone has
        dist.broadcast_object_list(states)
    second = CASE.build(seed=1)
    if built == "before_wrapping":
        second_optimizer = adamw(trainable(second))
        shard(CASE, second)
    else:
        shard(CASE, second)
        if built == "while_unsharded":
            second.unshard()
        second_optimizer = adamw(trainable(second))
        second.reshard()
    if api == "its own":
        second_optimizer.load_state_dict(states[1])
        second.load_state_dict(states[0])
    else:
        loaded = {"model_state_dict": states[0], "optim_state_dict": states[1]}
        set_state_dict(second, second_optimizer, **loaded, options=options)
    assert_trains_like(reference, second, second_optimizer, steps=2)


# ---- norms ---------------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(norm_type: float, foreach: bool, world_size: int) -> None:
    """The model has rows for every rank, since torch has no maximum of an empty shard."""
    model, plain = shard(MLP), MLP.build()
    loss_of(MLP, model).backward()
    record = Reference(MLP, world_size=world_size).step()
    for name, parameter in plain.named_parameters():
        parameter.grad = record.gradients[name]
    limit = 0.03125
    norms = [
        nn.utils.clip_grad_norm_(each.parameters(), limit, norm_type=norm_type, foreach=foreach)
        for each in (model, plain)
    ]
    assert_same("norm", {"total": gather(norms[0])}, {"total": norms[1]}, tolerance=NORMS)
    assert norms[1] > limit, "the gradients were clipped"
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("clipped gradients", gradients_of(model), expected, tolerance=NORMS)


@pytest.mark.full
@multi_rank(2)
def test_clip_grad_value() -> None:
    model = shard()
    loss_of(CASE, model).backward()
    record = Reference(CASE, world_size=2).step()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    expected = {name: g if g is None else g.clamp(-0.01, 0.01) for name, g in record.gradients.items()}
    assert_sharded_same("clipped gradients", gradients_of(model), expected)


# ---- written without an optimizer ----------------------------------------------------------------


def in_place(parameters: Parameters) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


def through_data(parameters: Parameters) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.5)


def through_foreach(parameters: Parameters) -> None:
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.5)


def by_copy(parameters: Parameters) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter * 0.5)


@multi_rank(2)
@pytest.mark.parametrize("write", [in_place, through_data, through_foreach, by_copy], ids=lambda f: f.__name__)
def test_an_evaluation_after_a_write_sees_it(write: Callable[[Parameters], None]) -> None:
    """Swapping in averaged weights between two evaluations."""
    model, plain = shard(), CASE.build()
    pairs = [(each, list(each.parameters())) for each in (model, plain)]
    losses = []
    for each, parameters in pairs:
        with torch.no_grad():
            loss_of(CASE, each)
        write(parameters)
        with torch.no_grad():
            losses.append(loss_of(CASE, each))
    assert_same("loss", {"loss": losses[0]}, {"loss": losses[1]})


# ---- GradScaler ----------------------------------------------------------------------------------


@multi_rank(2, 4)
def test_grad_scaler_skips_on_every_rank_if_one_overflows(world_size: int) -> None:
    """The infinity lies in one row of one parameter, so in one rank's shard only."""
    model = shard()
    optimizer = adamw(trainable(model))
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(CASE, model)).backward()
    gradient = model[0].weight.grad
    if dist.get_rank() == world_size - 1:
        gradient.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
