"""Every strategy beside what else changes when parameters are gathered and gradients reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_same, assert_sharded_same, gradients_of, tolerance_for
from tests.harness.models import MLP, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.extensions import FiveArguments
from tests.harness.reference import Accumulation, Reference, adamw
from tests.harness.shared.odd_parameters import ODD
from tests.harness.shared.strategies import HOW, SHARDING, STRATEGIES, reference_for, run_microbatches, shard, train
from tests.harness.shared.training import loss_on, trainable

pytestmark = pytest.mark.full  # 98 tests, about a minute on two cores


class Repeated(nn.Module):
    """One block, called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(32, 32)
        self.last = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.last(x)


class Large(nn.Module):
    """Weights above the size from which they are gathered and reduced without packing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 9001)
        self.last = nn.Linear(9001, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


REPEATED = ModelCase("repeated", Repeated, MLP.make_batch, ("block",), MLP.loss_of)
LARGE = ModelCase("large", Large, MLP.make_batch, ("first",), MLP.loss_of)


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", [REPEATED, LARGE, ODD], ids=str)
def test_other_models(case: ModelCase, strategy: str, how: str, world_size: int) -> None:
    # Microbatches and calls are added up in another order than one process does; so are long rows.
    tolerance = tolerance_for(world_size) if case is ODD else SUM_ORDER
    train(reference_for(case, world_size, how), shard(case, strategy), how=how, steps=2, tolerance=tolerance)


@multi_rank(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_microbatches_that_are_not_reduced_over_replicas(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(UNEVEN_MLP, strategy, mesh=mesh)
    reference = reference_for(UNEVEN_MLP, 4, "each")
    optimizer = adamw(trainable(model))
    for _ in range(2):
        record = reference.step()
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            loss_on(UNEVEN_MLP, model, record.step, dist.get_rank(), micro).backward()
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert_sharded_same("gradients", gradients_of(model), record.gradients, tolerance=SUM_ORDER)
        optimizer.step()
        optimizer.zero_grad()


@multi_rank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backwards_that_the_user_finalizes(strategy: str) -> None:
    model = shard(TRANSFORMER, strategy)
    model.set_manual_backward_finalization(True)
    reference = reference_for(TRANSFORMER, 2, "no_sync")
    for _ in range(2):
        record = reference.step()
        model.set_requires_gradient_sync(False)
        for micro in range(3):
            loss_on(TRANSFORMER, model, 0, dist.get_rank(), micro).backward()
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        if record.step == 0:
            assert_sharded_same("gradients", gradients_of(model), record.gradients)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.zero_grad()


@multi_rank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_iteration_that_fails_amid_accumulation(strategy: str) -> None:
    """What had accumulated is dropped with it; the same step, run again, is right."""
    model = shard(UNEVEN_MLP, strategy)
    model.set_requires_gradient_sync(False)
    loss_on(UNEVEN_MLP, model, 0, dist.get_rank()).backward()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[2].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        loss_on(UNEVEN_MLP, model, 0, dist.get_rank(), 1)
    handle.remove()
    model.reset_iter_state()
    train(reference_for(UNEVEN_MLP, 2, "no_sync"), model, how="no_sync", steps=2)


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
def test_switching_amid_accumulation(world_size: int) -> None:
    """Not what it is for; nothing is lost."""
    model = shard(UNEVEN_MLP, "zero1")
    reference = Reference(UNEVEN_MLP, world_size=world_size, microbatches=3, accumulation=Accumulation.REDUCE_LAST)
    record = reference.step()
    for micro, strategy in enumerate(SHARDING[::-1]):
        model.set_strategy(strategy)
        model.set_requires_gradient_sync(micro == 2)
        loss_on(UNEVEN_MLP, model, 0, dist.get_rank(), micro).backward()
    assert_sharded_same("gradients", gradients_of(model), record.gradients, tolerance=tolerance_for(world_size))


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_between_steps(strategy: str, world_size: int) -> None:
    model, reference = shard(UNEVEN_MLP, strategy), reference_for(UNEVEN_MLP, world_size, "no_sync")
    optimizer = None
    for step in range(3):
        with torch.no_grad():
            losses = [loss_on(UNEVEN_MLP, each, step, 0) for each in (model, reference.model)]
        assert_same("losses", {"": losses[0]}, {"": losses[1]}, tolerance=tolerance_for(world_size))
        optimizer = train(
            reference, model, how="no_sync", optimizer=optimizer, steps=1, tolerance=tolerance_for(world_size)
        )


@multi_rank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tensor_subclass_that_gathers_itself(strategy: str) -> None:
    case = UNEVEN_MLP
    model: Any = case.build()
    model[2].weight = nn.Parameter(FiveArguments(model[2].weight.detach().clone()))
    fully_shard(model, strategy=strategy)  # type: ignore[call-overload]
    record = reference_for(case, 2, "no_sync").step()
    run_microbatches(case, model, "no_sync", 0, dist.get_rank())
    assert_sharded_same("gradients", gradients_of(model), record.gradients)
