"""Sharded training equals the unsharded reference: every model, microbatches, gradients that some ranks lack."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, tolerance_for
from tests.harness.models import MLP, MODEL_CASES, PARTLY_USED, TRANSFORMER, ModelCase
from tests.harness.reference import Accumulation, Reference, adamw
from tests.harness.shared.training import STEPS, loss_on, shard, train_custom, trainable
from tests.harness.training import assert_trains_like


@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_training_equals_the_reference(case: ModelCase, reshard_after_forward: bool | None, world_size: int) -> None:
    """Bit by bit on two ranks, unless it is clipped."""
    model = shard(case, reshard_after_forward=reshard_after_forward)
    clips = reshard_after_forward is None
    assert_trains_like(
        Reference(case, world_size=world_size, max_norm=0.5 if clips else None),
        model,
        adamw(trainable(model)),
        steps=STEPS,
        # The norm over shards adds up in another order than the norm over whole tensors.
        tolerance=SUM_ORDER if clips else tolerance_for(world_size),
    )


@pytest.mark.full
@multi_rank(2, full=[4])  # full: 12 s
@pytest.mark.parametrize("accumulation", list(Accumulation), ids=lambda each: each.name)
@pytest.mark.parametrize("case", [TRANSFORMER, PARTLY_USED], ids=str)
def test_three_microbatches(case: ModelCase, accumulation: Accumulation, world_size: int) -> None:
    model = shard(case, case.build())
    assert isinstance(model, FSDPModule)

    def before_forward(micro: int) -> None:
        if accumulation is Accumulation.REDUCE_LAST:
            model.set_requires_gradient_sync(micro == 2)
            model.set_is_last_backward(micro == 2)
            model.set_reshard_after_backward(micro == 2)

    assert_trains_like(
        Reference(case, world_size=world_size, microbatches=3, accumulation=accumulation),
        model,
        adamw(trainable(model)),
        steps=STEPS,
        tolerance=tolerance_for(world_size),
        before_forward=before_forward,
    )


@pytest.mark.full
@multi_rank(2)
def test_a_gradient_that_is_none_stays_none(world_size: int) -> None:
    class Ignoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.linear(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(32, 32)
            self.block = Ignoring()
            self.last = nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.block(torch.tanh(x).requires_grad_(), self.encoder(x)))

    case = ModelCase("ignoring", Model, MLP.make_batch, ("block",), MLP.loss_of)
    train_custom(case, world_size, lambda model, step, rank: loss_on(case, model, step, rank), steps=3)


@multi_rank(2)
def test_list_of_modules_of_which_some_are_called(world_size: int) -> None:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.last = nn.Linear(32, 16)
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            for index in ((0, 1, 2), (1,), (2, 0), (), (0, 2, 1, 0))[self.step % 5]:
                x = torch.tanh(self.parts[index](x))
            return self.last(x)

    case = ModelCase("some", Some, MLP.make_batch, (), MLP.loss_of)

    def wrap(case: ModelCase, model: nn.Module) -> nn.Module:
        fully_shard(list(model.parts))
        return fully_shard(model)

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        model.step = step
        loss = loss_on(case, model, step, rank)
        if isinstance(model, FSDPModule):
            assert isinstance(model.parts[0].weight, DTensor)
        return loss

    train_custom(case, world_size, loss_of, wrap=wrap)


@pytest.mark.full
@multi_rank(2)
def test_parameters_kept_unsharded_across_a_step_are_gathered_again(world_size: int) -> None:
    case, model = TRANSFORMER, shard(TRANSFORMER)
    model.set_reshard_after_backward(False)
    optimizer, reference = adamw(trainable(model)), Reference(case, world_size=world_size)
    for step in range(4):
        loss_on(case, model, step, dist.get_rank()).backward()
        assert not isinstance(model.blocks[0].attention.qkv.weight, DTensor)
        record = reference.step()
        optimizer.step()
        optimizer.zero_grad()
        assert_sharded_same(f"parameters after step {step}", model.state_dict(), record.parameters)


@pytest.mark.full
@multi_rank(2)
def test_gradient_of_an_input_and_frozen_everything(world_size: int) -> None:
    case = MLP
    model = case.build().requires_grad_(False)
    plain = case.build().requires_grad_(False)
    shard(case, model)
    for step in range(3):
        batch = case.batch(0, step, dist.get_rank())
        gradients = []
        for each in (model, plain):
            inputs = batch.inputs.clone().requires_grad_()
            each(inputs).square().sum().backward()
            gradients += [inputs.grad, *torch.autograd.grad(each(inputs).square().sum(), [inputs])]
        assert all(torch.equal(gradients[0], each) for each in gradients[1:])


@pytest.mark.full
@multi_rank(2)
def test_a_gradient_missing_on_one_rank_counts_as_zero(world_size: int) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Linear(32, 16)
            self.sometimes = nn.Linear(32, 16)
            self.never = nn.Linear(32, 16)
            self.use = True

        def forward(self, x: Tensor) -> Tensor:
            return self.always(x) + self.sometimes(x) if self.use else self.always(x)

    case = ModelCase("gate", Gate, MLP.make_batch, (), MLP.loss_of)

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        model.use = rank == step % 2
        return loss_on(case, model, step, rank)

    train_custom(case, world_size, loss_of)
