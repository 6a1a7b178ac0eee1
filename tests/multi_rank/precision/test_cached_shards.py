"""`MixedPrecisionPolicy(cache_shards=True)`: shards are cast once for all microbatches, and anew after every write.

Two models, with and without it, go through the same; whatever they compute must be the same bit by bit.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from fsdp2.optim.guard import GUARD
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance
from tests.harness.models import TIED, TRANSFORMER, UNEVEN_MLP
from tests.harness.shared.optimizers import sgd
from tests.harness.shared.strategies import HOW, reference_for, train
from tests.harness.shared.training import CASE, loss_on, trainable
from tests.multi_rank.precision.helpers import (
    CACHED,
    HALF,
    MICROBATCHES,
    PLAIN,
    assert_alike,
    casts,
    casts_of_a_step,
    halve,
    halve_locals,
    microbatch,
    shard,
)

ROUNDED = Tolerance(0.05, 0.02, "a sum in another order is rounded to another bfloat16 parameter")

# ---- it trains like the reference -------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("setting", ["transformer", "tied", "offloaded", "kept", "replicated", "hsdp", "neighbours"])
def test_cached_shards_train_like_the_reference(setting: str, how: str, world_size: int) -> None:
    case = {"transformer": TRANSFORMER, "tied": TIED}.get(setting, UNEVEN_MLP)
    options: dict[str, Any] = {
        "offloaded": {"offload_policy": CPUOffloadPolicy()},
        "kept": {"reshard_after_forward": False},
        "replicated": {"strategy": "replicate"},
        "neighbours": {"reshard_after_forward": 2},
    }.get(setting, {})
    if setting == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    reference = reference_for(
        case, world_size, how, param_dtype=HALF, grad_dtype=torch.float32, reduce_dtype=torch.float32
    )
    exact = world_size == 2 and setting != "tied"  # whose gradients add up in another order
    train(reference, shard(CACHED, case, **options), how=how, tolerance=None if exact else ROUNDED)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("how", HOW)
def test_without_a_cast_offloaded_shards_are_copied_once(how: str) -> None:
    """What is saved then is the copy to the device."""
    model = shard(MixedPrecisionPolicy(cache_shards=True), UNEVEN_MLP, offload_policy=CPUOffloadPolicy())
    train(reference_for(UNEVEN_MLP, 2, how), model, how=how, tolerance=SUM_ORDER)


# ---- how often it casts -----------------------------------------------------------------------------


@multi_rank(2)
def test_without_gradients_it_casts_in_every_forward() -> None:
    model = shard(CACHED)
    counted: list[int] = []
    with casts(counted):
        for grad_mode in (torch.no_grad, torch.inference_mode):
            for _ in range(2):
                with grad_mode():
                    loss_on(CASE, model, 0, 0)
        assert len(counted) == 2 * 2 * 3
        microbatch(model, 0, 0)
    assert len(counted) == 2 * 2 * 3 + 3


@multi_rank(2)
def test_without_the_guard_nothing_is_kept() -> None:
    model = shard(CACHED)
    optimizer = sgd(trainable(model))
    GUARD.remove()
    for _ in range(2):
        assert len(casts_of_a_step(model, optimizer)) == 2 * MICROBATCHES * 3 - MICROBATCHES, "the root's stays"
    fully_shard(nn.Linear(2, 2))
    assert len(casts_of_a_step(model, optimizer)) == 3


# ---- what else a group may be -----------------------------------------------------------------------


class Several(nn.Module):
    """Parameters of three dtypes, small and large, in one group; and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.small = nn.Parameter(torch.randn(5, 3))
        self.large = nn.Parameter(torch.randn(64, 256) / 16)
        self.low = nn.Parameter(torch.randn(7, 3).to(HALF))
        self.count = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) + (x.float() @ self.large.float()).square().sum() * self.count.sum()

    def other(self, x: Tensor) -> Tensor:
        return x.sum() * (self.small.float().sum() + self.low.float().square().sum())


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 8 s on two cores
@pytest.mark.parametrize("some", [False, True], ids=["all", "one asks"])
def test_several_dtypes_in_a_group(some: bool) -> None:
    def function(fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        return CACHED if fqn == "large" else MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)

    def plain(fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        return dataclasses.replace(function(fqn, parameter), cache_shards=False)

    models = []
    for policy in (plain, function) if some else (PLAIN, CACHED):
        model = fully_shard(Several(), mp_policy=policy)
        register_fsdp_forward_method(model, "other")
        models.append(model)
    for micro in range(3):
        for model in models:
            (model(torch.ones(2, 64) * (micro + 1)).float() + model.other(torch.ones(2)).float()).backward()
        assert_alike(*models)
        if micro == 1:
            for model in models:
                model.reshard()
                with torch.no_grad():
                    model.low.to_local().mul_(0.5)


@pytest.mark.full
@multi_rank(2)
def test_copies_keep_a_cache_of_their_own() -> None:
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    for model in models:
        microbatch(model, 0, 0)
    copies = [copy.deepcopy(model) for model in models]
    for micro in range(2):
        for model in copies:
            halve_locals(model)
        losses = [microbatch(model, 0, micro) for model in (*copies, *models)]
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[2], losses[3])
        assert not torch.equal(losses[0], losses[2])
    optimizer = sgd(trainable(copies[1]))
    assert len(casts_of_a_step(copies[1], optimizer)) <= 3
    assert len(casts_of_a_step(copies[1], optimizer)) == 3


@pytest.mark.full
@multi_rank(2)
def test_an_exception_while_casting_leaves_nothing_that_looks_cast() -> None:
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    for model in models:
        microbatch(model, 0, 0)
        model.reshard()
        halve(model)
    with mock.patch("fsdp2._torch.foreach_copy", side_effect=RuntimeError("out of memory")):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="out of memory"):
            microbatch(models[1], 0, 1)
    assert torch.equal(*(microbatch(model, 0, 1) for model in models))
