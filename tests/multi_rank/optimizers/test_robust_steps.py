"""Steps and clipping where something is out of the ordinary: refused gradients, inference mode, a norm of NaN."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from fsdp2 import balanced_owners, fully_shard, offload_optimizer_state, step_on_owners
from tests.harness import multi_rank


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@multi_rank(2)
def test_a_gradient_that_owners_cannot_take_leaves_the_optimizer_as_it_was() -> None:
    """Though it is the second one's."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, shard_placement_fn=balanced_owners(list(model.parameters()), mesh))
    optimizer, reference = momentum(model.parameters()), momentum(plain.parameters())
    for each, step in ((model, lambda: step_on_owners(optimizer)), (plain, reference.step)):
        each(torch.ones(2, 6)).square().sum().backward()
        step()
        each.zero_grad()
        each(torch.ones(2, 6)).square().sum().backward()
    params = list(model.parameters())
    good: Any = params[1].grad
    params[1].grad = distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)])  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        step_on_owners(optimizer)
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == list(map(id, params))
    assert set(map(id, optimizer.state)) == set(map(id, params))
    params[1].grad = good
    step_on_owners(optimizer)
    reference.step()
    for parameter, expected in zip(params, plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach())  # type: ignore[attr-defined]
        assert isinstance(optimizer.state[parameter]["momentum_buffer"], DTensor)


@multi_rank(2)
@pytest.mark.parametrize("flat", [False, True])
def test_state_that_is_offloaded_does_not_live_on_on_the_device(flat: bool) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), flat=flat, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    inside = weakref.ref(vars(optimizer)["_inside"])
    offloaded = offload_optimizer_state(optimizer, pin_memory=False)
    optimizer.step()
    assert "_inside" not in vars(optimizer) and inside() is None
    offloaded.remove()
    optimizer.step()
    first = next(model.parameters())
    assert optimizer.state[first]["step"] == 4


@multi_rank(1, 2)
@pytest.mark.parametrize("kind", ["ordinary", "each", "flat"])
def test_a_first_step_in_inference_mode(kind: str) -> None:
    """What it makes is stepped on later, too."""
    models, made = [], []
    for index in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        models.append(model if index else fully_shard(model))
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        is_local = kind != "ordinary" and not index
        made.append(
            fsdp2.optim.local(torch.optim.AdamW, model.parameters(), flat=kind == "flat", lr=0.1) if is_local else plain
        )
    for step in range(3):
        for model, optimizer in zip(models, made, strict=True):
            model(torch.ones(2, 8)).square().sum().backward()
            with torch.inference_mode(step == 0 and optimizer is made[0]):
                optimizer.step()
            optimizer.zero_grad()
        for parameter, expected in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), expected.detach())  # type: ignore[attr-defined]
    first = next(models[0].parameters())
    assert made[0].state[first]["step"] == 3 and not made[0].state[first]["exp_avg"].is_inference()


@multi_rank(2)
def test_a_norm_of_nan_ends_with_its_gradients() -> None:
    """Rows are uneven: there is padding between gradients, which gradients are added to as long as they are kept."""
    models = []
    for index in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5), nn.Linear(5, 3))
        models.append(model if index else fully_shard(model))
    rank = dist.get_rank()
    for step in range(4):
        batches = [torch.full((2, 5), 0.1 * (each + step + 1)) for each in range(2)]
        if step == 1:
            batches[0][0, 0] = torch.nan
        models[0](batches[rank]).square().sum().backward()
        (sum(models[1](each).square().sum() for each in batches) / 2).backward()
        norms = [
            fsdp2.clip_grad_norm_(models[0].parameters(), 0.5),
            nn.utils.clip_grad_norm_(models[1].parameters(), 0.5),
        ]
        assert bool(norms[0].isnan()) == (step == 1)
        torch.testing.assert_close(*norms, equal_nan=True)
        for parameter, expected in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, equal_nan=True)
        for model in models:
            model.zero_grad(set_to_none=False)
