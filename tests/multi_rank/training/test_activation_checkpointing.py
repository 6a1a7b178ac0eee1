"""Activation checkpointing, inside and around sharded modules and nested, equals the unsharded reference."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from tests.harness import multi_rank
from tests.harness.compare import tolerance_for
from tests.harness.models import MLP, TRANSFORMER, ModelCase
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import loss_on, train_custom, trainable
from tests.harness.training import assert_trains_like


class CheckpointInside(nn.Module):
    """Checkpoints its inner module; `fully_shard` goes around this."""

    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled():
            return inner(x)
        result = checkpoint(inner, x, use_reentrant=self.use_reentrant)
        assert isinstance(result, Tensor)
        return result


@multi_rank(2, 4)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("nesting", ["inside", "outside", "outside_two"])
def test_activation_checkpointing(nesting: str, reentrant: bool, world_size: int) -> None:
    case = TRANSFORMER
    model = case.build()
    blocks = model.blocks
    if nesting == "inside":
        for index in range(len(blocks)):
            blocks[index] = fully_shard(CheckpointInside(blocks[index], reentrant))
    elif nesting == "outside":
        for index in range(len(blocks)):
            blocks[index] = CheckpointInside(fully_shard(blocks[index]), reentrant)
    else:  # one checkpoint around two sharded blocks
        for index in range(len(blocks)):
            fully_shard(blocks[index])
        pair = CheckpointInside(nn.Sequential(blocks[1], blocks[2]), reentrant)
        forward = model.forward
        model.forward = lambda tokens: model.head(model.norm(pair(blocks[0](model.embedding(tokens)))))
        assert forward is not model.forward
    fully_shard(model)
    assert_trains_like(
        Reference(case, world_size=world_size),
        model,
        adamw(trainable(model)),
        steps=4,
        tolerance=tolerance_for(world_size),
    )


class Nested(nn.Module):
    """A checkpoint around a checkpointed module, which uses its own parameter before and after its sharded child's."""

    def __init__(self, outer_reentrant: bool, inner_reentrant: bool) -> None:
        super().__init__()
        self.child = nn.Linear(32, 32)
        self.middle = _Middle(self.child)
        self.last = nn.Linear(32, 16)
        self.reentrant = outer_reentrant, inner_reentrant

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            inner = checkpoint(self.middle, torch.tanh(x), use_reentrant=self.reentrant[1])
            assert isinstance(inner, Tensor)
            return inner

        outer = checkpoint(body, x.requires_grad_(), use_reentrant=self.reentrant[0])
        assert isinstance(outer, Tensor)
        return self.last(outer)


class _Middle(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.scale = nn.Parameter(torch.full((32,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x * self.scale) * self.scale


@multi_rank(2)
@pytest.mark.parametrize("outer", [False, True], ids=["outer_non_reentrant", "outer_reentrant"])
@pytest.mark.parametrize("inner", [False, True], ids=["inner_non_reentrant", "inner_reentrant"])
def test_checkpoint_within_checkpoint(outer: bool, inner: bool, world_size: int) -> None:
    case = ModelCase("nested", partial(Nested, outer, inner), MLP.make_batch, ("child", "middle", "last"), MLP.loss_of)
    with warnings.catch_warnings():  # a reentrant checkpoint inside another runs without gradients at first
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        train_custom(case, world_size, lambda model, step, rank: loss_on(case, model, step, rank), steps=3)
