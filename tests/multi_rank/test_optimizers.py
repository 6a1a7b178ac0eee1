"""Optimizers on sharded parameters: every kind, built at any moment, against the same optimizer unsharded."""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fsdp2 import FSDPError, FSDPModule, FSDPRuntimeError, fully_shard
from fsdp2.optimizer_guard import GUARD
from tests.harness import Reference, Tolerance, adamw, assert_trains_like, fake_world, multi_rank, tolerance_for
from tests.harness.compare import assert_same, assert_sharded_same, gather, gradients_of, parameters_of
from tests.harness.models import FROZEN, MLP, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.reference import StepRecord

Parameters = list[nn.Parameter]
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]

# The root owns the parameters of "4", so that they are unsharded between forward and backward.
CASE = dataclasses.replace(UNEVEN_MLP, name="root_owns_the_last_layer", unit_names=("0", "2"))
FUSED = Tolerance(rtol=1e-5, atol=1e-7, reason="fused kernels round differently in a vector and in its tail")
NORMS = Tolerance(rtol=1e-5, atol=1e-6, reason="a norm over shards is summed in another order than over the whole")


def shard(case: ModelCase = CASE, model: nn.Module | None = None) -> nn.Module:
    model = case.build() if model is None else model
    for unit in case.units(model):
        fully_shard(unit)
    return model


def loss_of(case: ModelCase, model: nn.Module, step: int = 0) -> Tensor:
    return case.loss(model, case.batch(0, step, dist.get_rank()))


def trainable(model: nn.Module) -> Parameters:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# ---- every kind ----------------------------------------------------------------------------------


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sgd_momentum(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw_foreach(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=True)


def adamw_for_loop(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=False, amsgrad=True)


def adamw_fused(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True)


def adagrad(parameters: Parameters) -> torch.optim.Optimizer:
    """Has state from its construction on."""
    return torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-3)


def rmsprop(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True, eps=1e-3)


def two_groups(parameters: Parameters) -> torch.optim.Optimizer:
    """The usual split: no weight decay on vectors, and another learning rate."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def tolerance_of(make: MakeOptimizer, world_size: int) -> Tolerance | None:
    return FUSED if make is adamw_fused else tolerance_for(world_size)


EVERY_KIND = [sgd, sgd_momentum, adamw_foreach, adamw_for_loop, adamw_fused, adagrad, rmsprop, two_groups]


@multi_rank(2, 4)
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


def distributed_like(model: nn.Module, source: nn.Module) -> dict[str, Tensor]:
    values = source.state_dict()
    return {
        name: distribute_tensor(values[name], target.device_mesh, target.placements, src_data_rank=None)
        for name, target in model.state_dict().items()
    }


def copy_values(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for mine, value in zip(target.parameters(), distributed_like(target, source).values(), strict=True):
            mine.copy_(value)


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


@multi_rank(2)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda f: f.__name__)
def test_built_at_any_moment(moment: Callable[..., Built]) -> None:
    check_moment(moment, CASE, two_groups)


@multi_rank(2)
@pytest.mark.parametrize(
    "moment",
    [moment for moment in MOMENTS if moment is not before_wrapping_on_meta],  # there its state would stay, plain or not
    ids=lambda f: f.__name__,
)
def test_built_with_state_at_any_moment(moment: Callable[..., Built]) -> None:
    check_moment(moment, CASE, adagrad)


@multi_rank(4)
@pytest.mark.parametrize(
    "moment",
    [before_wrapping, between_forward_and_backward, after_backward_that_keeps_parameters, before_assigning],
    ids=lambda f: f.__name__,
)
def test_built_at_any_moment_on_four_ranks(moment: Callable[..., Built]) -> None:
    check_moment(moment, CASE, adamw)


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


# ---- state is carried over -----------------------------------------------------------------------


def train_unsharded(records: list[StepRecord], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What the reference did, on a plain model."""
    for record in records:
        for name, parameter in model.named_parameters():
            parameter.grad = record.gradients[name]
        optimizer.step()
        optimizer.zero_grad()


@multi_rank(2, 4)
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


