"""Dtypes parameter by parameter: `param_dtype_override_fn`, `grad_dtype`, several original dtypes in one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import assert_same, full_parameters, multi_rank
from tests.harness.compare import Tolerance
from tests.harness.models import UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API, beyond_torch, installed_from, torch_from
from tests.harness.parity.programs import TOWER, WIDTH, loss_on, shard
from tests.harness.parity.trace import SCATTER, traced

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW_PRECISION = Tolerance(rtol=2e-2, atol=2e-3, reason="bfloat16 gradients")


def policy(**fields: Any) -> Any:
    return API.MixedPrecisionPolicy(**fields)


# ---- several original dtypes ---------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
def test_dtypes_may_change_until_the_first_forward() -> None:
    model = shard(UNEVEN_MLP, mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32))
    model.double()
    assert all(parameter.dtype == FP64 for parameter in model.parameters())
    loss_on(UNEVEN_MLP, model).backward()
    assert all(parameter.grad.dtype == FP64 for parameter in model.parameters())


@multi_rank(2)
@beyond_torch("a group needs one original dtype: AssertionError")
def test_parameters_of_several_original_dtypes_in_one_group() -> None:
    def build() -> nn.Module:
        model = TOWER.make_model()
        model.b.to(FP64)
        return model

    case = ModelCase("mixed", build, TOWER.make_batch, (), F.mse_loss)
    model = shard(case, mp_policy=policy(param_dtype=FP32))
    loss_on(case, model).backward()
    assert model.a.weight.grad.dtype == FP32 and model.b.weight.grad.dtype == FP64
    assert_same("parameters", full_parameters(model), {n: p.detach() for n, p in case.build().named_parameters()})


@multi_rank(2)
@torch_from((2, 15), "param_dtype_override_fn is new")
def test_an_override_keeps_single_parameters_in_their_own_dtype() -> None:
    """Norms in fp32 within a bfloat16 group; the function is asked once for each parameter."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen = [self.norm.weight.dtype, self.linear.weight.dtype, x.dtype]
            return self.linear(F.layer_norm(x.float(), (WIDTH,), self.norm.weight, self.norm.bias).to(BF16))

    asked: list[nn.Parameter] = []

    def keep_norms(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter)
        return FP32 if any(parameter is norm for norm in norms) else None

    model = Net()
    originals, norms = list(model.parameters()), list(model.norm.parameters())
    API.fully_shard(model, mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32, param_dtype_override_fn=keep_norms))
    for _ in range(2):
        model(torch.randn(2, WIDTH)).float().sum().backward()
    assert model.seen == [FP32, BF16, BF16]
    assert [id(each) for each in asked] == [id(each) for each in originals]
    assert all(parameter.grad.dtype == FP32 for parameter in model.parameters())


@multi_rank(2)
@torch_from((2, 15), "param_dtype_override_fn is new")
@pytest.mark.parametrize("wrong", [FP16, "bfloat16"], ids=str)
def test_an_override_to_any_other_dtype_is_refused(wrong: Any) -> None:
    fields = {"param_dtype": BF16, "param_dtype_override_fn": lambda parameter: wrong}
    with pytest.raises(ValueError, match="param_dtype_override_fn"):
        API.fully_shard(nn.Linear(2, 2), mp_policy=policy(**fields))


@multi_rank(2)
@beyond_torch("ranks hang, or gather garbage")
def test_an_override_that_differs_between_ranks_is_an_error_on_all_of_them() -> None:
    mine = FP32 if dist.get_rank() == 0 else BF16
    model = nn.Linear(WIDTH, WIDTH)
    API.fully_shard(model, mp_policy=policy(param_dtype=BF16, param_dtype_override_fn=lambda parameter: mine))
    with pytest.raises(RuntimeError, match="ranks"):
        model(torch.randn(2, WIDTH))


@torch_from((2, 15), "param_dtype_override_fn is new")
def test_the_override_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        API.MixedPrecisionPolicy(BF16, FP32, None, True, lambda parameter: None)


# ---- grad_dtype (2.15) ---------------------------------------------------------------------------


