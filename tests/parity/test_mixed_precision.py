"""`MixedPrecisionPolicy`: the dtypes of parameters, reductions, inputs and outputs, and where they are seen."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import Accumulation, Reference, multi_rank, tolerance_for
from tests.harness.compare import Tolerance
from tests.harness.models import FROZEN, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API, TORCH_VERSION, torch_from
from tests.harness.parity.programs import SIZES, TOWER, WIDTH, loss_on, mesh_of, shard, train, trainable
from tests.harness.parity.trace import GATHER, REDUCE, SCATTER, Trace, traced

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# What `reduce_dtype=None` means under `param_dtype=bfloat16` for parameters of fp32, by version of torch.
DEFAULT_REDUCE_DTYPE = BF16 if TORCH_VERSION < (2, 15) else FP32
LOW_PRECISION_SUMS = Tolerance(rtol=2e-2, atol=2e-3, reason="4 ranks sum in bfloat16 or fp16, in another order")


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that moves parameters no further apart than gradients are."""
    return torch.optim.SGD(parameters, lr=0.1)


def policy(**fields: Any) -> Any:
    return API.MixedPrecisionPolicy(**fields)


def step_trace(model: Any, case: ModelCase = TOWER) -> Trace:
    """Of the second step: the first has bookkeeping of its own."""
    loss_on(case, model).backward()
    with traced() as trace:
        loss_on(case, model).backward()
    return trace


# ---- the policy ----------------------------------------------------------------------------------


def test_the_policy_is_a_frozen_dataclass_with_documented_defaults() -> None:
    default = policy()
    assert (default.param_dtype, default.reduce_dtype, default.output_dtype) == (None, None, None)
    assert default.cast_forward_inputs is True
    assert API.MixedPrecisionPolicy(BF16, FP32, FP16, False) == policy(
        param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP16, cast_forward_inputs=False
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        default.param_dtype = BF16
    assert dataclasses.replace(default, param_dtype=BF16).param_dtype == BF16
    assert hash(policy(param_dtype=BF16)) == hash(policy(param_dtype=BF16))


# ---- training ------------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, FROZEN], ids=str)
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP64, FP64)], ids=str
)
def test_mixed_precision_trains_like_the_reference(
    case: ModelCase, param_dtype: torch.dtype, reduce_dtype: torch.dtype, world_size: int
) -> None:
    model = shard(case, mp_policy=policy(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
    reference = Reference(case, world_size=world_size, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    # fp16 is divided before and after the sum, which rounds subnormal gradients.
    low = reduce_dtype == FP16 or (world_size > 2 and reduce_dtype == BF16)
    train(case, model, reference=reference, tolerance=LOW_PRECISION_SUMS if low else tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [TRANSFORMER, TIED], ids=str)
@pytest.mark.parametrize("reduce_dtype", [BF16, FP32], ids=str)
def test_models_whose_gradients_autograd_adds_up(case: ModelCase, reduce_dtype: torch.dtype, world_size: int) -> None:
    """Norms and tied weights: versions of torch differ in whether such sums are rounded before the reduction."""
    model = shard(case, mp_policy=policy(param_dtype=BF16, reduce_dtype=reduce_dtype))
    reference = Reference(
        case, world_size=world_size, param_dtype=BF16, reduce_dtype=reduce_dtype, make_optimizer=plain_sgd
    )
    train(case, model, reference=reference, optimizer=plain_sgd(trainable(model)), tolerance=LOW_PRECISION_SUMS)


@pytest.mark.full
@multi_rank(4)
def test_hsdp_reduces_in_reduce_dtype_twice() -> None:
    model = shard(TOWER, mesh=mesh_of(2, 2), mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32))
    trace = step_trace(model)
    assert {each.dtype for each in trace.of(GATHER)} == {BF16}
    assert {each.dtype for each in trace.of(SCATTER)} == {FP32}
    assert {each.dtype for each in trace.of(REDUCE)} == {FP32}
    model = shard(UNEVEN_MLP, mesh=mesh_of(2, 2), mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32))
    train(UNEVEN_MLP, model, reference=Reference(UNEVEN_MLP, world_size=4, param_dtype=BF16, reduce_dtype=FP32))


@multi_rank(2)
def test_float16_does_not_overflow_in_the_reduction() -> None:
    """Gradients whose sum over ranks exceeds fp16, but whose mean does not."""
    model = nn.Linear(2, 2, bias=False)
    API.fully_shard(model, mp_policy=policy(param_dtype=FP16, reduce_dtype=FP16))
    model(torch.ones(1, 2)).mul(40000.0).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 2), 40000.0))


