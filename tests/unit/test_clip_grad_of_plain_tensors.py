"""`clip_grad_norm_` on plain tensors is torch's: arguments, values, special cases. No ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from tests.harness.torch_api import assert_takes_the_same
from tests.unit.helpers import for_each

ORDERS = [2.0, 1.0, 3.0, 0.5, float("inf"), "inf", 2, 0.0]
NAMES = ["clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"]


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """Of several shapes, one without gradient; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    every = []
    for dtype in dtypes or (torch.float32,):
        for shape in ((3, 4), (5,), (), (2, 0)):
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = torch.randn(shape, generator=generator).to(dtype)
            every.append(parameter)
    return [*every, nn.Parameter(torch.zeros(3))]


def of_some_size(every: list[nn.Parameter]) -> list[nn.Parameter]:
    """Without the empty ones, of which torch has no maximum."""
    return [each for each in every if each.numel()]


def clipped(clip: Callable[..., Tensor], every: list[nn.Parameter], *args: Any, **kwargs: Any) -> list[Tensor]:
    """The norm, and the gradients after it."""
    norm = clip(every, *args, **kwargs)
    return [norm, *(each.grad for each in every if each.grad is not None)]


@for_each("name", NAMES)
def test_clipping_takes_torchs_arguments(name: str) -> None:
    assert_takes_the_same(getattr(torch.nn.utils, name), getattr(fsdp2, name))


def test_the_swap_leaves_torchs_alone() -> None:
    from fsdp2.compat.names import counterparts

    assert not set(NAMES) & {each.name for each in counterparts()}


