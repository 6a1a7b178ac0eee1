"""How forwards and backwards follow each other: accumulation, several forwards, no gradients, eager calls between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from tests.compiled.helpers.models import (
    batch_of,
    build,
    build_small,
    by_blocks,
    by_method,
    loss_of,
    multi_rank,
    shard,
    steps_of,
    whole,
)
from tests.compiled.helpers.twins import assert_trains_alike, compiling

WAYS = pytest.mark.parametrize("compile", [whole, by_blocks])


def forwards_then_backwards(model: nn.Module, number: int, rank: int) -> list[Tensor]:
    losses = [loss_of(model(batch_of(number, rank * 10 + micro))) for micro in range(3)]
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach() for loss in losses]


def forwards_then_one_backward(model: nn.Module, number: int, rank: int) -> list[Tensor]:
    losses = [loss_of(model(batch_of(number, rank * 10 + micro))) for micro in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    return [loss.detach() for loss in losses]


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
@pytest.mark.parametrize("step", [forwards_then_backwards, forwards_then_one_backward])
def test_several_forwards_before_their_backwards(compile: Any, step: Callable[..., Any]) -> None:
    with compiling() as graphs:
        # Eager adds up what two forwards of one backward have, and reduces once; graphs reduce each.
        tolerance = 1e-6 if step is forwards_then_one_backward else 0.0
        assert_trains_alike(graphs, build_small, shard, step, compile=compile, tolerance=tolerance)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize("first", [True, False])
def test_evaluation_between_steps(compile: Any, without: Callable[[], Any], first: bool) -> None:
    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        losses = []
        if first:
            with without():
                losses.append(loss_of(model(batch_of(number, rank + 50))))
        loss = loss_of(model(batch_of(number, rank)))
        loss.backward()
        losses.append(loss.detach())
        with without():
            losses.append(loss_of(model(batch_of(number, rank + 60))))
        return losses

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard, step, compile=compile)


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_eager_and_compiled_calls_of_one_model() -> None:
    """The twin is the same model, never compiled."""
    calls: dict[int, Any] = {}

    def compile(model: nn.Module, backend: Any) -> Any:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        calls[id(compiled)] = model
        return compiled

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        eager = calls.get(id(model), model)
        losses = []
        for micro, each in enumerate((model, eager, model, eager)[number % 2 :]):
            loss = loss_of(each(batch_of(number, rank * 10 + micro)))
            loss.backward()
            losses.append(loss.detach())
        with torch.no_grad():
            losses.append(loss_of(eager(batch_of(number, rank + 70))))
        return losses

    with compiling() as graphs:
        assert_trains_alike(graphs, build, shard, step, compile=compile)
        assert len(graphs.forward) == len(graphs.backward) == 1


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_one_backward_through_an_eager_and_a_compiled_forward() -> None:
    eager: dict[int, Any] = {}

    def compile(model: nn.Module, backend: Any) -> Any:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        eager[id(compiled)] = model
        return compiled

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        losses = [
            loss_of(each(batch_of(number, rank * 10 + micro)))
            for micro, each in enumerate((model, eager.get(id(model), model)))
        ]
        for loss in losses:
            loss.backward()
        return [loss.detach() for loss in losses]

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard, step, compile=compile)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("reduction", ["sum", 3.0, "tensor"])
def test_denominators_of_gradients(reduction: Any) -> None:
    """Set anew before each step; a tensor's value is read when gradients arrive, and no graph is made for it."""

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        sharded = getattr(model, "_orig_mod", model)
        value = torch.tensor(3.0 + number) if reduction == "tensor" else reduction
        sharded.set_gradient_reduction(value)
        losses = []
        for micro in range(2):
            loss = loss_of(model(batch_of(number, rank * 10 + micro)))
            loss.backward()
            losses.append(loss.detach())
        return losses

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard, step)
        assert len(graphs.forward) == len(graphs.backward) == 1


