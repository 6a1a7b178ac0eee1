"""The guard that re-keys optimizers: what it costs, that it can be removed, what it leaves alone."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fsdp2 import HSDPMeshInfo, ShardPlacementResult, fully_shard
from fsdp2.core.param import WriteCounter
from fsdp2.optim.guard import GUARD
from tests.harness import Reference, adamw, assert_trains_like, fake_world, multi_rank
from tests.harness.compare import assert_same
from tests.harness.counting import python_calls
from tests.harness.models import MLP
from tests.harness.shared.optimizers import loss_of, sgd, through_dtensor
from tests.harness.shared.training import CASE, shard, trainable


def guard_calls(layers: int, groups: int) -> int:
    """What the guard adds to one step of an optimizer in steady state."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    for index in range(groups - 1):
        fully_shard(model[index])
    fully_shard(model)
    optimizer = sgd(list(model.parameters()))
    model(torch.zeros(2, 4)).sum().backward()
    with through_dtensor():
        with_guard = python_calls(optimizer.step)
    GUARD.remove()
    without = python_calls(optimizer.step)
    return with_guard - without


def test_the_end_of_a_step_within_another_is_not_the_end_of_that() -> None:
    """An optimizer that a closure steps, or another rank's where ranks are threads."""
    with fake_world(2):
        outer = sgd(list(fully_shard(nn.Linear(4, 4)).parameters()))
        inner = sgd([nn.Parameter(torch.zeros(2))])
        seen = []

        def closure() -> None:
            inner.step()
            seen.append(WriteCounter.unwatched)

        outer.step(closure)
    assert seen == [True] and not WriteCounter.unwatched


def test_the_guard_costs_nothing_per_parameter() -> None:
    with fake_world(2):
        few, many, more_groups = guard_calls(2, 2), guard_calls(40, 2), guard_calls(40, 10)
    assert few == many, "the same work for 4 and for 80 parameters"
    assert few <= 27
    assert more_groups - many <= 2 * 8, "and next to none per group"


@multi_rank(2)
def test_the_guard_can_be_removed() -> None:
    hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    model = CASE.build()
    originals = trainable(model)
    shard(CASE, model)
    installed = [len(each) for each in hooks]
    GUARD.remove()
    GUARD.remove()
    assert [len(each) for each in hooks] == [count - 1 for count in installed]
    assert_trains_like(Reference(CASE, world_size=2), model, adamw(trainable(model)), steps=2)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    unguarded = sgd(originals)
    loss_of(CASE, model).backward()
    unguarded.step()  # steps on nothing, as it would have without the guard
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    fully_shard(nn.Linear(2, 2))
    fully_shard(nn.Linear(2, 2))
    assert [len(each) for each in hooks] == installed
    unguarded.step()
    assert not all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))


@multi_rank(2)
def test_the_guard_leaves_other_optimizers_alone() -> None:
    shard()
    plain = MLP.build()
    optimizer = adamw(list(plain.parameters()))
    reference = Reference(MLP, world_size=1)
    record = reference.step()
    MLP.loss(plain, MLP.batch(0, 0, 0)).backward()
    optimizer.step()
    assert_same("parameters", dict(plain.named_parameters()), record.parameters)


@multi_rank(2)
def test_the_guard_keeps_no_optimizer_and_no_model_alive() -> None:
    model = shard()
    optimizer = adamw(trainable(model))
    loss_of(CASE, model).backward()
    optimizer.step()
    refs = [weakref.ref(optimizer), weakref.ref(model), weakref.ref(model[4].weight)]
    del optimizer, model
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


@pytest.mark.full
@multi_rank(4)
def test_a_step_is_seen_by_the_groups_of_every_mesh() -> None:
    """Of one call: what is whole is gathered again in each of them, though the kernel has moved no counter."""
    info = HSDPMeshInfo(
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), shard_mesh_dim=1, replicate_mesh_dim=0
    )

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, info) if parameter.ndim == 1 else None

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), reshard_after_forward=False, shard_placement_fn=place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x = torch.randn(2, 8)
    model(x).sum().backward()
    with torch.no_grad():
        before = model(x)  # and everything stays whole
        optimizer.step()
        assert not torch.equal(before, model(x))
        found = model(x)
        model.reshard()
        assert torch.equal(found, model(x))


@multi_rank(2)
def test_a_step_without_any_reduction_is_told_once() -> None:
    """Every microbatch accumulates: the step finds nothing, and the model does not train."""
    model = shard()
    optimizer = sgd(trainable(model))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp2").addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GUARD, "_has_warned", False)
            for _ in range(2):
                model.set_requires_gradient_sync(False)
                loss_of(CASE, model).backward()
                optimizer.step()
            assert len(said) == 1 and "set_requires_gradient_sync(True)" in said[0]
            patch.setattr(GUARD, "_has_warned", False)
            model.set_requires_gradient_sync(True)
            loss_of(CASE, model).backward()
            optimizer.step()
            assert len(said) == 1
    finally:
        logging.getLogger("fsdp2").removeHandler(handler)
