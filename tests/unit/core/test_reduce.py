"""`Scaling.choose`: however it is shared out, the mean comes out exactly; narrow dtypes neither overflow nor vanish.

Ranks and collectives are simulated; every step rounds to the dtype, as on a device. Then `GradientReducer` on one of
two simulated ranks: the dtypes it reduces in, what it owes, and how settings scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPRuntimeError, FSDPValueError, MixedPrecisionPolicy, _torch, fully_shard
from fsdp2.core.reduce import GradientReducer, Scaling, Waiting
from tests.harness import fake_world
from tests.harness.internals import groups_of
from tests.unit.helpers import for_each

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (3, 2), (8, 4), (64, 16)]


def combined(parts: Tensor, op: object) -> Tensor:
    """``parts`` (ranks, ...) reduced with ``op``: one rank after the other, in their own dtype."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    if op == dist.ReduceOp.AVG:
        return total / len(parts)
    assert op == dist.ReduceOp.SUM
    return total


def reduced(values: Tensor, scaling: Scaling) -> Tensor:
    """What comes of ``values`` (world_size, replicas, n), reduced over the first dim and then over the second."""
    sent = values / scaling.before if scaling.before != 1.0 else values
    scattered = torch.stack([combined(sent[:, replica], scaling.scatter_op) for replica in range(sent.shape[1])])
    result = combined(scattered, scaling.replicate_op)
    return result / scaling.after if scaling.after != 1.0 else result


@for_each("only_sums", [False, True])
@for_each(("world_size", "replicas"), SIZES)
@for_each("dtype", DTYPES)
def test_the_mean_is_exact(dtype: torch.dtype, world_size: int, replicas: int, only_sums: bool) -> None:
    """Of values that add up without rounding: then there is one right answer."""
    ranks = world_size * replicas
    mean = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    spread = torch.ones(ranks, 1, dtype=torch.float64)  # +1, -1 in pairs around the mean
    spread[1::2] = -1.0
    if ranks % 2:
        spread[-1] = 0.0
    values = (mean + spread).to(dtype).view(world_size, replicas, -1)
    scaling = Scaling.choose(dtype, world_size, replicas, only_sums=only_sums)
    assert torch.equal(reduced(values, scaling), mean.to(dtype))


@for_each("only_sums", [False, True])
@for_each("factor", [1.0, 2.0, 3.0, 4.0, 6.0, 0.5, 100.0])
@for_each(("world_size", "replicas"), SIZES[:-2])
@for_each("dtype", DTYPES)
def test_a_factor_divides_the_sum(
    dtype: torch.dtype, world_size: int, replicas: int, factor: float, only_sums: bool
) -> None:
    values = torch.tensor([12.0, -24.0, 6.0, 0.0], dtype=dtype).expand(world_size, replicas, -1)
    scaling = Scaling.choose(dtype, world_size, replicas, factor=factor, only_sums=only_sums)
    expected = values[0, 0].double() * world_size * replicas / factor
    found = reduced(values, scaling).double()
    # The division is rounded once, by whoever does it; powers of two before it change nothing.
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0.0)
    if math.log2(factor).is_integer() or dtype is torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize(("world_size", "replicas"), [(64, 1), (16, 16), (256, 4)])
def test_half_precision_neither_overflows_nor_vanishes(world_size: int, replicas: int) -> None:
    """A sum over all ranks would be infinite, a division by their number before it zero."""
    ranks = world_size * replicas
    limits = torch.finfo(torch.float16)
    smallest = limits.smallest_normal * limits.eps
    values = torch.tensor([limits.max / math.sqrt(ranks) / 2, smallest * math.sqrt(ranks)], dtype=torch.float16)
    ours = Scaling.choose(torch.float16, world_size, replicas)
    assert torch.equal(reduced(values.expand(world_size, replicas, -1), ours), values)
    after, before = replace(ours, before=1.0, after=float(ranks)), replace(ours, before=float(ranks), after=1.0)
    assert torch.isinf(reduced(values.expand(world_size, replicas, -1), after)[0])
    assert reduced(values.expand(world_size, replicas, -1), before)[1] != values[1]


def test_collectives_divide_where_they_can() -> None:
    """No kernel of ours where the backend averages."""
    mean, total = dist.ReduceOp.AVG, dist.ReduceOp.SUM
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert Scaling.choose(dtype, 8, 1) == Scaling(1.0, mean, mean, 1.0)
        assert Scaling.choose(dtype, 8, 4) == Scaling(1.0, mean, mean, 1.0)
        assert Scaling.choose(dtype, 8, 4, factor=8.0) == Scaling(1.0, mean, total, 1.0)
        assert Scaling.choose(dtype, 1, 1) == Scaling(1.0, total, total, 1.0)


@for_each("dtype", DTYPES)
@for_each("factor", [None, 3.0, 8.0])
def test_only_sums_are_asked_for_where_that_is_set(dtype: torch.dtype, factor: float | None) -> None:
    scaling = Scaling.choose(dtype, 8, 2, factor=factor, only_sums=True, premultiplies=True)
    assert scaling.scatter_op == scaling.replicate_op == dist.ReduceOp.SUM
    assert scaling.before * scaling.after == (factor or 16.0)
    assert (scaling.before == 1.0) == (dtype is not torch.float16)


