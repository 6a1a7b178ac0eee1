"""`inference`: one gather for many forwards, until weights change; and nothing is left of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import FSDPRuntimeError, inference
from tests.harness import multi_rank
from tests.harness.models import TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import shard
from tests.harness.training import assert_trains_like


def output(case: ModelCase, model: nn.Module, step: int = 0) -> Tensor:
    with torch.no_grad():
        return case.loss(model, case.batch(0, step, 0))


def gathers(mode: CommDebugMode) -> int:
    return sum(n for op, n in mode.get_comm_counts().items() if "gather" in str(op))


@pytest.mark.full
@pytest.mark.parametrize("case", [UNEVEN_MLP, TRANSFORMER], ids=lambda each: each.name)
@pytest.mark.parametrize("reshards", [None, True, False, "fewer"])
@multi_rank(4)
def test_parameters_are_gathered_once_until_weights_change(
    case: ModelCase, reshards: bool | str | None, world_size: int
) -> None:
    model = shard(case, reshard_after_forward=2 if reshards == "fewer" else reshards)  # type: ignore[arg-type]
    plain = case.build()
    optimizer = adamw(list(model.parameters()))
    with inference(model):
        for step in range(3):
            with CommDebugMode() as seen:
                assert torch.equal(output(case, model, step), output(case, plain, step))
            assert bool(gathers(seen)) is (step == 0), "one gather for all"
        for _ in range(2 + dist.get_rank()):  # ranks may differ in how many they run
            output(case, model)
        state = {name: value + 1 if value.is_floating_point() else value for name, value in plain.state_dict().items()}
        plain.load_state_dict(state)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=2)


@multi_rank(2)
def test_a_step_inside_is_seen_by_the_next_forward() -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    sharded = list(model.parameters())
    with inference(model):
        output(UNEVEN_MLP, model)
        with torch.no_grad():
            for each in sharded:
                each.mul_(2)
            for other in plain.parameters():
                other.mul_(2)
        for _ in range(2):
            assert torch.equal(output(UNEVEN_MLP, model), output(UNEVEN_MLP, plain))


@multi_rank(2)
def test_nothing_is_left_after_an_exception() -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    with pytest.raises(OSError, match="no more data"), inference(model):
        output(UNEVEN_MLP, model)
        raise OSError("no more data")
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert torch.equal(output(UNEVEN_MLP, model), output(UNEVEN_MLP, plain))
    assert all(isinstance(each, DTensor) for each in model.parameters()), "the setting is as before"
    with inference(model), inference(nn.ModuleList([model])):
        output(UNEVEN_MLP, model)
    assert all(isinstance(each, DTensor) for each in model.parameters())


@pytest.mark.full
@pytest.mark.parametrize("reshards", [True, False])
@multi_rank(2)
def test_between_a_forward_and_its_backward(reshards: bool) -> None:
    """A forward for a loss, an evaluation, and then the backward: the gradients are those of the loss."""
    model, plain = shard(UNEVEN_MLP, reshard_after_forward=reshards), UNEVEN_MLP.build()
    batch = UNEVEN_MLP.batch(0, 0, 0)
    loss = UNEVEN_MLP.loss(model, batch)
    with inference(model):
        output(UNEVEN_MLP, model, 1)
        output(UNEVEN_MLP, model, 2)
    loss.backward()
    UNEVEN_MLP.loss(plain, batch).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor) and other.grad is not None
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)


@multi_rank(2)
def test_inside_of_a_forward() -> None:
    model = shard(UNEVEN_MLP)

    def enter(*args: object) -> None:
        with inference(model):
            pass

    handle = next(model.children()).register_forward_hook(enter)
    with pytest.raises(FSDPRuntimeError, match="inside of a forward or backward"):
        output(UNEVEN_MLP, model)
    handle.remove()
    output(UNEVEN_MLP, model)


def test_a_module_without_sharded_ones() -> None:
    with pytest.raises(FSDPRuntimeError, match="contains no sharded module"):
        inference(nn.Linear(2, 2))
