"""Gradients on one buffer are clipped as one tensor, where that is what clipping each would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import clip_grad_norm_, fully_shard
from fsdp2.optim.delivered import delivered_of
from tests.harness import FakeWorlds


def build() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3, bias=False)) for _ in "ab"])
    model[0][2] = nn.Linear(5, 5)
    for block in model:
        fully_shard(block)
    model(torch.ones(2, 5)).sum().backward()
    plan = delivered_of(list(model.parameters()))
    for part in (plan.slices() if plan is not None else None) or ():
        part.zero_()  # what reduces really writes zeros between gradients; a fake group writes nothing
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.grad.to_local().fill_(0.1 * index + 0.1)  # type: ignore[union-attr]
    return model


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.full
def test_the_norm_is_that_of_each(simulate: FakeWorlds) -> None:
    for rank in (0, 3):  # the last has no rows of some
        simulate(4, rank)
        model = build()
        plan = delivered_of(list(model.parameters()))
        assert plan is not None and plan is delivered_of(list(model.parameters()))
        slices = plan.slices()
        assert slices is not None and len(slices) == 2, "one for each group"
        expected = [each.clone() for each in locals_of(model)]
        versions = [each._version for each in locals_of(model)]
        found = torch.linalg.vector_norm(torch.cat([each.reshape(-1) for each in slices]))
        norm = torch.linalg.vector_norm(torch.cat([each.reshape(-1) for each in expected]))
        torch.testing.assert_close(found, norm)
        total = clip_grad_norm_(model.parameters(), 0.5)
        factor = min(1.0, 0.5 / (total.item() + 1e-6))
        for ours, before, version in zip(locals_of(model), expected, versions, strict=True):
            torch.testing.assert_close(ours, before * factor)
            assert ours._version > version or not ours.numel()


@pytest.mark.full
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf"), 0.0])
def test_orders(order: float, simulate: FakeWorlds) -> None:
    simulate(4)
    model, other = build(), build()
    for parameter in other.parameters():
        parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]  # not what was delivered
    plan = delivered_of(list(other.parameters()))
    assert plan is not None and plan.slices() is None
    norms = [clip_grad_norm_(each.parameters(), 0.5, order) for each in (model, other)]
    torch.testing.assert_close(*norms)
    for ours, expected in zip(locals_of(model), locals_of(other), strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_part_a_twice_given_one_and_a_new_layout(simulate: FakeWorlds) -> None:
    simulate(2)
    model = build()
    every = list(model.parameters())
    without = every[:1] + every[2:]
    plan = delivered_of(without)
    assert plan is not None and plan.slices() is not None, "a slice ends before what is not given"
    before = [each.clone() for each in locals_of(model)]
    clip_grad_norm_(without, 1e-3)
    assert torch.equal(locals_of(model)[1], before[1]) and not torch.equal(locals_of(model)[0], before[0])
    twice = delivered_of([*every, every[0]])
    assert twice is not None and twice.slices() is None
    known = delivered_of(every)
    every[0].requires_grad_(False)
    model(torch.ones(2, 5)).sum().backward()
    again = delivered_of(every)
    assert again is not known and again is not None and again.slices() is None, "a frozen one has no gradient there"
    clip_grad_norm_(model.parameters(), 0.5)


SHAPES = [(8, 3), (8, 3), (5,), (8, 3), (7, 2), (7, 2), (1, 9), (300, 4), (300, 4), (300, 5), (2, 2), (2, 2), (3, 6)]


class SumOfSquares(nn.Module):
    """Of parameters that start at ``values``."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList(map(nn.Parameter, values))

    def forward(self) -> torch.Tensor:
        return torch.stack([each.square().sum() for each in self.values]).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_of_rows_are_those_of_each(dtype: torch.dtype, simulate: FakeWorlds) -> None:
    """Bit for bit, in the order of the parameters, whichever of them are given, also of ranks that have no rows."""
    for world_size, rank in ((1, 0), (2, 1), (4, 0), (4, 3), (8, 7)):
        simulate(world_size, rank)
        torch.manual_seed(rank)
        large = (world_size * 1024, 40)  # more than torch leaves to one thread
        values = [torch.randn(shape, dtype=dtype) for shape in (*SHAPES, large, large)]
        model = SumOfSquares([*values, torch.randn(6, 4, dtype=dtype).t()])
        fully_shard(model)
        model().backward()
        every = list(model.parameters())
        for params in (every, every[::-1], every[1::2]):
            for each in params:
                each.grad.to_local().normal_()  # type: ignore[union-attr]
            plan = delivered_of(params)
            assert plan is not None and plan.slices() is not None
            below = [each.grad.to_local() for each in params]  # type: ignore[union-attr]
            for order in (2.0, 1.0, 0.5, 3.0):
                found, expected = plan.norms(order), torch.stack(torch._foreach_norm(below, order))
                assert found.dtype == expected.dtype and torch.equal(found, expected), (world_size, rank, order)
