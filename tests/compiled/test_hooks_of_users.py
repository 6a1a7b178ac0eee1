"""Hooks of users: on sharded parameters, which graphs never see, and on sharded modules, which they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from tests.compiled.helpers.models import build_small, by_blocks, by_method, multi_rank, shard, steps_of, whole
from tests.compiled.helpers.twins import assert_trains_alike, compiling

WAYS = pytest.mark.parametrize("compile", [whole, by_method, by_blocks])


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
@pytest.mark.parametrize("after", [False, True])
def test_hooks_of_parameters_change_gradients(compile: Any, after: bool) -> None:
    """Called with the reduced gradient; what they return is what is accumulated. Or after that, by the parameter."""
    calls: list[tuple[int, str]] = []

    def shard_hooked(model: nn.Module) -> None:
        shard(model)
        for name, param in model.named_parameters():

            def hook(gradient: Tensor, name: str = name, which: int = id(model)) -> Tensor:
                calls.append((which, name))
                return gradient * 2

            def halve(param: Tensor, name: str = name, which: int = id(model)) -> None:
                assert param.grad is not None
                param.grad.mul_(0.5)
                calls.append((which, name))

            param.register_post_accumulate_grad_hook(halve) if after else param.register_hook(hook)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard_hooked, steps_of(2), compile=compile)
    assert_alike(calls)


def assert_alike(calls: list[tuple[int, str]]) -> None:
    """Of both models, the same names as often."""
    models = list(dict.fromkeys(which for which, _ in calls))
    assert len(models) == 2
    first, second = (sorted(name for which, name in calls if which == model) for model in models)
    assert first == second and len(first) == 6 * 10  # two backwards in each of five steps


def double(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def shift(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + module[0].bias.sum()


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
@pytest.mark.parametrize("before", [True, False])
def test_forward_hooks_of_sharded_modules(compile: Any, before: bool) -> None:
    """Also such as read parameters: those that were there before `fully_shard` find them unsharded."""

    def hooked(model: nn.Module) -> None:
        for block in model.blocks:
            block.register_forward_pre_hook(double)
            if before:
                block.register_forward_hook(shift)

    def shard_hooked(model: nn.Module) -> None:
        if before:
            hooked(model)
        shard(model)
        if not before:
            hooked(model)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard_hooked, steps_of(1), compile=compile)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("compile", [whole, by_method])
def test_an_optimizer_in_backward(compile: Any) -> None:
    """Each parameter steps as soon as its gradient has arrived, and its gradient is dropped."""

    def shard_stepping(model: nn.Module) -> None:
        shard(model, reshard_after_forward=False)
        for param in model.parameters():
            optimizer = torch.optim.SGD([param], lr=0.05)

            def step(param: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard_stepping, steps_of(1), compile=compile)


class Shows(nn.Module):
    """Its output is one of its parameters, beside a result; the next module uses it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shows()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.blocks[0](x)
        return self.head(x @ weight)


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_a_module_that_returns_its_parameter() -> None:
    def build_uses() -> nn.Module:
        torch.manual_seed(0)
        return Uses()

    def shard_uses(model: nn.Module) -> None:
        fully_shard(model.blocks[0])
        fully_shard(model)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_uses, shard_uses, steps_of(1))