@pytest.mark.full
@multi_rank(2)
def test_reduce_dtype_alone_leaves_the_computation_alone() -> None:
    model = shard(TOWER, mp_policy=policy(reduce_dtype=BF16))
    trace = step_trace(model)
    assert {each.dtype for each in trace.of(GATHER)} == {FP32}
    assert {each.dtype for each in trace.of(SCATTER)} == {BF16}
    model = shard(UNEVEN_MLP, mp_policy=policy(reduce_dtype=BF16))
    train(UNEVEN_MLP, model, reference=Reference(UNEVEN_MLP, world_size=2, reduce_dtype=BF16))


# ---- what is seen where --------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
def test_parameters_are_gathered_in_param_dtype_and_kept_in_their_own() -> None:
    model = shard(TOWER, mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32))
    trace = step_trace(model)
    assert {each.dtype for each in trace.of(GATHER)} == {BF16}
    assert sum(each.nbytes for each in trace.of(GATHER)) == 2 * 2 * sum(SIZES.values())
    assert {each.dtype for each in trace.of(SCATTER)} == {FP32}
    for parameter in model.parameters():
        assert parameter.dtype == FP32 and parameter.grad.dtype == FP32
    model.a.unshard()
    assert model.a.weight.dtype == BF16
    model.a.reshard()
    assert model.a.weight.dtype == FP32


@pytest.mark.full
@multi_rank(2)
def test_reduce_dtype_none_means_what_the_installed_torch_says() -> None:
    model = shard(TOWER, mp_policy=policy(param_dtype=BF16))
    trace = step_trace(model)
    assert {each.dtype for each in trace.of(SCATTER)} == {DEFAULT_REDUCE_DTYPE}
    model = shard(UNEVEN_MLP, mp_policy=policy(param_dtype=BF16))
    reference = Reference(UNEVEN_MLP, world_size=2, param_dtype=BF16, reduce_dtype=DEFAULT_REDUCE_DTYPE)
    train(UNEVEN_MLP, model, reference=reference)


@pytest.mark.full
@multi_rank(2)
def test_modules_of_one_model_may_have_different_policies() -> None:
    model = TOWER.build()
    API.fully_shard(model.a, mp_policy=policy(param_dtype=BF16, reduce_dtype=BF16))
    API.fully_shard(model.b, mp_policy=policy(param_dtype=FP16, reduce_dtype=FP32, output_dtype=FP32))
    API.fully_shard(model.c)
    API.fully_shard(model.d)
    API.fully_shard(model)
    seen: dict[str, set[torch.dtype]] = {name: set() for name in "abcd"}
    for name in "abcd":
        layer = getattr(model, name)
        layer.register_forward_pre_hook(lambda m, args, name=name: seen[name].update({m.weight.dtype, args[0].dtype}))
    trace = step_trace(model)
    assert [trace.dtypes(GATHER, SIZES[name]) for name in "abcd"] == [{BF16}, {FP16}, {FP32}, {FP32}]
    assert [trace.dtypes(SCATTER, SIZES[name]) for name in "abcd"] == [{BF16}, {FP32}, {FP32}, {FP32}]
    assert seen == {"a": {BF16}, "b": {FP16}, "c": {FP32}, "d": {FP32}}


@multi_rank(2)
def test_buffers_are_not_cast() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            assert self.scale.dtype == FP32
            return self.linear(x) * self.scale

    model = API.fully_shard(Net(), mp_policy=policy(param_dtype=BF16))
    assert model(torch.randn(4, WIDTH)).dtype == FP32
    assert model.scale.dtype == FP32


# ---- inputs and outputs --------------------------------------------------------------------------