# ---- schedules -----------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize(
    "moment", [after_wrapping, before_wrapping, between_forward_and_backward], ids=lambda f: f.__name__
)
def test_learning_rate_schedules(moment: Callable[..., Built]) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
            ],
            milestones=[2],
        )

    schedules: list[torch.optim.lr_scheduler.LRScheduler] = []

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        optimizer = two_groups(parameters)
        schedules.append(schedule(optimizer))
        return optimizer

    model, optimizer = moment(CASE, make)
    reference = Reference(CASE, world_size=2, make_optimizer=make)
    finish_step(reference, model, optimizer, None)
    rates = []
    for _ in range(4):
        for each in schedules:
            each.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert_trains_like(reference, model, optimizer, steps=1)
    assert len({tuple(rate) for rate in rates}) == 4, "the schedule moved"


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


@multi_rank(2, 4)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
def test_clip_grad_norm(norm_type: float, foreach: bool) -> None:
    """Rows are uneven, and some ranks hold none of the last layer."""
    check_clipping(CASE, norm_type, foreach, NORMS)


@multi_rank(2, 4)
@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm_by_the_largest(foreach: bool, world_size: int) -> None:
    """Of a model with rows for every rank: torch has no maximum of an empty shard."""
    check_clipping(MLP, float("inf"), foreach, tolerance_for(world_size))


@multi_rank(2, 4)
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


# ---- hooks that step in backward -----------------------------------------------------------------


def step_in_backward(parameters: Parameters, make: MakeOptimizer) -> list[torch.optim.Optimizer]:
    """One optimizer for each parameter, stepped as soon as its gradient is there; no gradient outlives that."""
    optimizers = []
    for parameter in parameters:
        optimizer = make([parameter])
        optimizers.append(optimizer)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return optimizers


