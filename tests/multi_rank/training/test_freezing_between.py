"""Parameters that are frozen and thawed between forwards, and before the backward of these: no gradient is lost."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance, assert_sharded_same, gradients_of

SUMS = Tolerance(rtol=1e-5, atol=1e-6, reason="ranks' gradients are added in another order")


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def default(model: nn.Sequential) -> nn.Module:
    return fully_shard(model)


def units(model: nn.Sequential) -> nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def keep(model: nn.Sequential) -> nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer, reshard_after_forward=False)
    return fully_shard(model, reshard_after_forward=False)


def replicated(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def offloaded(model: nn.Sequential) -> nn.Module:
    return fully_shard(model, offload_policy=CPUOffloadPolicy())


WAYS = [default, units, keep, replicated, offloaded]

Losses = Callable[[nn.Module, Tensor], Tensor]


def frozen_for_the_second_forward(model: nn.Module, x: Tensor) -> Tensor:
    first = model(x)
    model.requires_grad_(False)
    second = model(x)
    model.requires_grad_(True)
    return first.sum() + second.sum()


def frozen_for_an_evaluation(model: nn.Module, x: Tensor) -> Tensor:
    first = model(x)
    model.requires_grad_(False)
    with torch.no_grad():
        model(x)
    model.requires_grad_(True)
    return first.square().sum()


def thawed_before_the_backward(model: nn.Module, x: Tensor) -> Tensor:
    model[0].requires_grad_(False)  # type: ignore[index]
    first = model(x.clone().requires_grad_(True))
    model[0].requires_grad_(True)  # type: ignore[index]
    return first.square().sum() + model(x).sum()


def frozen_before_the_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    model[2].requires_grad_(False)  # type: ignore[index]
    return loss


def one_bias_in_turns(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).sum()
    for frozen in (True, False):
        model[0].bias.requires_grad_(not frozen)  # type: ignore[index, union-attr]
        loss = loss + model(x).square().sum()
    return loss


PROGRAMS = [
    frozen_for_the_second_forward, frozen_for_an_evaluation, thawed_before_the_backward, frozen_before_the_backward,
    one_bias_in_turns,
]  # fmt: skip


def mean_of_ranks(plain: nn.Module, losses: Losses) -> dict[str, Tensor | None]:
    """The gradients of ``plain`` in one process, that sees what all ranks see."""
    world_size = dist.get_world_size()
    plain.zero_grad()
    for rank in range(world_size):
        (losses(plain, batch(rank)) / world_size).backward()
    return gradients_of(plain)


def batch(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def compare(way: Callable[[nn.Sequential], nn.Module], losses: Losses) -> None:
    plain = stack()
    model = way(copy.deepcopy(plain))
    for step in range(3):
        for each in (plain, model):
            each.requires_grad_(True)
        expected = mean_of_ranks(plain, losses)
        model.zero_grad()
        losses(model, batch(dist.get_rank())).backward()
        assert_sharded_same(f"gradients of step {step}", gradients_of(model), expected, tolerance=SUMS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda each: each.__name__)
@multi_rank(2)
def test_gradients_are_those_of_the_unsharded_model(way: Any, program: Any) -> None:
    compare(way, program)


class Drawn:
    """A program of forwards, with freezing and thawing between them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """The sum of the losses."""
        draw, loss = random.Random(self._seed), torch.zeros(())
        modules: Any = model
        parts: list[Callable[[], Any]] = [
            lambda: model, lambda: modules[0], lambda: modules[2], lambda: modules[0].bias, lambda: modules[2].weight
        ]  # fmt: skip
        for _ in range(draw.randint(3, 8)):
            kind = draw.choice(["forward", "forward", "evaluate", "freeze", "thaw"])
            if kind == "forward":
                loss = loss + model(x.clone().requires_grad_(True)).square().sum()
            elif kind == "evaluate":
                with torch.no_grad():
                    model(x)
            else:
                draw.choice(parts)().requires_grad_(kind == "thaw")
        loss = loss + model(x.clone().requires_grad_(True)).sum()
        for _ in range(draw.randint(0, 2)):
            draw.choice(parts)().requires_grad_(draw.random() < 0.7)
        return loss


@pytest.mark.parametrize("way", WAYS, ids=lambda each: each.__name__)
@multi_rank(2)
def test_drawn_programs_that_freeze_and_thaw(way: Any) -> None:
    for seed in range(25):
        compare(way, Drawn(seed))


class ThawsAhead(nn.Module):
    """Freezes and thaws its children in its own forward, when they may have been gathered ahead already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.trains = False

    def forward(self, x: Tensor) -> Tensor:
        self.second.requires_grad_(self.trains)
        self.third.bias.requires_grad_(not self.trains)
        return self.third(self.second(self.first(x)))  # type: ignore[no-any-return]


@multi_rank(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_children_that_are_frozen_and_thawed_in_the_forward_around_them(reshards: bool) -> None:
    torch.manual_seed(0)
    plain = ThawsAhead()
    model = copy.deepcopy(plain)
    for module in (model.second, model.third, model):
        fully_shard(module, reshard_after_forward=reshards)
    for trains in (False, True, False, False, True, True):
        for each in (model, plain):
            each.trains = trains
            each.zero_grad()
            each(torch.eye(3)).sum().backward()
        assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)


class ReplacesAhead(nn.Module):
    """Gives its child another weight in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight = nn.Parameter(self.second.weight.detach() * 0.5)
        return self.second(self.first(x))  # type: ignore[no-any-return]


@multi_rank(2)
def test_a_child_whose_weight_is_replaced_in_the_forward_around_it() -> None:
    torch.manual_seed(0)
    plain = ReplacesAhead()
    model = copy.deepcopy(plain)
    fully_shard(model.second)
    fully_shard(model)
    for _ in range(4):
        outputs = [each(torch.eye(3)) for each in (model, plain)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.sum().backward()


class ThawsInBackward(nn.Sequential):
    """Once its backward has begun."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self[0](x)
        hidden.register_hook(lambda gradient: self.requires_grad_(True) and None)
        return self[1](hidden)


@multi_rank(2)
def test_a_gradient_that_nobody_is_to_reduce_is_an_error() -> None:
    model = fully_shard(ThawsInBackward(nn.Linear(3, 3), nn.Linear(3, 3)))
    loss = model(batch(0)).sum()
    model.requires_grad_(False)
    with pytest.raises(FSDPRuntimeError, match=r"a gradient of parameter '0\.weight' arrived, which was frozen"):
        loss.backward()
