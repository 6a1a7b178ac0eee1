"""`iter_full_parameters`: whole parameters one after the other, in bounded memory, beside the unsharded model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Shard

from fsdp2 import FSDPRuntimeError, FSDPValueError, Owned, full_parameters, fully_shard
from fsdp2.checkpoint import iter_full_parameters, iterating
from tests.harness import multi_rank
from tests.harness.compare import assert_same
from tests.harness.models import MODEL_CASES, TRANSFORMER, ModelCase
from tests.harness.multi_rank import others_full
from tests.harness.shared.odd_parameters import ODD
from tests.harness.shared.training import shard as shard_case
from tests.harness.shared.whole_weights import LAYOUTS, QUICK, TENSOR_PARALLEL, build, peak_bytes, shard


def listed(model: nn.Module, **arguments: Any) -> dict[str, Tensor]:
    """All that this rank is given, in order; each once."""
    found = list(iter_full_parameters(model, **arguments))
    assert len(dict(found)) == len(found)
    return dict(found)


def expected_of(plain: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in plain.named_parameters()}


# ---- values --------------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("layout", others_full([*LAYOUTS, TENSOR_PARALLEL], QUICK))
def test_all_layouts_and_budgets(layout: str, world_size: int) -> None:
    model, expected = shard(build(), layout), expected_of(build())
    for budget in (1, 3_000, 20_000, 1 << 28):
        for rank in (None, 0, world_size - 1):
            found = listed(model, budget_bytes=budget, rank=rank)
            if rank in (None, dist.get_rank()):
                assert list(found) == list(expected), "in the order of the model"
                assert_same("parameters", found, expected)
                assert not any(each.requires_grad for each in found.values())
            else:
                assert not found


@multi_rank(2, full=(4,))
@pytest.mark.parametrize("layout", ["zero3", "owned", "last dim", "offload"])
def test_floating_point_parameters_are_cast(layout: str) -> None:
    model, plain = shard(build(), layout), build()
    expected = {
        name: each.bfloat16() if each.is_floating_point() else each for name, each in expected_of(plain).items()
    }
    for budget in (2_000, 1 << 28):
        assert_same("parameters", listed(model, dtype=torch.bfloat16, budget_bytes=budget), expected)
    with pytest.raises(FSDPValueError, match="casts floating-point tensors"):
        iter_full_parameters(model, dtype=torch.int32)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("case", [*MODEL_CASES, ODD], ids=str)
def test_parameters_are_those_of_the_plain_model(case: ModelCase) -> None:
    model = shard_case(case)
    assert_same("parameters", listed(model), expected_of(case.build()))
    for _, module in case.build().named_children():  # what nothing shards
        assert_same("parameters", listed(module), expected_of(module))


@pytest.mark.full
@multi_rank(2, full=(4,))
def test_each_has_memory_of_its_own_and_keeps_its_order_there() -> None:
    model, plain = shard_case(ODD), ODD.build()
    found = listed(model)
    assert len({each.untyped_storage().data_ptr() for each in found.values() if each.numel()}) == len(found)
    for name, each in plain.named_parameters():
        stride = torch.empty_like(each).stride()
        assert found[name].stride() == stride, name
    before = expected_of(plain)
    for each in found.values():
        each.zero_()
    assert_same("parameters", listed(model), before)


@pytest.mark.full
@multi_rank(2)
def test_names_are_those_of_the_plain_model() -> None:
    plain = TRANSFORMER.build()
    model = TRANSFORMER.build()
    for index, block in enumerate(model.blocks):
        fully_shard(block)
        model.blocks[index] = checkpoint_wrapper(block)
    model = fully_shard(model)
    found = listed(torch.compile(model, backend="eager"))
    assert list(found) == list(expected_of(plain))
    part = listed(model.blocks[1])
    assert_same("a part of the model", part, expected_of(plain.blocks[1]))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("moment", ["unsharded", "after a forward", "before a backward"])
def test_whatever_is_registered_at_the_moment(moment: str) -> None:
    model, plain = shard_case(TRANSFORMER), TRANSFORMER.build()
    losses = [TRANSFORMER.loss(each, TRANSFORMER.batch(0, 0, dist.get_rank())) for each in (model, plain)]
    if moment == "unsharded":
        losses[0].backward()
        model.unshard()
    elif moment == "after a forward":
        with torch.no_grad():
            model(TRANSFORMER.batch(0, 1, 0).inputs)
    assert_same("parameters", listed(model), expected_of(plain))
    if moment != "unsharded":
        losses[0].backward()
    losses[1].backward()
    assert all(each.grad is not None for each in model.parameters())


@multi_rank(2)
def test_values_are_those_of_the_moment_and_leaving_early_is_fine() -> None:
    model, plain = shard(build(), "zero3"), build()
    iterator = iter_full_parameters(model, budget_bytes=1)
    assert next(iterator)[0] == next(iter(expected_of(plain)))
    iterator.close()
    for each in (model, plain):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.5)
        each(torch.arange(12).view(3, 4)).sum().backward()
        optimizer.step()
    assert_same("parameters", listed(model), expected_of(plain))


# ---- memory and collectives ----------------------------------------------------------------------


class Stack(nn.Module):
    """Parameters of 1 MiB and more, and many small ones between."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.large = nn.ParameterList(nn.Parameter(torch.randn(512, 512 + 32 * index)) for index in range(layers))
        self.small = nn.ParameterList(nn.Parameter(torch.randn(33, 17)) for _ in range(40))
        self.largest = nn.Parameter(torch.randn(1203, 1024))


