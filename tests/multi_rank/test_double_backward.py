"""Gradients of gradients: a penalty on the gradient of inputs, as for critics, score matching and physics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of, parameters_of

WIDTH = 7


class Critic(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Linear(nn.Module):
    """Of which the second backward comes to no module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def build(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"critic": Critic, "linear": Linear, "recomputed": lambda: Critic(recompute=True)}[kind]()


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step * 10 + rank)).requires_grad_()


def penalty(model: nn.Module, step: int, rank: int, *, only: bool) -> Tensor:
    x = inputs(step, rank)
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = (slope.norm(dim=1) - 1).square().mean()
    return loss if only else loss + output.mean()


def check(model: Any, kind: str, world_size: int, *, only: bool, steps: int = 3) -> None:
    plain = build(kind)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step in range(steps):
        penalty(model, step, dist.get_rank(), only=only).backward()
        for rank in range(world_size):
            (penalty(plain, step, rank, only=only) / world_size).backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_sharded_same(f"gradients in step {step}", gradients_of(model), expected, tolerance=SUM_ORDER)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # and an evaluation in between
            model(inputs(step, dist.get_rank()))
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert_sharded_same("parameters", parameters_of(model), expected, tolerance=SUM_ORDER)


@multi_rank(2, 4)
@pytest.mark.parametrize("only", [False, True], ids=["with a loss", "penalty only"])
@pytest.mark.parametrize("kind", ["critic", "linear", "recomputed"])
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_it_equals_the_reference(reshard_after_forward: bool | None, kind: str, only: bool, world_size: int) -> None:
    model = shard(build(kind), reshard_after_forward=reshard_after_forward)
    check(model, kind, world_size, only=only)


@multi_rank(4)
@pytest.mark.parametrize("how", ["replicas", "int", "offloaded"])
def test_with_other_settings(how: str, world_size: int) -> None:
    options: dict[str, Any] = {
        "replicas": lambda: {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))},
        "int": lambda: {"reshard_after_forward": 2},
        "offloaded": lambda: {"offload_policy": CPUOffloadPolicy()},
    }[how]()
    check(shard(build("critic"), **options), "critic", world_size, only=False)


@multi_rank(2)
@pytest.mark.parametrize("kind", ["critic", "linear"])
def test_the_second_backward_leaves_nothing_unsharded(kind: str, world_size: int) -> None:
    model = shard(build(kind), reshard_after_forward=True)
    loss = penalty(model, 0, dist.get_rank(), only=True)
    loss.backward()
    for block in model.blocks:
        assert all(hasattr(parameter, "placements") for parameter in block.parameters())


@multi_rank(2)
def test_a_penalty_that_is_never_differentiated(world_size: int) -> None:
    """The first backward alone, then training goes on."""
    model = shard(build("critic"), reshard_after_forward=True)
    penalty(model, 0, dist.get_rank(), only=False)
    model.zero_grad()
    check(model, "critic", world_size, only=False)


@multi_rank(2)
def test_microbatches(world_size: int) -> None:
    model, plain = shard(build("critic")), build("critic")
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        penalty(model, micro, dist.get_rank(), only=False).backward()
        for rank in range(world_size):
            (penalty(plain, micro, rank, only=False) / world_size).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=SUM_ORDER)
