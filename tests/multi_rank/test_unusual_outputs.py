"""Backwards that do not come through a module's outputs: gradients are reduced all the same, or it is an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, FSDPNotImplementedError, FSDPRuntimeError, fully_shard
from tests.harness import multi_rank


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def compare(model: nn.Module, plain: nn.Module, world_size: int) -> None:
    """Two steps of a model that returns its loss, beside the average over ranks of the plain one."""
    for step in range(2):
        model(batch(step, dist.get_rank())).backward()
        total = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
        for rank in range(world_size):
            plain.zero_grad()
            plain(batch(step, rank)).backward()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad.full_tensor(), total[name] / world_size), name  # type: ignore[union-attr]
        model.zero_grad()


class Router(nn.Module):
    """Returns indices, and keeps its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(6, 3)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        self.loss = logits.logsumexp(-1).square().mean()
        return logits.argmax(-1)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x)
        outputs = torch.stack([expert(x) for expert in self.experts])
        assert self.router.loss is not None
        return outputs[chosen, torch.arange(len(x))].square().mean() + self.router.loss


@multi_rank(2)
def test_a_loss_that_a_module_keeps(world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = Routed(), Routed()
    plain.load_state_dict(model.state_dict())
    fully_shard(model.router, reshard_after_forward=False)
    fully_shard(model)
    compare(model, plain, world_size)


class Wrapped(nn.Module):
    """Returns an object of a class that nobody knows."""

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.wrap = wrap

    def forward(self, x: Tensor) -> object:
        y = self.linear(x)
        return SimpleNamespace(y=y) if self.wrap else lambda: y


class TakesLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Wrapped(wrap=True)
        self.last = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x).y).square().mean()


@multi_rank(2)
def test_an_object_that_holds_tensors(world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = TakesLoss(), TakesLoss()
    plain.load_state_dict(model.state_dict())
    fully_shard(model.inner)
    fully_shard(model)
    compare(model, plain, world_size)


@multi_rank(2)
def test_what_cannot_be_noticed_is_an_error(world_size: int) -> None:
    model = fully_shard(Wrapped(wrap=False))
    model(batch(0, dist.get_rank()))().sum().backward()
    with pytest.raises(FSDPRuntimeError, match=r"gradients in 'Wrapped' that were not reduced.*Return tensors"):
        model(batch(0, dist.get_rank()))


class Positions(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 6))

    def forward(self, length: int) -> Tensor:
        return self.table[:length]


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.positions(len(x))).square().mean()


@multi_rank(2)
def test_an_output_that_is_a_view_of_a_parameter(world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = Positioned(), Positioned()
    plain.load_state_dict(model.state_dict())
    fully_shard(model.positions)
    fully_shard(model)
    with torch.no_grad():
        assert torch.equal(model(batch(0, 0)), plain(batch(0, 0)))
    compare(model, plain, world_size)


class Penalized(nn.Module):
    """Differentiates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@multi_rank(2)
def test_double_backward_with_parameters_kept(world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = Penalized(), Penalized()
    plain.load_state_dict(model.state_dict())
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)

    def run(model: nn.Module, rank: int) -> None:
        x = batch(0, rank).requires_grad_()
        output = model(x).sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        (output + gradient.square().sum()).backward()

    run(model, dist.get_rank())
    model.reshard()
    total = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for rank in range(world_size):
        plain.zero_grad()
        run(plain, rank)
        for sum_, parameter in zip(total, plain.parameters(), strict=True):
            sum_ += torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for parameter, sum_ in zip(model.parameters(), total, strict=True):
        # Two backwards of one graph add up in another order.
        torch.testing.assert_close(parameter.grad.full_tensor(), sum_ / world_size)  # type: ignore[union-attr]


@multi_rank(2)
def test_a_sparse_gradient_is_refused_by_name(world_size: int) -> None:
    model = fully_shard(nn.Embedding(7, 3, sparse=True))
    with pytest.raises(FSDPNotImplementedError, match=r"'weight' has a sparse gradient.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