def test_a_backend_that_multiplies_before_it_sums_is_let_to() -> None:
    scaling = Scaling.choose(torch.float32, 8, 2, factor=5.0, premultiplies=True)
    assert scaling.before == scaling.after == 1.0 and scaling.replicate_op == dist.ReduceOp.SUM
    assert scaling.scatter_op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    # Not in a dtype in which the product could vanish, and not where nothing is reduced.
    assert Scaling.choose(torch.float16, 8, 2, factor=5.0, premultiplies=True).scatter_op == dist.ReduceOp.SUM
    assert Scaling.choose(torch.float32, 1, 2, factor=5.0, premultiplies=True).after == 5.0
    # NCCL reads the factor, a float, as an element: the lower half of it for bfloat16, zeros for powers of two.
    halves = Scaling.choose(torch.bfloat16, 8, 2, factor=4.0, premultiplies=True)
    assert (halves.scatter_op, halves.after) == (dist.ReduceOp.SUM, 4.0)
    assert Scaling.choose(torch.float32, 8, 2, factor=1.0, premultiplies=True).scatter_op == dist.ReduceOp.SUM


@for_each("factor", [None, 2.0, 5.0, 8.0])
def test_for_backends_that_cannot_multiply_the_result_is_divided(factor: float | None) -> None:
    """`Scaling.of_any_backend`: as for graphs, whose collectives sum and average only; the mean is the same."""
    chosen = Scaling.choose(torch.float32, 8, 2, factor=factor, premultiplies=True)
    plain = chosen.of_any_backend()
    assert {plain.scatter_op, plain.replicate_op} <= {dist.ReduceOp.SUM, dist.ReduceOp.AVG}
    values = torch.tensor([12.0, -24.0, 6.0, 0.0]).expand(8, 2, -1)
    expected = values[0, 0] if factor is None else values[0, 0] * 16 / factor
    torch.testing.assert_close(reduced(values, plain), expected, rtol=torch.finfo(torch.float32).eps, atol=0.0)
    # What is plain already stays what it is, and its numbers bit for bit.
    assert (plain is chosen) == (chosen.scatter_op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG))
    assert (plain is chosen) == (factor != 5.0 and factor != 2.0)
    assert plain.of_any_backend() is plain


# ---- the dtype of a reduction ------------------------------------------------------------------------------

HALF, FULL, WIDE = torch.bfloat16, torch.float32, torch.float64


class Several(nn.Module):
    """Parameters ``p0``, ``p1``, ... of these dtypes, two rows each."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        for index, dtype in enumerate(dtypes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.ones(2, dtype=dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(parameter.real.sum() for parameter in self.parameters())


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is the first of two ranks."""
    with fake_world(2):
        yield


def prepared(*dtypes: torch.dtype, **options: Any) -> tuple[nn.Module, GradientReducer]:
    """A sharded `Several` after a forward, and the reducer of its group."""
    model = fully_shard(Several(*dtypes), **options)
    model(torch.ones(1))
    (group,) = groups_of(model)
    return model, group.reducer


def buckets_of(reducer: GradientReducer) -> dict[torch.dtype, list[str]]:
    return {bucket.dtype: [param.fqn for param in bucket.params] for bucket in reducer.buckets}


@for_each(
    ("dtypes", "policy", "expected"),
    [
        ((FULL, FULL), MixedPrecisionPolicy(), {FULL: ["p0", "p1"]}),
        ((FULL, WIDE), MixedPrecisionPolicy(), {WIDE: ["p0", "p1"]}),
        ((HALF, FULL), MixedPrecisionPolicy(), {FULL: ["p0", "p1"]}),
        ((HALF, WIDE), MixedPrecisionPolicy(reduce_dtype=FULL), {FULL: ["p0", "p1"]}),
        ((FULL, torch.complex64), MixedPrecisionPolicy(), {FULL: ["p0"], torch.complex64: ["p1"]}),
        ((FULL, torch.complex64), MixedPrecisionPolicy(reduce_dtype=WIDE), {WIDE: ["p0"], torch.complex64: ["p1"]}),
    ],
)
def test_gradients_are_reduced_in_one_dtype_unless_asked_or_complex(
    dtypes: tuple[torch.dtype, ...], policy: Any, expected: dict[torch.dtype, list[str]], two_ranks: None
) -> None:
    _, reducer = prepared(*dtypes, mp_policy=policy)
    assert buckets_of(reducer) == expected


