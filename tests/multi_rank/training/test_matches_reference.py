"""Sharded training equals the unsharded reference: every model, every way of running it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_same, assert_sharded_same, tolerance_for
from tests.harness.models import CONV, FROZEN, MLP, MODEL_CASES, PARTLY_USED, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.reference import Accumulation, Reference, adamw
from tests.harness.shared.training import STEPS, loss_on, shard, train_custom, trainable
from tests.harness.training import assert_trains_like


@pytest.mark.every_combination
@multi_rank(2, 4)
@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_training_equals_the_reference(case: ModelCase, world_size: int) -> None:
    model = shard(case, case.build())
    assert_trains_like(
        Reference(case, world_size=world_size, max_norm=0.5),
        model,
        adamw(trainable(model)),
        steps=STEPS,
        tolerance=SUM_ORDER,  # the norm over shards adds up in another order than the norm over whole tensors
    )


@multi_rank(2, full=[4])  # full: 6 s
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_resharding_or_not_is_bitwise_equal(case: ModelCase, reshard_after_forward: bool, world_size: int) -> None:
    model = shard(case, case.build(), reshard_after_forward=reshard_after_forward)
    assert_trains_like(
        Reference(case, world_size=world_size),
        model,
        adamw(trainable(model)),
        steps=4,
        tolerance=tolerance_for(world_size),
    )


@multi_rank(2, full=[4])  # full: 12 s
@pytest.mark.parametrize("accumulation", list(Accumulation), ids=lambda each: each.name)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TRANSFORMER, FROZEN, PARTLY_USED], ids=str)
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


@multi_rank(2, full=[4])  # full: 5 s
@pytest.mark.parametrize("case", [UNEVEN_MLP, TRANSFORMER, CONV, TIED], ids=str)
def test_two_forwards_before_one_backward(case: ModelCase, world_size: int) -> None:
    train_custom(
        case,
        world_size,
        lambda model, step, rank: loss_on(case, model, step, rank, 0) + loss_on(case, model, step, rank, 1),
    )


@multi_rank(2)
def test_one_forward_one_backward_interleaved_like_a_pipeline(world_size: int) -> None:
    case = TRANSFORMER

    class Both:
        def __init__(self, losses: list[Tensor]) -> None:
            self.losses = losses

        def backward(self) -> None:
            for loss in self.losses:
                loss.backward()

    train_custom(
        case,
        world_size,
        lambda model, step, rank: Both([loss_on(case, model, step, rank, m) for m in range(2)]),  # type: ignore[arg-type,return-value]
        steps=4,
        exact=False,  # two backwards are two reductions; the reference averages over ranks once
    )


class Repeated(nn.Module):
    """Calls one block three times, and another module's block once more out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.block = nn.Sequential(nn.Linear(32, 45), nn.GELU(), nn.Linear(45, 32))
        self.last = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.last(self.first(x))


REPEATED = ModelCase("repeated", Repeated, MLP.make_batch, ("first", "block", "last"), MLP.loss_of)


@multi_rank(2, 4)
def test_modules_called_several_times(world_size: int) -> None:
    train_custom(REPEATED, world_size, lambda model, step, rank: loss_on(REPEATED, model, step, rank))


@multi_rank(2, 4)
def test_list_of_modules_is_one_group(world_size: int) -> None:
    def wrap(case: ModelCase, model: nn.Module) -> nn.Module:
        fully_shard([model[0], model[2]])
        return fully_shard(model)

    train_custom(UNEVEN_MLP, world_size, lambda model, step, rank: loss_on(UNEVEN_MLP, model, step, rank), wrap=wrap)


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
            assert isinstance(model.parts[0].weight, torch.distributed.tensor.DTensor)
        return loss

    train_custom(case, world_size, loss_of, wrap=wrap)


@multi_rank(2)
def test_evaluation_between_training_steps(world_size: int) -> None:
    case = TRANSFORMER

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        with torch.no_grad():
            first = loss_on(case, model, step, rank, 1)
        with torch.inference_mode():
            second = loss_on(case, model, step, rank, 1)
        unused = loss_on(case, model, step, rank, 1)  # with gradients, but no backward
        assert_same("losses", {"inference": second, "grad": unused.detach()}, {"inference": first, "grad": first})
        return loss_on(case, model, step, rank, 0)

    train_custom(case, world_size, loss_of, steps=4)


@multi_rank(2)
def test_kept_outputs_of_an_evaluation_with_gradients(world_size: int) -> None:
    case = TRANSFORMER
    kept: list[Tensor] = []

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        kept.append(loss_on(case, model, step, rank, 1))
        return loss_on(case, model, step, rank, 0)

    train_custom(case, world_size, loss_of, steps=4)


@multi_rank(2)
def test_manual_unshard_and_reshard(world_size: int) -> None:
    case = TRANSFORMER

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        if isinstance(model, FSDPModule):
            model.unshard()  # the outermost module first: it becomes the root
            handle = model.blocks[1].unshard(async_op=True)
            model.blocks[0].unshard()
            assert not isinstance(model.blocks[0].attention.qkv.weight, torch.distributed.tensor.DTensor)
            assert handle is not None
            handle.wait()
            handle.wait()
            if step % 2:
                model.blocks[0].reshard()
                model.blocks[0].reshard()
        return loss_on(case, model, step, rank)

    train_custom(case, world_size, loss_of, steps=4)


@multi_rank(2)
def test_parameters_kept_unsharded_across_a_step_are_gathered_again(world_size: int) -> None:
    case = TRANSFORMER

    def wrap(case: ModelCase, model: nn.Module) -> nn.Module:
        shard(case, model)
        model.set_reshard_after_backward(False)
        return model

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        return loss_on(case, model, step, rank)

    model, plain = wrap(case, case.build()), case.build()
    optimizer, reference = adamw(trainable(model)), Reference(case, world_size=world_size, model=plain)
    for step in range(4):
        loss_of(model, step, dist.get_rank()).backward()
        assert not isinstance(model.blocks[0].attention.qkv.weight, torch.distributed.tensor.DTensor)
        record = reference.step()
        optimizer.step()
        optimizer.zero_grad()
        model_state = {name: value for name, value in model.state_dict().items()}
        assert_sharded_same(f"parameters after step {step}", model_state, record.parameters)


@multi_rank(2, 4)
def test_order_of_modules_that_changes_every_step(world_size: int) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
            self.last = nn.Linear(32, 16)
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            order = torch.randperm(5, generator=torch.Generator().manual_seed(self.step))
            for index in order[: 3 + self.step % 3].tolist():
                x = torch.tanh(self.layers[index](x))
            return self.last(x)

    case = ModelCase("shuffled", Shuffled, MLP.make_batch, tuple(f"layers.{index}" for index in range(5)), MLP.loss_of)

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        model.step = step
        return loss_on(case, model, step, rank)

    train_custom(case, world_size, loss_of)


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
            gradients.append(inputs.grad)
        assert torch.equal(*gradients)


@multi_rank(2)
def test_autograd_grad_leaves_no_gradient(world_size: int) -> None:
    case = MLP
    model, plain = shard(case, case.build()), case.build()
    for step in range(3):
        batch = case.batch(0, step, dist.get_rank())
        found = []
        for each in (model, plain):
            inputs = batch.inputs.clone().requires_grad_()
            found.extend(torch.autograd.grad(each(inputs).square().sum(), [inputs]))
        assert torch.equal(*found)
        assert all(parameter.grad is None for parameter in model.parameters())


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
