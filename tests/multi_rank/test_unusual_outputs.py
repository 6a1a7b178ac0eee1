"""Backwards that do not come through a module's outputs: gradients are reduced all the same, or it is an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPRuntimeError, fully_shard
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
