"""Experts that lie on a part of the ranks, each with other values: what is reduced, counted and agreed on over all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import (
    FSDPRuntimeError,
    ShardedGradScaler,
    accumulate,
    clip_grad_norm_,
    full_parameters,
    fully_shard,
    get_total_norm,
)
from tests.harness import multi_rank
from tests.harness.shared.clipping import all_reduces, assert_plain_and_the_same_everywhere
from tests.harness.shared.slices import (
    Mixture,
    backward_of,
    expert_of,
    grid,
    loss_on,
    placement_of_experts,
    sharded_mixture,
    whole_gradients,
    whole_mixture,
)

ORDERS = [2.0, 1.0, float("inf"), 0.0]


# ---- clipping ------------------------------------------------------------------------------------


@multi_rank(4)
@pytest.mark.parametrize("norm_type", ORDERS)
@pytest.mark.parametrize("setting", ["as they are", "replicas", "hybrid", "a further mesh", "a module"])
def test_the_norm_has_the_experts_of_all_ranks(setting: str, norm_type: float) -> None:
    mesh = grid(replicas=setting == "replicas")
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if setting == "hybrid" else None
    model, plain = sharded_mixture(mesh, whole=whole), whole_mixture()
    for _ in range(2):  # with what is remembered, too
        backward_of(model)
        expected = nn.utils.get_total_norm([each.grad for each in whole_mixture().parameters()], norm_type)
        options = {"mesh": mesh["ep"]} if setting == "a further mesh" else {}
        passed = model if setting == "a module" else model.parameters()
        norm = clip_grad_norm_(passed, 0.5, norm_type, **options)
        assert_plain_and_the_same_everywhere(norm)
        torch.testing.assert_close(norm, expected)
        gradients = [each.grad for each in model.parameters()]
        if norm_type:
            again = get_total_norm(gradients, norm_type, **options)
            torch.testing.assert_close(again, torch.tensor(0.5), rtol=1e-4, atol=0)
        nn.utils.clip_grads_with_norm_(plain.parameters(), 0.5, expected)
        references = dict(plain.named_parameters())
        for name, gradient in whole_gradients(model).items():
            torch.testing.assert_close(gradient, references[name].grad)
        model.zero_grad()
        plain = whole_mixture()


@multi_rank(4)
@pytest.mark.parametrize("norm_type", ORDERS[:3])
def test_ranks_may_have_experts_of_other_sizes(norm_type: float) -> None:
    """And pass them at other places: what travels is the same number, with the dense ones."""
    model, plain = sharded_mixture(uneven=True), whole_mixture(uneven=True)
    backward_of(model)
    every = [*model.experts.parameters(), *model.first.parameters(), *model.last.parameters()]
    with all_reduces() as carried:
        norm = clip_grad_norm_(every if dist.get_rank() < 2 else every[::-1], 0.5, norm_type)
    assert carried == [2 if norm_type == float("inf") else 1]
    expected = nn.utils.get_total_norm([each.grad for each in plain.parameters()], norm_type)
    assert_plain_and_the_same_everywhere(norm)
    torch.testing.assert_close(norm, expected)


@multi_rank(4)
def test_what_a_root_of_fewer_ranks_has_is_whole() -> None:
    """The same mesh, of a model that is sharded over it alone, before and after another has slices there."""
    mesh = grid()
    alone = sharded_mixture(mesh, whole=mesh["edp"])
    slices = sharded_mixture(mesh)
    norms = []
    for _ in range(2):
        backward_of(alone)
        norms.append(clip_grad_norm_(alone.parameters(), 1e9))
        torch.testing.assert_close(norms[-1], nn.utils.get_total_norm(list(whole_gradients(alone).values())))
        alone.zero_grad()
        backward_of(slices)
    assert torch.equal(*norms)


# ---- loss scaling ----------------------------------------------------------------------------------


@multi_rank(4)
@pytest.mark.parametrize("whole", ["one dim", "two dims"])
def test_all_ranks_go_on_with_one_scale_by_an_optimizer_for_each_mesh(whole: str) -> None:
    """An infinity in the gradient of one expert: no expert steps, the dense layers do."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded_mixture(whole=hybrid if whole == "two dims" else None)
    of_experts = list(model.experts.parameters())
    dense = [*model.first.parameters(), *model.last.parameters()]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (dense, of_experts)]
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(loss_on(model, dist.get_rank(), step)).backward()
        if step == 1 and dist.get_rank() == 3:
            of_experts[0].grad.to_local().view(-1)[0] = float("inf")
        before = [each.full_tensor() for each in (dense[0], of_experts[0])]
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        after = [each.full_tensor() for each in (dense[0], of_experts[0])]
        assert [torch.equal(*each) for each in zip(before, after, strict=True)] == [False, step == 1]
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)