class Recorder(nn.Module):
    """Notes the dtypes of everything that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Any:
        self.seen = {"x": x.dtype, "rest": copy.deepcopy(rest), "options": options}
        y = self.linear(x.to(self.linear.weight.dtype))
        return {"y": y, "list": [y * 2, (y + 1, 3)], "ids": torch.arange(3), "double": y.double(), "name": "kept"}


@multi_rank(2)
@pytest.mark.parametrize("cast", [True, False])
def test_floating_point_inputs_are_cast_to_param_dtype_unless_told_not_to(cast: bool) -> None:
    model = API.fully_shard(Recorder(), mp_policy=policy(param_dtype=BF16, cast_forward_inputs=cast))
    x, expected = torch.randn(2, WIDTH), BF16 if cast else FP32
    model(x, [x, {"deep": x}], torch.arange(2), "text", None, key=x.double(), other=(x, 1), flag=x > 0)
    assert model.seen["x"] == expected
    (inner, ids, text, none), options = model.seen["rest"], model.seen["options"]
    assert inner[0].dtype == expected and inner[1]["deep"].dtype == expected
    assert options["key"].dtype == (BF16 if cast else FP64) and options["other"][0].dtype == expected
    assert (ids.dtype, text, none, options["other"][1]) == (torch.int64, "text", None, 1)
    assert options["flag"].dtype == torch.bool


@multi_rank(2)
def test_inputs_are_not_cast_without_a_param_dtype() -> None:
    model = API.fully_shard(Recorder(), mp_policy=policy(reduce_dtype=BF16, output_dtype=FP16))
    model(torch.randn(2, WIDTH, dtype=FP64))
    assert model.seen["x"] == FP64


@multi_rank(2)
def test_gradients_flow_back_through_the_casts_in_the_dtype_of_the_input() -> None:
    model = API.fully_shard(nn.Linear(WIDTH, WIDTH), mp_policy=policy(param_dtype=BF16, output_dtype=FP32))
    x = torch.randn(2, WIDTH, requires_grad=True)
    output = model(x)
    assert output.dtype == FP32
    output.sum().backward()
    assert x.grad is not None and x.grad.dtype == FP32


@multi_rank(2)
def test_floating_point_outputs_are_cast_to_output_dtype_wherever_they_are() -> None:
    model = API.fully_shard(Recorder(), mp_policy=policy(param_dtype=BF16, output_dtype=FP32))
    output = model(torch.randn(2, WIDTH))
    assert output["y"].dtype == FP32 and output["double"].dtype == FP32
    assert output["list"][0].dtype == FP32 and output["list"][1][0].dtype == FP32
    assert output["list"][1][1] == 3 and output["name"] == "kept" and output["ids"].dtype == torch.int64
    plain = API.fully_shard(Recorder(), mp_policy=policy(param_dtype=BF16))
    assert plain(torch.randn(2, WIDTH))["y"].dtype == BF16


@multi_rank(2)
def test_output_dtype_in_evaluation_too() -> None:
    model = API.fully_shard(Recorder(), mp_policy=policy(param_dtype=BF16, output_dtype=FP32))
    with torch.no_grad():
        assert model(torch.randn(2, WIDTH))["y"].dtype == FP32
    with torch.inference_mode():
        assert model(torch.randn(2, WIDTH))["y"].dtype == FP32


# ---- accumulation --------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("case", [UNEVEN_MLP, FROZEN], ids=str)
def test_gradients_without_sync_accumulate_in_reduce_dtype(case: ModelCase) -> None:
    """Bit for bit as sums in fp32 of bfloat16 gradients: sums in bfloat16 would differ."""
    model = shard(case, mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32))
    reference = Reference(
        case,
        world_size=2,
        param_dtype=BF16,
        grad_dtype=FP32,
        reduce_dtype=FP32,
        microbatches=3,
        accumulation=Accumulation.REDUCE_LAST,
    )
    train(case, model, reference=reference, before_forward=lambda m: model.set_requires_gradient_sync(m == 2))


@multi_rank(4)
def test_partial_reductions_accumulate_in_reduce_dtype() -> None:
    model = shard(UNEVEN_MLP, mesh=mesh_of(2, 2), mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32))
    reference = Reference(UNEVEN_MLP, world_size=4, param_dtype=BF16, reduce_dtype=FP32, microbatches=3)
    train(UNEVEN_MLP, model, reference=reference, before_forward=lambda m: model.set_requires_all_reduce(m == 2))


# ---- rounding ------------------------------------------------------------------------------------


class WideGradient(torch.autograd.Function):
    """A product whose gradient for a bfloat16 weight comes in fp32, as mixed kernels and sums of them hand it out."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        return weight.float() * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        weight, x = ctx.saved_tensors
        return gradient * x, gradient * weight


@pytest.mark.full
@multi_rank(2)
@torch_from((2, 15), "gradients are rounded to param_dtype first")
def test_gradients_that_arrive_wider_are_not_rounded_before_the_reduction() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return WideGradient.apply(self.weight, x)

    model = API.fully_shard(Net(), mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False))
    x = torch.full((WIDTH,), 1 + 2**-12)
    model(x).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), x)


@pytest.mark.full
@multi_rank(2)
@torch_from((2, 15), "they add up in param_dtype")
def test_gradients_without_sync_add_up_in_the_original_dtype_if_nothing_else_is_said() -> None:
    """Four times 2**-9 on top of 1: in bfloat16 each is lost, in fp32 their sum is not, whatever it is reduced in."""
    model = API.fully_shard(nn.Linear(WIDTH, 1, bias=False), mp_policy=policy(param_dtype=BF16))
    for micro in range(5):
        model.set_requires_gradient_sync(micro == 4)
        model(torch.full((1, WIDTH), 2.0**-9 if micro else 1.0)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((1, WIDTH), 1 + 2.0**-7))
