"""Hooks on sharded parameters, and optimizers that step in backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPError, FSDPNotImplementedError, MixedPrecisionPolicy, fully_shard
from tests.harness import Reference, adamw, multi_rank, tolerance_for
from tests.harness.compare import assert_same, assert_sharded_same, parameters_of
from tests.harness.models import TIED, ModelCase
from tests.harness.shared.optimizers import MakeOptimizer, Parameters, loss_of, sgd_momentum
from tests.harness.shared.training import CASE, shard, trainable


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


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(
    ("case", "make"),
    [(CASE, adamw), (TIED, sgd_momentum)],
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


class TwoDtypes(nn.Module):
    """Two matrices of one group, whose gradients are reduced apart."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.linspace(-1, 1, 15).reshape(5, 3))
        self.wide = nn.Parameter(torch.linspace(-1, 1, 21, dtype=torch.float64).reshape(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.narrow).double() @ self.wide


REDUCED_IN = {"narrow": torch.float64, "wide": torch.float32}
"""Other dtypes than theirs, so that both are copied to where they are delivered before either is."""


@multi_rank(2)
def test_clearing_one_gradient_leaves_those_that_are_still_to_be_delivered() -> None:
    """They have arrived, and are no parameter's yet, when a hook of another one clears what it has."""
    plain, model = TwoDtypes(), TwoDtypes()
    fully_shard(model, mp_policy=lambda name, parameter: MixedPrecisionPolicy(reduce_dtype=REDUCED_IN[name]))
    step_in_backward(trainable(model), sgd_momentum)
    optimizer = sgd_momentum(trainable(plain))
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)) / 10
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other.data, msg=name, rtol=1e-5, atol=1e-6)


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


@pytest.mark.full
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


@multi_rank(2)
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_parameters_is_refused(mode: str, world_size: int) -> None:
    """It counts the nodes of autograd's graph that it waits for, and sharded parameters have none there."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    for unit in (model[0], model):
        fully_shard(unit)
    called: list[object] = []
    handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), called.append, mode=mode)
    with pytest.raises(FSDPNotImplementedError, match=r"given the sharded parameter '.*register_post_accumulate"):
        model(torch.ones(2, 5)).sum().backward()
    handle.remove()
    model.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    assert not called and all(parameter.grad is not None for parameter in model.parameters())