def test_each_policy_of_several_has_a_bucket(two_ranks: None) -> None:
    def policy(fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(reduce_dtype=WIDE if fqn == "p1" else None)

    _, reducer = prepared(FULL, FULL, FULL, mp_policy=policy)
    assert buckets_of(reducer) == {FULL: ["p0", "p2"], WIDE: ["p1"]}


def test_frozen_parameters_are_in_no_bucket(two_ranks: None) -> None:
    model = Several(FULL, FULL)
    model.p0.requires_grad_(False)
    fully_shard(model)
    model(torch.ones(1))
    (group,) = groups_of(model)
    assert buckets_of(group.reducer) == {FULL: ["p1"]} and group.reducer.is_trainable
    model.p1.requires_grad_(False)
    model(torch.ones(1))
    assert not group.reducer.is_trainable


def test_gradients_that_wait_keep_a_frozen_parameter_in_its_bucket(two_ranks: None) -> None:
    model, reducer = prepared(FULL, FULL)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1)).sum().backward()
    model.p0.requires_grad_(False)
    model(torch.ones(1)).sum().backward()
    assert buckets_of(reducer) == {FULL: ["p0", "p1"]}


# ---- what is owed ------------------------------------------------------------------------------------------


def test_accumulated_gradients_wait_in_the_dtype_of_their_reduction(two_ranks: None) -> None:
    model, reducer = prepared(FULL, mp_policy=MixedPrecisionPolicy(HALF, FULL))
    model.set_requires_gradient_sync(False)
    assert not reducer.owes_gradients()
    model(torch.ones(1)).sum().backward()
    (param,) = reducer.buckets[0].params
    assert param.unsharded is not None and param.unsharded.dtype is HALF and param.unsharded.grad.dtype is FULL
    assert (
        reducer.waiting == Waiting.UNREDUCED
        and reducer.owes_gradients()
        and reducer.is_due()
        and reducer in GradientReducer.owing
    )
    assert param.sharded.grad is None


def test_a_reduction_delivers_all_that_was_owed(two_ranks: None) -> None:
    model, reducer = prepared(FULL)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model(torch.ones(1)).sum().backward()
    (param,) = reducer.buckets[0].params
    assert param.sharded.grad is not None and param.unsharded is not None and param.unsharded.grad is None
    assert not reducer.owes_gradients() and not reducer.is_reducing


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_all_leaves_nothing_owed_and_zeros_are_still_a_gradient(set_to_none: bool, two_ranks: None) -> None:
    model, reducer = prepared(FULL, FULL)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1)).sum().backward()
    params = reducer.buckets[0].params
    reducer.clear(params[:1], set_to_none)
    assert reducer.owes_gradients(), "of the other parameter"
    reducer.clear(params[1:], set_to_none)
    assert reducer.owes_gradients() is not set_to_none
    assert all(param.unsharded is not None for param in params)
    left = [param.unsharded.grad for param in params if param.unsharded is not None]
    assert left == [None, None] if set_to_none else not any(each.any() for each in left if each is not None)


def test_abandoning_says_whether_earlier_gradients_were_lost(two_ranks: None) -> None:
    model, reducer = prepared(FULL)
    assert not reducer.abandon(), "there was nothing"
    model.set_requires_gradient_sync(False)
    model(torch.ones(1)).sum().backward()
    assert reducer.abandon() and not reducer.owes_gradients() and not reducer.abandon()


# ---- how it is scaled --------------------------------------------------------------------------------------


@for_each(
    ("change", "op", "after"),
    [
        (lambda model: None, dist.ReduceOp.AVG, 1.0),
        (lambda model: model.set_force_sum_reduction_for_comms(True), dist.ReduceOp.SUM, 2.0),
        (lambda model: model.set_gradient_divide_factor(8.0), dist.ReduceOp.SUM, 8.0),
        (lambda model: model.set_gradient_divide_factor(2.0), dist.ReduceOp.AVG, 1.0),
    ],
)
def test_settings_decide_the_operation_and_the_division(change: Any, op: Any, after: float, two_ranks: None) -> None:
    model, reducer = prepared(FULL)
    change(model)
    (bucket,) = reducer.buckets
    scaling = bucket.plan.scaling
    assert (scaling.scatter_op, scaling.before, scaling.after) == (op, 1.0, after)


def test_a_users_reduction_sees_no_presence_where_zeros_are_asked_for(two_ranks: None) -> None:
    """Gradients and zeros alone. Nor can what waits then tell later which parameters had a gradient."""
    model, reducer = prepared(FULL)
    model.set_reduce_scatter_unused_params(True)
    assert reducer.buckets[0].plan.presence == 1.0, "torch.distributed's own does not care"
    model.set_custom_reduce_scatter(Mock())
    (bucket,) = reducer.buckets
    assert bucket.plan.presence == 0.0
    bucket.reduce_scattered = torch.zeros(bucket.layout.numel)
    with pytest.raises(FSDPRuntimeError, match=r"set_reduce_scatter_unused_params\(\) was called, while"):
        model.set_reduce_scatter_unused_params(False)
    bucket.reduce_scattered = None
    model.set_reduce_scatter_unused_params(False)
    assert reducer.buckets[0].plan.presence == 1.0


def test_zeros_are_refused_for_gradients_whose_dtype_nobody_knows(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "reduces_in_grad_dtype", True)  # as newer versions of torch do
    model = Several(FULL)
    model.p0.grad_dtype = None
    fully_shard(model)
    model(torch.ones(1))
    with pytest.raises(FSDPValueError, match=r"'p0' has grad_dtype=None.*set MixedPrecisionPolicy.reduce_dtype"):
        model.set_reduce_scatter_unused_params(True)