@multi_rank(2)
@pytest.mark.full  # 6 s
def test_denominators_of_another_kind_in_the_course_of_training() -> None:
    """Where the number goes into the graph, a new one is made; nothing of the old is used."""
    kinds: list[Any] = ["mean", "sum", 5.0, torch.tensor(7.0), "mean"]

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        getattr(model, "_orig_mod", model).set_gradient_reduction(kinds[number])
        loss = loss_of(model(batch_of(number, rank)))
        loss.backward()
        return [loss.detach()]

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard, step)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("factor", [2.0, 6.0])
@pytest.mark.parametrize("only_sums", [True, False])
def test_divide_factors(factor: float, only_sums: bool) -> None:
    def shard_scaled(model: nn.Module) -> None:
        shard(model)
        for each in (model, *model.blocks):
            each.set_gradient_divide_factor(factor)
            each.set_force_sum_reduction_for_comms(only_sums)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard_scaled, steps_of(1))


@multi_rank(2)
@pytest.mark.full  # 6 s each
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "replicate"])
def test_strategies(strategy: Any) -> None:
    again = {"zero1": 0, "zero2": 0, "zero3": 4, "replicate": 0}[strategy]
    with compiling() as graphs:
        assert_trains_alike(graphs, build, lambda model: shard(model, strategy=strategy), steps_of(2))
        assert len(graphs.forward) == len(graphs.backward) == 1
        if strategy != "replicate":
            assert graphs.collectives() == [(4, 0), (again, 4)]


@multi_rank(2)
@pytest.mark.full  # 6 s
def test_strategies_that_change() -> None:
    strategies: list[Any] = ["zero3", "zero2", "zero1", "zero2", "zero3"]

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        getattr(model, "_orig_mod", model).set_strategy(strategies[number])
        return steps_of(1)(model, number, rank)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, lambda model: shard(model, strategy="zero1"), step)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("dynamic", [True, None])
def test_another_batch_size_is_one_more_graph_at_most(dynamic: bool | None) -> None:
    def compile(model: nn.Module, backend: Any) -> Any:
        return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        loss = loss_of(model(batch_of(number, rank, rows=(4, 4, 7, 9, 4, 3)[number])))
        loss.backward()
        return [loss.detach()]

    with compiling() as graphs:
        assert_trains_alike(graphs, build, shard, step, compile=compile, steps=6)
        assert len(graphs.forward) == len(graphs.backward) == (1 if dynamic else 2)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("way", [whole, by_method])
def test_nothing_is_compiled_again_after_the_first_step(way: Any) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    frames: list[int] = []

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        losses = steps_of(2)(model, number, rank)
        frames.append(counters["stats"]["unique_graphs"])
        return losses

    with compiling() as graphs:
        assert_trains_alike(graphs, build, shard, step, compile=way)
        assert frames == [1] * 10
        assert sum(counters["graph_break"].values()) == 0


@multi_rank(2)
@pytest.mark.full  # 3 s
def test_sharded_modules_below_a_compiled_one_that_is_not() -> None:
    """Nothing prepares them before the graph is made, so it says so."""
    with compiling() as graphs:
        model = build_small()
        for block in model.blocks:
            fully_shard(block)
        called = torch.compile(model, backend=graphs.backend(), fullgraph=True)
        with pytest.raises(Exception, match="nothing has prepared"):
            called(batch_of(0, 0))


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
def test_graphs_made_while_gradients_add_up(compile: Any) -> None:
    """The second batch of a step has other rows, and its graph is made while the first one's gradients are there."""

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        losses = []
        for rows in (4, 5 + number):
            loss = loss_of(model(batch_of(number, rank, rows=rows)))
            loss.backward()
            losses.append(loss.detach())
        return losses

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard, step, compile=compile)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
def test_gradients_of_inputs(compile: Any) -> None:
    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        inputs = batch_of(number, rank).requires_grad_()
        loss = loss_of(model(inputs))
        loss.backward()
        assert inputs.grad is not None
        return [loss.detach(), inputs.grad]

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard, step, compile=compile)
