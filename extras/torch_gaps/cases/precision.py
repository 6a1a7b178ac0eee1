"""Several dtypes in one group, precision per parameter, what is cast."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from extras.torch_gaps.checks import (
    BF16,
    WIDTH,
    Wrong,
    batch,
    expect_same,
    expect_same_gradients,
    expect_trains_alike,
    mean_backward,
    squared_output,
    whole,
)
from extras.torch_gaps.registry import Trial, case

AREA = "Precision"


class NormedLinear(nn.Module):
    """A norm in fp32, then a linear layer in the dtype that it has."""

    def __init__(self, linear_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=linear_dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        normed = self.norm(inputs.to(self.norm.weight.dtype))
        output: Tensor = self.linear(normed.to(self.linear.weight.dtype))
        return output


class LowRank(nn.Module):
    """A frozen linear layer in bfloat16 and an fp32 adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.base(inputs.bfloat16()).float() + self.up(self.down(inputs))
        return output


@case(
    AREA,
    "fp32 norm beside a bf16 linear layer in one group",
    asked="pytorch#156784 accelerate#3985 Model-Optimizer#2152",
)
def original_dtypes(trial: Trial) -> None:
    model = NormedLinear(torch.bfloat16)
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    expect_trains_alike(trial, model, plain, tolerance=BF16)


@case(AREA, "fp32 LoRA on a frozen bf16 base in one group", asked="accelerate#3844 bitsandbytes#1945 axolotl#493")
def low_rank_adapters(trial: Trial) -> None:
    model = LowRank()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    expect_trains_alike(trial, model, plain)


@case(AREA, "a `param_dtype` per parameter: bf16, norms in fp32", asked="pytorch#196626 pytorch#194546")
def param_dtype_per_parameter(trial: Trial) -> None:
    model = NormedLinear(torch.float32)
    plain = copy.deepcopy(model)
    plain.linear.bfloat16()
    kept = set(model.norm.parameters())
    policy = trial.api.options(
        "MixedPrecisionPolicy",
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda parameter: torch.float32 if parameter in kept else None,
    )
    trial.api.fully_shard(model, mp_policy=policy)
    squared_output(model, batch(trial.rank)).backward()
    mean_backward(trial, plain, 0)
    for name, parameter in plain.named_parameters():
        expect_same(
            whole(model.get_parameter(name).grad), parameter.grad.float(), f"the gradient of `{name}`", tolerance=BF16
        )


@case(AREA, "a policy per parameter: `reduce_dtype` and `param_dtype` as a function of it", asked="Automodel#2655")
def reduce_dtype_per_parameter(trial: Trial) -> None:
    model = NormedLinear(torch.float32)
    plain = copy.deepcopy(model)
    low = trial.api.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    full = trial.api.MixedPrecisionPolicy()
    trial.api.precision_per_parameter(model, lambda name, parameter: full if "norm" in name else low)
    squared_output(model, batch(trial.rank)).backward()
    mean_backward(trial, plain, 0)
    for name, parameter in plain.named_parameters():
        tolerance = 1e-5 if "norm" in name else BF16
        expect_same(
            whole(model.get_parameter(name).grad), parameter.grad, f"the gradient of `{name}`", tolerance=tolerance
        )


class Scaled(nn.Module):
    """A linear layer whose output is scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs) * self.scale
        return output


@case(AREA, "`buffer_dtype`", asked="pytorch#146114")
def buffer_dtype(trial: Trial) -> None:
    model = Scaled()
    policy = trial.api.options("MixedPrecisionPolicy", param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    trial.api.fully_shard(model, mp_policy=policy)
    if model(batch(trial.rank)).dtype != torch.bfloat16:
        raise Wrong("the buffer was not cast")


class Rotated(nn.Module):
    """A linear layer, then a rotation by angles that need fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, angles: Tensor) -> tuple[Tensor, torch.dtype]:
        return self.linear(inputs).float() * torch.cos(angles), angles.dtype


@case(AREA, "some inputs cast, others (angles of RoPE) not", asked="pytorch#143900 torchtitan#2881")
def casting_some_inputs(trial: Trial) -> None:
    model = Rotated()
    policy = trial.api.casting_inputs(("inputs",), torch.bfloat16)
    trial.api.fully_shard(model, mp_policy=policy)
    _, dtype = model(inputs=batch(trial.rank), angles=1000 * torch.rand(WIDTH))
    if dtype != torch.float32:
        raise Wrong(f"the angles arrive as {dtype}")


class Switched(nn.Module):
    """A second layer that only some microbatches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.uses_second = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        return self.second(hidden) if self.uses_second else hidden


@case(AREA, "accumulation in fp32 where a parameter is first used in the last microbatch", asked="pytorch#196640")
def first_used_in_the_last_microbatch(trial: Trial) -> None:
    model = Switched()
    plain = copy.deepcopy(model)
    policy = trial.api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trial.api.fully_shard(model, mp_policy=policy)
    for step, last in enumerate((False, True)):
        model.uses_second = plain.uses_second = last
        model.set_requires_gradient_sync(last)
        squared_output(model, batch(trial.rank, step)).backward()
        mean_backward(trial, plain, step)
    expect_same_gradients(model, plain, tolerance=BF16)