def linear_with_grad_dtype(grad_dtype: torch.dtype | None, dtype: torch.dtype = BF16) -> nn.Linear:
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
    model.weight.grad_dtype = grad_dtype
    return model


@multi_rank(2)
@installed_from((2, 15), "grad_dtype policies")
def test_grad_dtype_is_the_dtype_of_the_reduction_and_of_the_sharded_gradient() -> None:
    model = API.fully_shard(linear_with_grad_dtype(FP32))
    assert model.weight.grad_dtype == FP32
    x = torch.randn(2, WIDTH, dtype=BF16)
    model(x).sum().backward()
    with traced() as trace:
        model(x).sum().backward()
    assert {each.dtype for each in trace.of(SCATTER)} == {FP32}
    assert model.weight.dtype == BF16 and model.weight.grad.dtype == FP32


@multi_rank(2)
@installed_from((2, 15), "grad_dtype policies")
def test_reduced_shards_keep_the_grad_dtype_whatever_they_are_reduced_in() -> None:
    model = API.fully_shard(linear_with_grad_dtype(FP32), mp_policy=policy(reduce_dtype=BF16))
    with traced() as trace:
        model(torch.randn(2, WIDTH, dtype=BF16)).sum().backward()
    assert {each.dtype for each in trace.of(SCATTER)} == {BF16}
    assert model.weight.grad.dtype == FP32


@multi_rank(2)
@installed_from((2, 15), "grad_dtype policies")
def test_grad_dtype_none_takes_what_arrives() -> None:
    model = API.fully_shard(linear_with_grad_dtype(None, FP32), mp_policy=policy(param_dtype=BF16))
    with traced() as trace:
        model(torch.randn(2, WIDTH)).sum().backward()
    assert {each.dtype for each in trace.of(SCATTER)} == {BF16}
    assert model.weight.grad.dtype == BF16


@pytest.mark.full
@multi_rank(2)
@installed_from((2, 15), "grad_dtype policies")
def test_gradients_of_several_dtypes_are_reduced_in_the_promoted_one() -> None:
    model = nn.Sequential(linear_with_grad_dtype(FP32), linear_with_grad_dtype(BF16))
    API.fully_shard(model)
    x = torch.randn(2, WIDTH, dtype=BF16)
    model(x).sum().backward()
    with traced() as trace:
        model(x).sum().backward()
    assert {each.dtype for each in trace.of(SCATTER)} == {FP32}
    assert [parameter.grad.dtype for parameter in model.parameters()] == [FP32, BF16]


@pytest.mark.full
@multi_rank(2)
@installed_from((2, 15), "grad_dtype policies")
def test_grad_dtype_survives_conversions_and_assignment() -> None:
    model = API.fully_shard(linear_with_grad_dtype(FP32))
    model.to(FP16)
    assert model.weight.dtype == FP16 and model.weight.grad_dtype == FP32
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model.weight.grad_dtype == FP32
    model(torch.randn(2, WIDTH, dtype=FP16)).sum().backward()
    assert model.weight.grad.dtype == FP32


@multi_rank(2)
@installed_from((2, 15), "grad_dtype policies")
def test_unused_parameters_with_grad_dtype_none_need_a_reduce_dtype() -> None:
    model = API.fully_shard(linear_with_grad_dtype(None))
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(ValueError, match="reduce_dtype"):
        model(torch.randn(2, WIDTH, dtype=BF16)).sum().backward()


@multi_rank(2)
@installed_from((2, 15), "grad_dtype policies")
def test_accumulation_without_sync_follows_grad_dtype() -> None:
    model = API.fully_shard(linear_with_grad_dtype(FP32))
    plain = linear_with_grad_dtype(FP32)
    with torch.no_grad():
        plain.weight.copy_(model.weight.full_tensor())
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        for rank in range(2):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * micro + rank)).to(BF16)
            plain(x).square().sum().backward()
            if rank == dist.get_rank():
                model(x).square().sum().backward()
    assert plain.weight.grad is not None
    expected = {"weight": plain.weight.grad / 2}
    assert_same("gradient", {"weight": model.weight.grad.full_tensor()}, expected, tolerance=LOW_PRECISION)