# ---- what the ranks of one expert find, all are told -----------------------------------------------


@multi_rank(4, timeout=40)
def test_a_gradient_that_one_expert_lacks_on_a_rank_is_refused_on_all() -> None:
    model = sharded_mixture()
    backward_of(model)
    weight = next(model.experts.parameters())
    gradient = weight.grad
    if dist.get_rank() == 3:
        weight.grad = None
    refused = pytest.raises(FSDPRuntimeError, match=r"the ranks differ in what full_parameters\(\)")
    with refused, full_parameters(model, with_grads=True):
        pass
    weight.grad = gradient
    with full_parameters(model, with_grads=True):
        for name, parameter in whole_mixture().named_parameters():
            mine = dict(model.named_parameters()).get(name)
            if mine is not None:
                torch.testing.assert_close(mine.grad, parameter.grad)


@multi_rank(4, timeout=40)
def test_replicas_of_one_expert_that_differ_are_refused_on_all_ranks() -> None:
    model = sharded_mixture(grid(replicas=True))
    weight = next(model.experts.parameters())
    change = 1e-3 if dist.get_rank() == 3 else 0.0
    weight.detach().to_local().add_(change)
    for _ in range(2):
        with pytest.raises(
            FSDPRuntimeError, match=r"replicas of Mixture hold different values of 'experts.1.0.weight'"
        ):
            backward_of(model)
    weight.detach().to_local().sub_(change)
    backward_of(model)


# ---- what was set on them --------------------------------------------------------------------------


@multi_rank(4)
@pytest.mark.parametrize("setting", ["stays", "strategy", "sum", "unused", "accumulates"])
def test_experts_that_are_modules_of_their_own_may_be_set_otherwise_than_by_default(setting: str) -> None:
    """Other ranks have none of that name, and need not have set the same on it."""
    ways: dict[str, Any] = {"stays": {"reshard_after_forward": False}, "strategy": {"strategy": "zero2"}}
    rank = dist.get_rank()
    model: Any = Mixture([expert_of(rank)])
    place = placement_of_experts(model, grid())
    fully_shard(model.experts[str(expert_of(rank))], shard_placement_fn=place, **ways.get(setting, {}))
    fully_shard(model, shard_placement_fn=place)
    if setting == "sum":
        model.set_gradient_reduction("sum")
    elif setting == "unused":
        model.set_reduce_scatter_unused_params(True)
    if setting == "accumulates":
        with accumulate(model, last=False):
            backward_of(model)
        with accumulate(model, last=True):
            backward_of(model, step=1)
    else:
        backward_of(model)
    plain = whole_mixture(steps=range(2 if setting == "accumulates" else 1))
    for name, gradient in whole_gradients(model).items():
        factor = 1 if setting != "sum" else 2 if name.startswith("experts") else 4
        torch.testing.assert_close(gradient, factor * plain.get_parameter(name).grad, msg=name)


@multi_rank(4)
def test_ranks_of_one_expert_must_set_the_same() -> None:
    rank = dist.get_rank()
    model: Any = Mixture([expert_of(rank)])
    place = placement_of_experts(model, grid())
    fully_shard(model.experts[str(expert_of(rank))], shard_placement_fn=place, reshard_after_forward=rank != 3)
    fully_shard(model, shard_placement_fn=place)
    with pytest.raises(FSDPRuntimeError, match=r"(?s)the ranks have different plans.*'experts\.1'.*reshard_after"):
        backward_of(model)
