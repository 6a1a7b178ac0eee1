"""Activation checkpoints within one another and selective ones equal the unsharded reference.

(What is around and within one unit is in `tests/parity/test_composition.py`.)
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp2 import FSDPModule, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import assert_sharded_same, gradients_of
from tests.harness.counting import Collectives
from tests.harness.models import MLP, ModelCase
from tests.harness.shared.training import loss_on, train_custom


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


# ---- selective ones around several units ---------------------------------------------------------


class TwoUnits(nn.Module):
    """Two units, and operators of its own, in one region: what the recompute of the first needs is gathered in it."""

    gathers_itself = False

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.mlp = nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.gathers_itself:
            self.attention.unshard(async_op=True).wait()  # type: ignore[operator]
        x = x + self.attention(x.view(2, -1).view(4, 6))
        return x + self.mlp(x.view(2, 12).view(4, 6))


def _save_all_but(cheap: tuple[Any, ...], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if operator in cheap else CheckpointPolicy.MUST_SAVE


def _save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


CHEAP = (torch.ops.aten.tanh.default, torch.ops.aten.gelu.default, torch.ops.aten.add.Tensor)
POLICIES = {"all_but_cheap": partial(_save_all_but, CHEAP), "products": _save_products}


class Regions(nn.Module):
    """Each layer of two units is a region."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(TwoUnits() for _ in range(3))
        self.contexts = partial(create_selective_checkpoint_contexts, POLICIES[policy])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts)
        return x


@multi_rank(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("ahead", ["default", "never", "by the program"])
def test_selective_checkpoints_around_several_units(ahead: str, reshards: bool, policy: str, world_size: int) -> None:
    """The engine's operators are none of the region's: they run in a recompute, and are not counted there."""
    torch.manual_seed(0)
    model = Regions(policy)
    plain = copy.deepcopy(model)
    for layer in model.layers:
        assert isinstance(layer, TwoUnits)
        fully_shard(layer.attention)
        fully_shard(layer.mlp)
        layer.gathers_itself = ahead == "by the program"
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(reshards)
    if ahead != "default":
        model.set_backward_prefetch("never")
    for _ in range(2):
        for micro in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(micro))
            losses = [layers(x).square().sum() for layers in (model, plain)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        assert_sharded_same("gradients", gradients_of(model), gradients_of(plain))
        for each in (model, plain):
            each.zero_grad()


class WithLoss(nn.Module):
    """The last layer and the loss are recomputed; the norm before it, of the same list, is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.output = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        loss: Tensor = checkpoint(lambda h: F.cross_entropy(self.output(h), target), hidden, use_reentrant=False)
        return loss


@multi_rank(2)
def test_a_list_of_which_one_module_is_recomputed_costs_the_same_in_each_step(world_size: int) -> None:
    torch.manual_seed(0)
    model = WithLoss()
    plain = copy.deepcopy(model)
    fully_shard([model.norm, model.output])
    fully_shard(model)
    x, target = torch.randn(5, 4), torch.randint(7, (5,))
    counts = []
    for _ in range(3):
        with Collectives() as mode:
            model(x, target).backward()
        counts.append(sum(mode.counts.values()))
        plain(x, target).backward()
        assert_sharded_same("gradients", gradients_of(model), gradients_of(plain))
        for each in (model, plain):
            each.zero_grad()
    assert counts[1] == counts[2] <= counts[0]