@for_each("foreach", [None, True, False])
@for_each("max_norm", [0.5, 100.0, float("inf"), 1])
@for_each("norm_type", ORDERS)
def test_plain_gradients_are_clipped_as_by_torch(norm_type: float, max_norm: float, foreach: bool | None) -> None:
    mine, yours = (
        clipped(clip, of_some_size(parameters()), max_norm, norm_type, foreach=foreach)
        for clip in (fsdp2.clip_grad_norm_, torch.nn.utils.clip_grad_norm_)
    )
    torch.testing.assert_close(mine, yours, rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_zero_counts_gradients_that_are_not_all_zero(dtype: torch.dtype, foreach: bool | None) -> None:
    values = ([0.0, -0.0], [0.0, 2.0], [0.0], [float("nan"), 0.0], [1e-4])
    mine, yours = ([nn.Parameter(torch.zeros(len(each), dtype=dtype)) for each in values] for _ in range(2))
    for every in (mine, yours):
        for parameter, value in zip(every, values, strict=True):
            parameter.grad = torch.tensor(value, dtype=dtype)
    arguments: dict[str, Any] = {"max_norm": 1.5, "norm_type": 0, "foreach": foreach, "error_if_nonfinite": True}
    results = [
        clipped(clip, every, **arguments)
        for clip, every in ((fsdp2.clip_grad_norm_, mine), (torch.nn.utils.clip_grad_norm_, yours))
    ]
    assert results[0][0] == 3
    torch.testing.assert_close(*results, rtol=1e-2, atol=0, equal_nan=True, check_dtype=False)  # bfloat16 is rounded
    assert fsdp2.get_total_norm([torch.tensor([0j, 1j]), torch.tensor([0j])], 0) == 1


@for_each("norm_type", [2.0, 1.0, float("inf")])
def test_empty_tensors_count_for_nothing(norm_type: float) -> None:
    every = parameters()
    whole = torch.cat([each.grad.flatten() for each in every if each.grad is not None])
    assert torch.allclose(fsdp2.clip_grad_norm_(every, 1.0, norm_type), torch.linalg.vector_norm(whole, norm_type))


def test_a_single_tensor_and_a_generator() -> None:
    every = parameters()
    first = every[0]
    assert first.grad is not None
    norm = fsdp2.clip_grad_norm_(first, 0.5)
    assert norm > 0.5 and torch.allclose(first.grad.norm(), torch.tensor(0.5))
    assert torch.allclose(fsdp2.get_total_norm(first.grad), torch.tensor(0.5))
    fsdp2.clip_grad_norm_((each for each in every), 0.25)
    assert torch.allclose(fsdp2.get_total_norm([each.grad for each in every[:4]]), torch.tensor(0.25))
    fsdp2.clip_grads_with_norm_((each for each in every), 0.125, torch.tensor(0.25))
    assert torch.allclose(fsdp2.get_total_norm(each.grad for each in every[:4]), torch.tensor(0.125))


@pytest.mark.parametrize("clip", [fsdp2.clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["fsdp2", "torch"])
def test_nothing_to_clip(clip: Callable[..., Tensor]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(clip([], 1.0), torch.tensor(0.0))
        assert torch.equal(clip([nn.Parameter(torch.ones(2))], 1.0), torch.tensor(0.0))
        assert not caught
        assert torch.equal(clip(iter(()), 1.0), torch.tensor(0.0))
        assert not caught
        assert torch.equal(clip((each for each in ()), 1.0), torch.tensor(0.0))
    (warning,) = caught
    assert "empty generator" in str(warning.message) and warning.filename == __file__


@for_each("value", [float("nan"), float("inf")])
@for_each("norm_type", [2.0, 1.0, float("inf")])
def test_a_norm_that_is_not_finite(norm_type: float, value: float) -> None:
    mine, yours = parameters()[:2], parameters()[:2]
    for every in (mine, yours):
        assert every[1].grad is not None
        every[1].grad[2] = value
    with pytest.raises(fsdp2.FSDPRuntimeError, match="error_if_nonfinite=False scales"):
        fsdp2.clip_grad_norm_(mine, 1.0, norm_type, error_if_nonfinite=True)
    results = [
        clipped(clip, every, 1.0, norm_type)
        for clip, every in ((fsdp2.clip_grad_norm_, mine), (torch.nn.utils.clip_grad_norm_, yours))
    ]
    torch.testing.assert_close(*results, equal_nan=True)


def test_several_dtypes() -> None:
    """Every gradient keeps its dtype; the norm is float32, or float64 if a parameter is."""
    narrow = parameters(torch.bfloat16, torch.float16, torch.float32)
    values = [each.grad.float().clone() for each in narrow if each.grad is not None]
    norm, *gradients = clipped(fsdp2.clip_grad_norm_, narrow, 0.5)
    expected = torch.linalg.vector_norm(torch.cat([each.flatten() for each in values]))
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for gradient, value in zip(gradients, values, strict=True):
        torch.testing.assert_close(gradient, (value * (0.5 / (expected + 1e-6))).to(gradient.dtype), rtol=1e-6, atol=0)
    assert fsdp2.clip_grad_norm_(parameters(torch.float32, torch.float64), 1.0).dtype == torch.float64


def test_powers_beyond_float32() -> None:
    """The norm of each tensor fits into float32, the sum of their squares does not."""
    gradients = [torch.tensor(3e25), torch.tensor(4e25)]
    assert torch.allclose(fsdp2.get_total_norm(gradients), torch.tensor(5e25))


def test_complex_gradients() -> None:
    gradient = torch.tensor([3 + 4j, 0j])
    assert fsdp2.get_total_norm([gradient]) == 5.0 and fsdp2.get_total_norm([gradient]).dtype == torch.float32


@for_each("norm_type", [-1.0, float("-inf"), float("nan")])
def test_other_orders_are_refused(norm_type: float) -> None:
    with pytest.raises(fsdp2.FSDPValueError, match=r"norm_type must be a number >= 0 or inf"):
        fsdp2.clip_grad_norm_(parameters(), 1.0, norm_type)


def test_further_ranks_are_named_by_a_mesh() -> None:
    with pytest.raises(fsdp2.FSDPTypeError, match=r"DeviceMesh.from_group\(group, device_type\)"):
        fsdp2.clip_grad_norm_(parameters(), 1.0, mesh=object())  # type: ignore[arg-type]


def test_nothing_is_recorded_by_autograd() -> None:
    every = parameters()
    gradient = every[0].grad
    assert gradient is not None
    gradient.requires_grad_()
    norm = fsdp2.clip_grad_norm_(every, 0.5)
    assert not norm.requires_grad and gradient.is_leaf and torch.is_grad_enabled()
