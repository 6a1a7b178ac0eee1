"""Parameters that are frozen and thawed between forwards, and before the backward of these: no gradient is lost."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPRuntimeError, fully_shard
from tests.harness import multi_rank, others_full
from tests.harness.compare import Tolerance
from tests.harness.shared.ways import WAYS
from tests.multi_rank.training.helpers import assert_same_gradients, differentiate

SUMS = Tolerance(rtol=1e-5, atol=1e-6, reason="ranks' gradients are added in another order")


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


Losses = Callable[[nn.Module, Tensor], Tensor]


def batch(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def compare(way: str, losses: Losses) -> None:
    plain = stack()
    model = copy.deepcopy(plain)
    for unit in (model[0], model[2], model) if way != "default" else (model,):
        fully_shard(unit, **WAYS[way]())
    for step in range(3):
        for each in (plain, model):
            each.requires_grad_(True)
            each.zero_grad()
        differentiate(model, plain, lambda each, rank: losses(each, batch(rank)))
        assert_same_gradients(model, plain, f"of step {step}", SUMS)


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


@pytest.mark.parametrize("first", others_full(range(0, 24, 3), [0]))
@pytest.mark.parametrize("way", WAYS)
@multi_rank(2)
def test_drawn_programs_that_freeze_and_thaw(way: str, first: int) -> None:
    for seed in range(first, first + 3):
        compare(way, Drawn(seed))


class ChangesAhead(nn.Module):
    """Changes its children in its own forward, when they may have been gathered ahead already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.trains: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.trains is None:
            self.second.weight = nn.Parameter(self.second.weight.detach() * 0.5)
        else:
            self.second.requires_grad_(self.trains)
            self.third.bias.requires_grad_(not self.trains)
        return self.third(self.second(self.first(x)))  # type: ignore[no-any-return]


@multi_rank(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_children_that_are_frozen_thawed_and_given_weights_in_the_forward_around_them(reshards: bool) -> None:
    torch.manual_seed(0)
    plain = ChangesAhead()
    model = copy.deepcopy(plain)
    for module in (model.second, model.third, model):
        fully_shard(module, reshard_after_forward=reshards)
    for trains in (False, True, False, False, True, True, None, None, True, None):
        for each in (model, plain):
            each.trains = trains
            each.zero_grad()
            each(torch.eye(3)).sum().backward()
        assert_same_gradients(model, plain)


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
