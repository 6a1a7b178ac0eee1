"""`register_comm_hook` of the wrapper: what a hook is given, and that it replaces the reduction and the mean."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import clip_grad_norm_
from fsdp2.compat.fsdp1 import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from tests.harness import multi_rank
from tests.harness.compare import Tolerance, assert_sharded_same, gradients_of, tolerance_for
from tests.harness.models import FROZEN, PARTLY_USED, TIED, UNEVEN_MLP, ModelCase
from tests.harness.reference import Accumulation, Reference, adamw
from tests.harness.shared.training import loss_on, trainable
from tests.harness.training import assert_trains_like

Calls = list[tuple[Tensor, Tensor | None]]
_HALF = Tolerance(0.01, 0.01, "the reference sums halves in another order")
_ONE_RANK = "ignore:FSDP is switching to use `NO_SHARD`"


def averages(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    """As the engine does, with collectives of its own; the flat gradients of all ranks are summed in rank order."""
    calls.append((flat.clone(), None if output is None else output.clone()))
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    mean = torch.stack(everyone).sum(0) / len(everyone)
    if output is None:
        flat.copy_(mean)
    else:
        output.copy_(mean.chunk(len(everyone))[dist.get_rank()])
        flat.fill_(float("nan"))  # which nobody reads any more


def elsewhere(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    """As torch's own compressing hooks do: the result lies in other memory."""
    if output is None:
        wide = flat.double()
        averages(calls, wide)
        flat.data = wide
    else:
        narrow = output.double()
        averages(calls, flat.double(), narrow)
        output.data = narrow


def raises(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    raise RuntimeError("the hook's own")


def hooked(case: ModelCase, hook: Callable[..., None] = averages, *, seed: int = 0, **arguments: Any) -> Any:
    """The model, its units wrapped, and what the hook was called with."""
    calls: Calls = []
    arguments = {"use_orig_params": True, **arguments}
    model = case.build(seed)
    for name in case.unit_names:
        model.set_submodule(name, FullyShardedDataParallel(model.get_submodule(name), **arguments))
    model = FullyShardedDataParallel(model, **arguments)
    model.register_comm_hook(calls, hook)
    return model, calls


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TIED, FROZEN], ids=str)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_hook_that_averages_trains_like_the_reference(case: ModelCase, strategy: str, world_size: int) -> None:
    model, calls = hooked(case, sharding_strategy=ShardingStrategy[strategy])
    reference = Reference(case, world_size=world_size)
    optimizer = adamw(trainable(model))
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance_for(world_size))
    assert calls and len(calls) % 3 == 0, "as many in every step"


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, PARTLY_USED], ids=str)
def test_a_hook_sees_the_gradients_of_a_group_and_zeros(case: ModelCase, world_size: int) -> None:
    """Each element of this rank's gradients once, as many for every rank, and nothing of what else travels."""
    model, calls = hooked(case)
    plain = case.build()
    for each in (model, plain):
        loss_on(case, each, 0, dist.get_rank()).backward()
    found = [flat[flat != 0] for flat, _ in calls]
    gradients = torch.cat([each.grad.flatten() for each in plain.parameters() if each.grad is not None])
    assert torch.equal(torch.cat(found).sort().values, gradients[gradients != 0].sort().values)
    for flat, output in calls:
        assert output is not None and flat.shape == (world_size * output.numel(),)
        assert flat.dtype == output.dtype == torch.float32


@multi_rank(2, 4)
def test_the_result_may_lie_in_other_memory_and_another_dtype(world_size: int) -> None:
    case = UNEVEN_MLP
    model, _ = hooked(case, elsewhere)
    reference = Reference(case, world_size=world_size)
    loss_on(case, model, 0, dist.get_rank()).backward()
    expected = reference.step().gradients
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=tolerance_for(world_size))


class _UsedByOneRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if dist.get_rank() == 1 else x


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_without_a_gradient_takes_part(dtype: torch.dtype, world_size: int) -> None:
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
    model: Any = FullyShardedDataParallel(_UsedByOneRank(), mixed_precision=precision)
    model.register_comm_hook([], averages)
    model(torch.ones(2, 5)).float().sum().backward()
    assert not model.never.weight.grad.full_tensor().any() and model.always.weight.grad is not None
    expected = torch.full((5,), 2.0 / world_size)
    assert torch.equal(model.sometimes.bias.grad.full_tensor(), expected)


