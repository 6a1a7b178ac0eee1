"""Optimizers that are copied while they hold parameters of before: they find those of the copied model, or say no."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fsdp2 import FSDPRuntimeError, fully_shard, unwrap
from tests.harness import Reference, assert_trains_like, multi_rank, tolerance_for
from tests.harness.shared.state_dicts import inputs
from tests.harness.shared.training import CASE, shard, trainable

Pair = tuple[Any, Optimizer]


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """Its momentum is state that must move along."""
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def built_before(world_size: int) -> tuple[Pair, int]:
    model = CASE.build()
    optimizer = sgd(trainable(model))
    return (shard(model=model), optimizer), 0


def built_while_unsharded(world_size: int) -> tuple[Pair, int]:
    model: Any = shard()
    model.unshard()
    optimizer = sgd(trainable(model))
    model.reshard()
    return (model, optimizer), 0


def trained(world_size: int) -> Pair:
    model = shard()
    optimizer = sgd(trainable(model))
    reference = Reference(CASE, world_size=world_size, make_optimizer=sgd)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_for(world_size))
    return model, optimizer


def unwrapped_and_sharded(world_size: int) -> tuple[Pair, int]:
    model, optimizer = trained(world_size)
    return (shard(model=unwrap(model, optimizers=[optimizer])), optimizer), 2


def unwrapped_behind_its_back_and_sharded(world_size: int) -> tuple[Pair, int]:
    model, optimizer = trained(world_size)
    return (shard(model=unwrap(model)), optimizer), 2


def unwrapped_behind_its_back(world_size: int) -> tuple[Pair, int]:
    model, optimizer = trained(world_size)
    return (unwrap(model), optimizer), 2


def assigned(world_size: int) -> tuple[Pair, int]:
    model, optimizer = trained(world_size)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return (model, optimizer), 2


WAYS: list[Callable[[int], tuple[Pair, int]]] = [
    built_before,
    built_while_unsharded,
    unwrapped_and_sharded,
    unwrapped_behind_its_back_and_sharded,
    unwrapped_behind_its_back,
    assigned,
]


def model_first(model: Any, optimizer: Optimizer) -> Pair:
    return copy.deepcopy((model, optimizer))


def optimizer_first(model: Any, optimizer: Optimizer) -> Pair:
    return copy.deepcopy((optimizer, model))[::-1]


def twice(model: Any, optimizer: Optimizer) -> Pair:
    return copy.deepcopy(copy.deepcopy({"model": model, "optimizer": optimizer})).values()  # type: ignore[return-value]


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 6 s on two cores
@pytest.mark.parametrize("copies", [model_first, optimizer_first, twice])
@pytest.mark.parametrize("way", WAYS)
def test_a_copied_optimizer_trains_the_copied_model(
    way: Callable[[int], tuple[Pair, int]], copies: Callable[..., Pair], world_size: int
) -> None:
    (model, optimizer), steps = way(world_size)
    if way is assigned and copies is optimizer_first:
        model.reshard()  # takes over what was assigned
        fully_shard.state(model).adopt_replaced()
    copied, copied_optimizer = copies(model, optimizer)
    if way is unwrapped_behind_its_back:
        shard(model=copied)
        shard(model=model)
    for each in ((copied, copied_optimizer), (model, optimizer)):
        reference = Reference(CASE, world_size=world_size, make_optimizer=sgd)
        reference.run(steps)
        assert_trains_like(reference, *each, steps=2, tolerance=tolerance_for(world_size))
        held = each[1].param_groups[0]["params"]
        assert all(mine is theirs for mine, theirs in zip(held, trainable(each[0]), strict=True))


@multi_rank(2)
@pytest.mark.parametrize("way", [built_before, unwrapped_and_sharded])
def test_an_optimizer_that_finds_nothing_refuses_to_step(way: Callable[[int], tuple[Pair, int]]) -> None:
    (model, optimizer), _ = way(2)
    alone = copy.deepcopy(optimizer)
    CASE.loss(model, CASE.batch(0, 0, 0)).backward()
    with pytest.raises(FSDPRuntimeError, match=r"train nothing.*copy\.deepcopy\(\(model, optimizer\)\)"):
        alone.step()
    optimizer.step()


@multi_rank(2)
@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_plain_module_that_is_copied_while_it_is_unsharded_is_plain(how: str) -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    fully_shard(model)
    model.unshard()
    copied = copy.deepcopy(model[0]) if how == "copied" else pickle.loads(pickle.dumps(model[0]))
    model.reshard()
    before = [parameter.detach().clone() for parameter in copied.parameters()]
    optimizer = sgd(list(copied.parameters()))
    copied(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    for parameter, value in zip(copied.parameters(), before, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter, value - 0.125 * parameter.grad)


@multi_rank(2)
def test_a_parameter_without_memory_can_be_copied() -> None:
    """As that of an optimizer that was built while the model was unsharded."""
    model: Any = shard()
    model.unshard()
    parameters = list(model[4].parameters())
    model.reshard()
    copied = copy.deepcopy(parameters)
    assert [each.is_meta for each in copied] == [True] * len(parameters)
    with torch.no_grad():
        model(inputs())