@multi_rank(2, 4)
@pytest.mark.parametrize(
    ("case", "make"),
    [(CASE, adamw), (TRANSFORMER, adamw), (TIED, sgd_momentum), (FROZEN, adamw)],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_optimizer_steps_in_backward(make: MakeOptimizer, case: ModelCase, world_size: int) -> None:
    model, tolerance = shard(case), tolerance_for(world_size)
    optimizers = step_in_backward(trainable(model), make)
    reference = Reference(case, world_size=world_size, make_optimizer=make)
    for step in range(3):
        record = reference.step()
        loss, expected = loss_of(case, model, step), record.losses[dist.get_rank()][0]
        assert_same(f"losses {step}", {"loss": loss.detach()}, {"loss": expected}, tolerance=tolerance)
        loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_sharded_same(f"step {step}", parameters_of(model), record.parameters, tolerance=tolerance)
    assert len(optimizers) == len(trainable(model))


@multi_rank(2)
def test_hooks_from_before_wrapping_step_in_backward_too() -> None:
    """If they were dropped, the model would not train, and nothing would say so."""
    model = CASE.build()
    optimizers = step_in_backward(trainable(model), adamw)
    shard(CASE, model)
    reference = Reference(CASE, world_size=2)
    for step in range(2):
        loss_of(CASE, model, step).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_sharded_same(f"step {step}", parameters_of(model), reference.step().parameters)
    assert len(optimizers) == 6


@multi_rank(2)
@pytest.mark.parametrize("registered", ["before_wrapping", "after_wrapping"])
def test_gradient_hooks_are_called_or_refused(registered: str) -> None:
    """`Tensor.register_hook` changes gradients (clipping, masking): to ignore one would train something else."""
    model = CASE.build()
    seen: list[int] = []
    try:
        if registered == "before_wrapping":
            model[0].weight.register_hook(lambda gradient: seen.append(1))
        shard(CASE, model)
        if registered == "after_wrapping":
            model[0].weight.register_hook(lambda gradient: seen.append(1))
        loss_of(CASE, model).backward()
    except FSDPError as error:
        assert "0.weight" in str(error) or "'weight'" in str(error)
        assert "register_post_accumulate_grad_hook" in str(error)
    else:
        assert seen == [1]


@multi_rank(2)
@pytest.mark.parametrize("kept", ["after_forward", "after_backward"])
def test_optimizer_steps_in_backward_while_parameters_stay_unsharded(kept: str) -> None:
    model = shard()
    assert isinstance(model, FSDPModule)
    step_in_backward(trainable(model), adamw)
    if kept == "after_forward":
        model.set_reshard_after_forward(False)
    else:
        model.set_reshard_after_backward(False)
    reference = Reference(CASE, world_size=2)
    for step in range(3):
        loss_of(CASE, model, step).backward()
        record = reference.step()
        assert_sharded_same(f"parameters after step {step}", model.state_dict(), record.parameters)


@multi_rank(2)
def test_hooks_and_attributes_of_a_parameter_survive_wrapping() -> None:
    model = CASE.build()
    seen: list[tuple[int, ...]] = []
    model[0].weight.tag = "kept"
    shard(CASE, model)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    assert model[0].weight.tag == "kept"
    loss_of(CASE, model, 0).backward()
    model.to("cpu")  # conversions swap the parameter's contents
    loss_of(CASE, model, 1).backward()
    assert seen == [(97, 13)] * 2


class Repeated(nn.Module):
    """Calls one block three times and another layer twice: their gradients are complete only after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 13)
        self.block = nn.Sequential(nn.Linear(13, 7), nn.GELU(), nn.Linear(7, 13))
        self.last = nn.Linear(13, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.last(self.first(x))


REPEATED = ModelCase("repeated", Repeated, UNEVEN_MLP.make_batch, ("first", "block"), UNEVEN_MLP.loss_of)


@multi_rank(2)
def test_optimizer_steps_in_backward_of_modules_called_several_times() -> None:
    model = shard(REPEATED)
    optimizers = step_in_backward(trainable(model), adamw)
    reference = Reference(REPEATED, world_size=2)
    for step in range(3):
        loss_of(REPEATED, model, step).backward()
        assert_sharded_same(f"step {step}", parameters_of(model), reference.step().parameters)
    assert len(optimizers) == 8


@multi_rank(2)
def test_a_step_between_forward_and_backward_is_an_error() -> None:
    """As on a plain model, where autograd finds the saved weights modified."""
    model = shard()
    optimizer = adamw(trainable(model))
    loss_of(CASE, model).backward()
    loss = loss_of(CASE, model)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"between a forward and its backward"):
        loss.backward()
    optimizer.zero_grad()
    reference = Reference(CASE, world_size=2)
    copy_values(CASE.build(), model)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=2)


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


# ---- the guard itself ----------------------------------------------------------------------------


def python_calls(function: Callable[[], object]) -> int:
    """Calls of Python and C functions while ``function`` runs."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    function()
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def guard_calls(layers: int, groups: int) -> int:
    """What the guard adds to one step of an optimizer in steady state."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    for index in range(groups - 1):
        fully_shard(model[index])
    fully_shard(model)
    optimizer = sgd(list(model.parameters()))
    model(torch.zeros(2, 4)).sum().backward()
    with_guard = python_calls(optimizer.step)
    GUARD.remove()
    without = python_calls(optimizer.step)
    return with_guard - without


def test_the_guard_costs_nothing_per_parameter() -> None:
    with fake_world(2):
        few, many, more_groups = guard_calls(2, 2), guard_calls(40, 2), guard_calls(40, 10)
    assert few == many, "the same work for 4 and for 80 parameters"
    assert few <= 25
    assert more_groups - many <= 2 * 8, "and next to none per group"


@multi_rank(2)
def test_the_guard_can_be_removed() -> None:
    hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    model = CASE.build()
    originals = trainable(model)
    shard(CASE, model)
    installed = [len(each) for each in hooks]
    GUARD.remove()
    GUARD.remove()
    assert [len(each) for each in hooks] == [count - 1 for count in installed]
    assert_trains_like(Reference(CASE, world_size=2), model, adamw(trainable(model)), steps=2)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    unguarded = sgd(originals)
    loss_of(CASE, model).backward()
    unguarded.step()  # steps on nothing, as it would have without the guard
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    fully_shard(nn.Linear(2, 2))
    fully_shard(nn.Linear(2, 2))
    assert [len(each) for each in hooks] == installed
    unguarded.step()
    assert not all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))


@multi_rank(2)
def test_the_guard_leaves_other_optimizers_alone() -> None:
    shard()
    plain = MLP.build()
    optimizer = adamw(list(plain.parameters()))
    reference = Reference(MLP, world_size=1)
    record = reference.step()
    MLP.loss(plain, MLP.batch(0, 0, 0)).backward()
    optimizer.step()
    assert_same("parameters", dict(plain.named_parameters()), record.parameters)


@multi_rank(2)
def test_the_guard_keeps_no_optimizer_and_no_model_alive() -> None:
    model = shard()
    optimizer = adamw(trainable(model))
    loss_of(CASE, model).backward()
    optimizer.step()
    refs = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(model[4].weight)]
    del optimizer, model
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


# ---- GradScaler ----------------------------------------------------------------------------------


@multi_rank(2, 4)
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
