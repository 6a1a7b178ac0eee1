"""A step of parameters that no rank reduces, beside sharded ones, is refused: their values would part in silence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import FSDPRuntimeError, fully_shard
from tests.harness import multi_rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def blocks_only() -> Model:
    """The model itself is forgotten."""
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    return model


def train(model: nn.Module, *others: nn.Module) -> None:
    parameters = [parameter for each in (model, *others) for parameter in each.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(2):
        nn.Sequential(model, *others)(torch.ones(2, 4) + dist.get_rank()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@multi_rank(2)
def test_a_model_whose_blocks_alone_are_sharded() -> None:
    model = blocks_only()
    with pytest.raises(FSDPRuntimeError, match=r"parameters of Model .*: stem.weight, stem.bias, head.weight, head"):
        train(model)
    model.zero_grad()
    fully_shard(model)
    train(model)


@multi_rank(2)
def test_a_loss_with_parameters() -> None:
    with pytest.raises(FSDPRuntimeError, match=r"weight, (\d\.)?bias.*ignored_params"):  # alone, or with the model
        train(fully_shard(blocks_only()), nn.Linear(2, 1))


@multi_rank(2)
def test_what_is_ignored_frozen_or_reduced_otherwise_is_not_refused() -> None:
    ignores = blocks_only()
    train(fully_shard(ignores, ignored_params={*ignores.head.parameters()}))

    frozen = blocks_only()
    frozen.stem.requires_grad_(False)
    frozen.head.requires_grad_(False)
    train(frozen)

    hooked = blocks_only()
    for parameter in (*hooked.stem.parameters(), *hooked.head.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    train(hooked)

    train(fully_shard(blocks_only()), nn.parallel.DistributedDataParallel(nn.Linear(2, 1)))
