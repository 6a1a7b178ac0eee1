"""What is asked of `fully_shard`, as data: mistakes are refused where they are made, torch's own classes are taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fsdp2 import FSDPTypeError, FSDPValueError
from fsdp2.api.policies import CPUOffloadPolicy, OffloadPolicy, mixed_precision, offload
from fsdp2.core.options import DataParallelMeshDims, MixedPrecisionPolicy
from tests.unit.helpers import for_each

NAMES = ("param_dtype", "reduce_dtype", "output_dtype")
HALF = torch.bfloat16


# ---- mixed precision -------------------------------------------------------------------------------------------------


@for_each("name", NAMES)
@for_each("value", ["bfloat16", 16, float, torch.tensor(1.0)])
def test_a_dtype_that_is_none(name: str, value: Any) -> None:
    with pytest.raises(FSDPTypeError, match=rf"MixedPrecisionPolicy takes a dtype or None as '{name}', got"):
        MixedPrecisionPolicy(**{name: value})


@for_each("name", NAMES)
@for_each("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8])
def test_a_dtype_that_holds_no_fractions(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(FSDPValueError, match=rf"{name} must be a floating-point dtype, got {dtype}.*lose their values"):
        MixedPrecisionPolicy(**{name: dtype})  # type: ignore[arg-type]


@for_each("value", [None, 1, "yes"])
def test_cast_forward_inputs_is_a_bool(value: Any) -> None:
    with pytest.raises(FSDPTypeError, match=r"takes a bool or .* as 'cast_forward_inputs'"):
        MixedPrecisionPolicy(cast_forward_inputs=value)


@pytest.mark.parametrize("value", [HALF, {"weight": HALF}])
def test_an_override_is_a_function(value: Any) -> None:
    with pytest.raises(FSDPTypeError, match="takes a function or None as 'param_dtype_override_fn'"):
        MixedPrecisionPolicy(param_dtype_override_fn=value)


def test_policies_are_frozen_and_compare_by_value() -> None:
    policy = MixedPrecisionPolicy(HALF, torch.float32)
    assert policy == MixedPrecisionPolicy(HALF, torch.float32) != MixedPrecisionPolicy(HALF)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = torch.float16  # type: ignore[misc]


def test_the_override_decides_for_one_parameter() -> None:
    answers: dict[str, Any] = {"none": None, "cast": HALF, "own": torch.float32}
    asked: list[nn.Parameter] = []

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter)
        return answers[parameter.label]  # type: ignore[attr-defined,no-any-return]

    policy = MixedPrecisionPolicy(HALF, torch.float64, torch.float16, False, param_dtype_override_fn=override)
    for name, expected in (("none", HALF), ("cast", HALF), ("own", torch.float32)):
        parameter = nn.Parameter(torch.ones(1))
        parameter.label = name  # type: ignore[assignment]
        one = policy.for_parameter(parameter, name)
        assert asked[-1] is parameter
        assert one == MixedPrecisionPolicy(expected, torch.float64, torch.float16, False)
    assert MixedPrecisionPolicy(HALF).for_parameter(parameter, "x") == MixedPrecisionPolicy(HALF)


@for_each("answer", [torch.float16, "bfloat16", True])
def test_the_override_chooses_between_two_dtypes(answer: Any) -> None:
    policy = MixedPrecisionPolicy(HALF, param_dtype_override_fn=lambda parameter: answer)
    with pytest.raises(
        FSDPValueError, match=r"returned .* for parameter 'a\.b'; expected None, param_dtype \(torch\.bf"
    ):
        policy.for_parameter(nn.Parameter(torch.ones(1)), "a.b")


# ---- what takes a policy ---------------------------------------------------------------------------------------------


def test_torchs_mixed_precision_is_translated() -> None:
    theirs = torch_fsdp.MixedPrecisionPolicy(HALF, torch.float32, torch.float16, False)
    assert mixed_precision(theirs) == MixedPrecisionPolicy(HALF, torch.float32, torch.float16, False)
    assert mixed_precision(torch_fsdp.MixedPrecisionPolicy()) == MixedPrecisionPolicy()
    ours = MixedPrecisionPolicy(HALF)
    assert mixed_precision(ours) is ours


@for_each("value", [None, 1, "yes"])
def test_whether_shards_are_cached_is_yes_or_no(value: Any) -> None:
    with pytest.raises(FSDPTypeError, match=r"MixedPrecisionPolicy takes a bool as 'cache_shards', got"):
        MixedPrecisionPolicy(HALF, cache_shards=value)


def test_policies_that_differ_in_what_they_cache_are_not_equal() -> None:
    cached = MixedPrecisionPolicy(HALF, cache_shards=True)
    assert cached != MixedPrecisionPolicy(HALF)
    assert cached.for_parameter(nn.Parameter(torch.ones(2)), "x").cache_shards


def test_torchs_override_is_taken_along() -> None:
    def override(parameter: nn.Parameter) -> None:
        return None

    names = {each.name for each in dataclasses.fields(torch_fsdp.MixedPrecisionPolicy)}
    if "param_dtype_override_fn" in names:  # from torch 2.15 on
        theirs: Any = torch_fsdp.MixedPrecisionPolicy(HALF, param_dtype_override_fn=override)  # type: ignore[call-arg]
    else:
        theirs = torch_fsdp.MixedPrecisionPolicy(HALF)
        object.__setattr__(theirs, "param_dtype_override_fn", override)
    assert mixed_precision(theirs).param_dtype_override_fn is override


@for_each("policy", [None, HALF, "bf16", MixedPrecisionPolicy, CPUOffloadPolicy()])
def test_no_mixed_precision_policy(policy: Any) -> None:
    with pytest.raises(FSDPTypeError, match="mp_policy must be a MixedPrecisionPolicy, got"):
        mixed_precision(policy)


def test_without_a_mixed_precision_policy_the_remedy_is_named() -> None:
    with pytest.raises(FSDPTypeError, match="leave the argument out or pass Mixed"):
        mixed_precision(None)


def test_a_wrong_dtype_in_torchs_policy_is_refused_too() -> None:
    with pytest.raises(FSDPValueError, match="param_dtype must be a floating-point dtype"):
        mixed_precision(torch_fsdp.MixedPrecisionPolicy(torch.int8))


def test_torchs_offload_policies_are_translated() -> None:
    assert offload(torch_fsdp.OffloadPolicy()) == OffloadPolicy()
    for pinned in (True, False):
        assert offload(torch_fsdp.CPUOffloadPolicy(pin_memory=pinned)) == CPUOffloadPolicy(pinned)
    ours = CPUOffloadPolicy(False)
    assert offload(ours) is ours
    assert not isinstance(offload(OffloadPolicy()), CPUOffloadPolicy)


def test_none_offloads_nothing() -> None:
    assert offload(None) == OffloadPolicy()


@for_each("policy", [True, False, "cpu", CPUOffloadPolicy, MixedPrecisionPolicy()])
def test_no_offload_policy(policy: Any) -> None:
    with pytest.raises(FSDPTypeError, match="offload_policy must be an OffloadPolicy, a CPUOffloadPolicy or None, got"):
        offload(policy)


# ---- named dims ------------------------------------------------------------------------------------------------------


def test_one_of_shard_and_replicate_is_named() -> None:
    with pytest.raises(FSDPValueError, match="at least one of shard and replicate"):
        DataParallelMeshDims()


def test_names_are_tuples() -> None:
    assert DataParallelMeshDims("a").shard_names == ("a",)
    assert DataParallelMeshDims("a").replicate_names == ()
    both = DataParallelMeshDims(("a", "b"), replicate="c")
    assert (both.shard_names, both.replicate_names) == (("a", "b"), ("c",))
