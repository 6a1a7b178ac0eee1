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

from tests.harness import Reference, Tolerance, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import assert_same, assert_sharded_same, gather, gradients_of, parameters_of
from tests.harness.models import FROZEN, MLP, TIED, TRANSFORMER, ModelCase
from tests.harness.reference import StepRecord
from tests.harness.shared.optimizers import (
    EVERY_KIND,
    MakeOptimizer,
    Parameters,
    adamw_for_loop,
    adamw_foreach,
    adamw_fused,
    distributed_like,
    loss_of,
    sgd,
    sgd_momentum,
    tolerance_of,
)
from tests.harness.shared.training import CASE, shard, trainable

NORMS = Tolerance(rtol=1e-5, atol=1e-6, reason="a norm over shards is summed in another order than over the whole")


# ---- every kind ----------------------------------------------------------------------------------


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
@pytest.mark.parametrize("make", EVERY_KIND, ids=lambda f: f.__name__)
def test_every_optimizer_trains_like_the_reference(make: MakeOptimizer, world_size: int) -> None:
    model = shard()
    optimizer = make(trainable(model))
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance_of(make, world_size))
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                assert isinstance(value, DTensor), f"{name} is whole: {world_size} times the memory"


@multi_rank(2)
@pytest.mark.parametrize(
    ("case", "make"),
    [(TRANSFORMER, adamw_foreach), (TRANSFORMER, adamw_fused), (TIED, sgd_momentum), (FROZEN, adamw_for_loop)],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_other_models(case: ModelCase, make: MakeOptimizer) -> None:
    model = shard(case)
    reference = Reference(case, world_size=2, make_optimizer=make)
    assert_trains_like(reference, model, make(trainable(model)), steps=2, tolerance=tolerance_of(make, 2))


# ---- state is carried over -----------------------------------------------------------------------


def train_unsharded(records: list[StepRecord], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What the reference did, on a plain model."""
    for record in records:
        for name, parameter in model.named_parameters():
            parameter.grad = record.gradients[name]
        optimizer.step()
        optimizer.zero_grad()


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
@pytest.mark.parametrize("make", [make for make in EVERY_KIND if make is not sgd], ids=lambda f: f.__name__)
def test_state_from_before_wrapping_is_carried_over(make: MakeOptimizer, world_size: int) -> None:
    model = CASE.build()
    optimizer = make(trainable(model))
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    train_unsharded(reference.run(2), model, optimizer)
    shard(CASE, model)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_of(make, world_size))
    for parameter in model.parameters():
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                assert isinstance(value, DTensor) and value.to_local().shape == parameter.to_local().shape, name


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
@pytest.mark.parametrize("loaded", ["after_wrapping", "before_wrapping"])
def test_optimizer_state_dict_round_trip(loaded: str) -> None:
    """The optimizer's own state_dict, loaded into an optimizer that holds originals or sharded parameters."""
    model = shard()
    optimizer = adamw(trainable(model))
    reference = Reference(CASE, world_size=2)
    assert_trains_like(reference, model, optimizer, steps=2)
    saved, saved_model = optimizer.state_dict(), model.state_dict()
    second = CASE.build(seed=1)
    if loaded == "before_wrapping":
        second_optimizer = adamw(trainable(second))
        shard(CASE, second)
    else:
        shard(CASE, second)
        second_optimizer = adamw(trainable(second))
    second_optimizer.load_state_dict(saved)
    second.load_state_dict(saved_model)
    assert_trains_like(reference, second, second_optimizer, steps=2)


@multi_rank(2)
@pytest.mark.parametrize("built", ["before_wrapping", "while_unsharded"])
@pytest.mark.parametrize("api", ["sharded", "full"])
def test_resuming_into_an_optimizer_that_has_not_stepped(api: str, built: str) -> None:
    """The checkpoint is loaded while the optimizer still holds parameters that are no longer the model's."""
    options = StateDictOptions(full_state_dict=api == "full")
    model = shard()
    optimizer = adamw(trainable(model))
    reference = Reference(CASE, world_size=2)
    assert_trains_like(reference, model, optimizer, steps=2)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    if api == "full":  # which rank 0 alone has
        states = [model_state, optimizer_state]
        dist.broadcast_object_list(states)
        model_state, optimizer_state = states
    second = CASE.build(seed=1)
    if built == "before_wrapping":
        second_optimizer = adamw(trainable(second))
        shard(CASE, second)
    else:
        shard(CASE, second)
        second.unshard()
        second_optimizer = adamw(trainable(second))
        second.reshard()
    set_state_dict(
        second, second_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
    )
    assert_trains_like(reference, second, second_optimizer, steps=2)


# ---- norms ---------------------------------------------------------------------------------------


def check_clipping(case: ModelCase, norm_type: float, foreach: bool | None, tolerance: Tolerance | None) -> None:
    model, plain = shard(case), case.build()
    loss_of(case, model).backward()
    record = Reference(case, world_size=dist.get_world_size()).step()
    for name, parameter in plain.named_parameters():
        parameter.grad = record.gradients[name]
    limit = 0.03125
    norms = [
        nn.utils.clip_grad_norm_(each.parameters(), limit, norm_type=norm_type, foreach=foreach)
        for each in (model, plain)
    ]
    assert_same("norm", {"total": gather(norms[0])}, {"total": norms[1]}, tolerance=tolerance)
    assert norms[1] > limit, "the gradients were clipped"
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("clipped gradients", gradients_of(model), expected, tolerance=tolerance)


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
def test_clip_grad_norm(norm_type: float, foreach: bool) -> None:
    """Rows are uneven, and some ranks hold none of the last layer."""
    check_clipping(CASE, norm_type, foreach, NORMS)


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm_by_the_largest(foreach: bool, world_size: int) -> None:
    """Of a model with rows for every rank: torch has no maximum of an empty shard."""
    check_clipping(MLP, float("inf"), foreach, tolerance_for(world_size))


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
@pytest.mark.parametrize("case", [TRANSFORMER, TIED, FROZEN], ids=str)
def test_clipped_training(case: ModelCase, world_size: int) -> None:
    model = shard(case)
    reference = Reference(case, world_size=world_size, max_norm=0.25)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=3, tolerance=NORMS)


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


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
def test_grad_scaler(world_size: int) -> None:
    """Scaling by a power of two is exact, so the parameters are the reference's."""
    model = shard()
    optimizer = adamw(trainable(model))
    reference = Reference(CASE, world_size=world_size)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        record = reference.step()
        scaler.scale(loss_of(CASE, model, step)).backward()
        scaler.unscale_(optimizer)
        assert_sharded_same("gradients", gradients_of(model), record.gradients, tolerance=tolerance_for(world_size))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert_sharded_same("parameters", parameters_of(model), record.parameters, tolerance=tolerance_for(world_size))


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
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