MIB = 1 << 20
SLACK = 64 << 10
"""Of what is compared on the ranks, a message of names."""


@pytest.mark.full
@multi_rank(2, full=(4,))
@pytest.mark.parametrize("cut", ["rows", "columns", "owned"])
@pytest.mark.parametrize("budget", [MIB // 2, 3 * MIB, 8 * MIB, 64 * MIB])
def test_peaks(cut: str, budget: int) -> None:
    """The budget or the largest parameter; and what is received, where it does not arrive in place."""
    placements = {"rows": None, "columns": lambda p: Shard(1), "owned": lambda p: Owned(p.shape[1] % 2)}
    torch.manual_seed(3)
    model = fully_shard(Stack(), shard_placement_fn=placements[cut])
    largest = max(each.numel() * 4 for each in model.parameters())
    for rank in (None, 1):
        bound = max(budget, largest if cut == "owned" else (2.01 + 1 / dist.get_world_size()) * largest) + SLACK

        def iterate(rank: int | None = rank) -> None:
            for _, tensor in iter_full_parameters(model, budget_bytes=budget, rank=rank):
                del tensor

        iterate()
        peak = peak_bytes(iterate)
        assert peak <= bound, f"{peak / MIB:.2f} MiB, of {bound / MIB:.2f} MiB"
        if rank in (None, dist.get_rank()):
            assert peak >= largest, "it was seen"
        elif cut != "owned":
            assert peak <= max(budget, largest) // dist.get_world_size() + SLACK, "what it sends"


@pytest.mark.full
@multi_rank(2, full=(4,))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_as_few_exchanges_as_fit_and_half_the_bytes_of_a_half(dtype: torch.dtype | None) -> None:
    model = fully_shard(Stack(layers=16))
    size = 4 if dtype is None else 2
    total = sum(each.numel() * size for each in model.parameters())
    budget = total // 3
    exchanges: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = iterating.whole_tensors

        def counted(parts: Any, *others: Any, **named: Any) -> Any:
            exchanges.append(sum(each.local.nbytes for each in parts))
            return original(parts, *others, **named)

        patch.setattr(iterating, "whole_tensors", counted)
        for _, tensor in iter_full_parameters(model, budget_bytes=budget, dtype=dtype):
            del tensor
    assert len(exchanges) <= math.ceil(2.5 * total / budget) + 1, "what does not arrive in place is there twice"
    assert sum(exchanges) * dist.get_world_size() <= total * 1.02


# ---- errors --------------------------------------------------------------------------------------


@multi_rank(2)
def test_what_is_refused() -> None:
    model = shard_case(TRANSFORMER)
    with pytest.raises(FSDPValueError, match="a number of bytes > 0"):
        iter_full_parameters(model, budget_bytes=0)
    with pytest.raises(FSDPValueError, match=r"rank=7, and the model is on the ranks \[0, 1\]"):
        iter_full_parameters(model, rank=7)
    with pytest.raises(FSDPRuntimeError, match=r"the ranks differ in what iter_full_parameters\(\) is to do"):
        iter_full_parameters(model, budget_bytes=100 + dist.get_rank())
    with full_parameters(model), pytest.raises(FSDPRuntimeError, match=r"inside of full_parameters"):
        iter_full_parameters(model)
    on_meta = fully_shard(nn.Linear(3, 5, device="meta"))
    with pytest.raises(FSDPRuntimeError, match=r"'weight', 'bias' are on the meta device"):
        iter_full_parameters(on_meta)
    assert len(listed(model)) == len(list(model.parameters()))


@multi_rank(2)
def test_an_error_on_one_rank_is_one_on_all() -> None:
    model = shard_case(TRANSFORMER)
    rank = dist.get_rank()
    other = model if rank else fully_shard(nn.Linear(3, 5, device="meta"))
    with pytest.raises(FSDPRuntimeError, match=r"on the meta device"):
        iter_full_parameters(other)
