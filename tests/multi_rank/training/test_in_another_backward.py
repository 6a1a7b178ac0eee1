"""A sharded model that is called inside of the backward of another: in a hook, a recompute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from tests.harness import multi_rank
from tests.harness.internals import groups_of

Judge = Callable[[Tensor], Tensor]


def in_a_hook(other: nn.Module, judge: Judge, x: Tensor) -> Tensor:
    hidden = other(x)
    hidden.register_hook(lambda gradient: gradient * judge(x).mean())
    return hidden.sum()


def in_a_checkpoint(other: nn.Module, judge: Judge, x: Tensor) -> Tensor:
    return checkpoint(lambda each: (each * judge(x).mean()).sum(), other(x), use_reentrant=False)


@pytest.mark.full
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("way", [in_a_hook, in_a_checkpoint], ids=lambda each: each.__name__)
@multi_rank(2)
def test_without_gradients_it_is_a_forward_like_any_other(way: Any, reshard: bool | None) -> None:
    torch.manual_seed(0)
    plain, other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), nn.Linear(3, 3)
    model: Any = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    x = torch.randn(4, 3)

    def judged(net: nn.Module) -> Judge:
        def judge(value: Tensor) -> Tensor:
            with torch.no_grad():
                return net(value)

        return judge

    for _ in range(3):
        found = []
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            other.zero_grad()
            way(other, judged(net), x).backward()
            assert other.weight.grad is not None
            found.append(other.weight.grad.clone())
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        assert torch.allclose(*found, rtol=1e-5, atol=1e-6)
        assert all(group.phase.value != "unsharding" for group in groups_of(model))
    expected = {name: value.detach() for name, value in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.full_tensor(), expected[name], rtol=1e-5, atol=1e-6), name