@multi_rank(2)
def test_one_call_for_each_reduction(world_size: int) -> None:
    case = UNEVEN_MLP
    model, calls = hooked(case)
    reference = Reference(case, world_size=world_size, microbatches=3, accumulation=Accumulation.REDUCE_LAST)
    assert_trains_like(
        reference,
        model,
        adamw(trainable(model)),
        steps=2,
        before_forward=lambda micro: model.set_requires_gradient_sync(micro == 2),
    )
    assert len(calls) == 2 * 3
    reference = Reference(case, world_size=world_size, microbatches=2, model=case.build(1))
    model, calls = hooked(case, seed=1)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=1)
    assert len(calls) == 2 * 3, "each backward by itself"


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(
    "arguments",
    [
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.float16)},
    ],
    ids=["offloaded", "fp16"],
)
def test_beside_other_arguments(arguments: dict[str, Any], world_size: int) -> None:
    case, dtype = UNEVEN_MLP, torch.float16 if "mixed_precision" in arguments else torch.float32
    model, calls = hooked(case, **arguments)
    reference = Reference(case, world_size=world_size, reduce_dtype=dtype, microbatches=2)
    tolerance = tolerance_for(world_size)
    if dtype is torch.float16:  # sums of halves in rank order, as the reference has them
        tolerance = None if world_size == 2 else _HALF
    assert_trains_like(reference, model, adamw(trainable(model)), steps=2, tolerance=tolerance)
    assert {flat.dtype for flat, _ in calls} == {dtype}


@multi_rank(2)
def test_a_hook_that_raises_leaves_a_model_that_goes_on(world_size: int) -> None:
    case = UNEVEN_MLP
    model, calls = hooked(case, lambda state, *tensors: state[0](*tensors))
    calls.append(lambda *tensors: raises([], *tensors))
    with pytest.raises(RuntimeError, match="the hook's own"):
        loss_on(case, model, 0, dist.get_rank()).backward()
    calls[0] = lambda *tensors: averages([], *tensors)
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=2)


@multi_rank(2)
def test_copies_have_the_hook(world_size: int) -> None:
    case = UNEVEN_MLP
    model, calls = hooked(case)
    made = copy.deepcopy(model)
    with pytest.raises(AssertionError, match="A communication hook is already registered"):
        made.register_comm_hook(None, averages)
    loss_on(case, made, 0, dist.get_rank()).backward()
    assert_sharded_same("gradients", gradients_of(made), Reference(case, world_size=world_size).step().gradients)
    assert len(calls) == 3


@multi_rank(2)
def test_a_hook_may_come_after_the_first_step(world_size: int) -> None:
    case = UNEVEN_MLP
    late: Any = FullyShardedDataParallel(case.build(), use_orig_params=True)
    loss_on(case, late, 0, dist.get_rank()).backward()
    late.zero_grad()
    late.register_comm_hook(calls := [], averages)
    loss_on(case, late, 0, dist.get_rank()).backward()
    assert len(calls) == 1
    assert_sharded_same("gradients", gradients_of(late), Reference(case, world_size=world_size).step().gradients)


@multi_rank(1)
@pytest.mark.filterwarnings(_ONE_RANK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_rank_alone_calls_the_hook_too(dtype: torch.dtype, world_size: int) -> None:
    model, calls = hooked(UNEVEN_MLP, elsewhere, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    reference = Reference(UNEVEN_MLP, world_size=world_size, reduce_dtype=dtype)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=2)
    assert [output is None for _, output in calls] == [True] * 6


def noisy(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    """As differentially private training does, to all elements."""
    averages(calls, flat, output)
    assert output is not None
    output.add_(torch.arange(1.0, output.numel() + 1))


@multi_rank(2)
def test_norms_do_not_count_what_a_hook_leaves_in_the_padding(world_size: int) -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(5, 3), use_orig_params=True)
    model.register_comm_hook([], noisy)
    model(torch.ones(2, 5)).square().sum().backward()
    whole = [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]
    expected = torch.cat([each.flatten() for each in whole]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 1.0), expected)
    for parameter, before in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), before / (expected + 1e-6))  # type: ignore[union-attr]
