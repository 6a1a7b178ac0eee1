"""Parameters of unusual shapes, strides and dtypes."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from extras.torch_gaps.checks import (
    ROWS,
    WIDTH,
    Wrong,
    batch,
    expect_same,
    expect_trains_alike,
    mean_backward,
    squared_output,
    whole,
)
from extras.torch_gaps.registry import Trial, case
from extras.torch_gaps.subclass import Shifted

AREA = "Odd parameters"


class Scaled(nn.Module):
    """A linear layer and a scale of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs) * self.scale
        return output


@case(AREA, "a 0-D parameter (a temperature, a logit scale)", asked="raylight#5 pytorch#132934")
def scalar_parameter(trial: Trial) -> None:
    model = Scaled()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    expect_trains_alike(trial, model, plain)


class Transposed(nn.Module):
    """A linear layer whose weight is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, WIDTH).t())

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


@case(AREA, "a transposed weight", asked="pytorch#136221")
def transposed_weight(trial: Trial) -> None:
    model = Transposed()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    expect_trains_alike(trial, model, plain)


class Image(nn.Module):
    """A convolution in channels_last that notes the strides it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.strides: tuple[int, ...] = ()
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        self.strides = self.conv.weight.stride()
        output: Tensor = self.conv(inputs.view(ROWS, 2, 2, 2).to(memory_format=torch.channels_last))
        return output


@case(AREA, "a channels_last convolution, strides kept", asked="pytorch#137382")
def channels_last(trial: Trial) -> None:
    model = Image()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    expect_trains_alike(trial, model, plain)
    if model.strides != plain.strides:
        raise Wrong(f"computes with strides {model.strides}, not {plain.strides}")


class Quantized(nn.Module):
    """Frozen integers beside a trained layer; notes the bytes that it computes with."""

    def __init__(self, codes: Tensor) -> None:
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen = codes

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.codes.detach().clone()
        output: Tensor = self.linear(inputs)
        return output


def _integers(dtype: torch.dtype) -> Tensor:
    return torch.arange(5 * 3).view(5, 3).mul(7919 if dtype == torch.int64 else 17).to(dtype)


def _expect_bytes(trial: Trial, codes: Tensor, **arguments: object) -> None:
    model = Quantized(codes.clone())
    trial.api.fully_shard(model, **arguments)
    squared_output(model, batch(trial.rank)).backward()
    expect_same(model.seen, codes, "the frozen parameter", tolerance=0)


@case(AREA, "frozen uint8 and int64 parameters, byte for byte", asked="bitsandbytes#1945")
def frozen_integers(trial: Trial) -> None:
    for dtype in (torch.uint8, torch.int64):
        _expect_bytes(trial, _integers(dtype))


@case(AREA, "the same with `param_dtype=torch.bfloat16`")
def frozen_integers_with_mixed_precision(trial: Trial) -> None:
    policy = trial.api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for dtype in (torch.uint8, torch.int64):
        _expect_bytes(trial, _integers(dtype), mp_policy=policy)


@case(AREA, "packed 4-bit codes stored as bf16, NaN patterns included, byte for byte", asked="bitsandbytes#1945")
def packed_bytes(trial: Trial) -> None:
    codes = torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[-30000:].view(-1, 3)
    _expect_bytes(trial, codes)


@case(AREA, "an uneven `Shard(1)`", asked="pytorch#137342")
def uneven_second_dim(trial: Trial) -> None:
    model = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    expect_trains_alike(trial, model, plain, loss=lambda each, inputs: squared_output(each, inputs[:, :5]))


def _expect_extension(trial: Trial, reshard_after_forward: bool | int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
    plain = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Shifted(layer.weight.detach()))
        trial.api.fully_shard(layer, reshard_after_forward=reshard_after_forward)
    trial.api.fully_shard(model)
    squared_output(model, batch(trial.rank)).backward()
    mean_backward(trial, plain, 0)
    for index in (0, 2):
        gradient = whole(model[index].weight.grad)
        expect_same(gradient, plain[index].weight.grad, f"the gradient of `{index}.weight`")


@case(AREA, "a tensor subclass with an all-gather extension", asked="pytorch#169320", world_size=4)
def extension(trial: Trial) -> None:
    _expect_extension(trial, True)


@case(AREA, "the same with an int for `reshard_after_forward`", world_size=4)
def extension_with_int_reshard(trial: Trial) -> None:
    _expect_extension(trial, 2)


class Lookup(nn.Module):
    """An embedding table that is read row by row outside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.table.weight.mean(dim=0)

    def encode(self, index: int) -> Tensor:
        return F.embedding(torch.tensor([index]), self.table.weight)


@case(AREA, "a method other than forward, called directly", asked="pytorch#125394 transformers#42436")
def other_method(trial: Trial) -> None:
    model = Lookup()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    expect_same(model.encode(3).detach(), plain.encode(3).detach(), "the output")


@case(AREA, "the same after `register_fsdp_forward_method`")
def other_method_registered(trial: Trial) -> None:
    model = Lookup()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    trial.api.register_fsdp_forward_method(model, "encode")
    expect_same(model.encode(3).detach(), plain.encode(3).detach(), "the output")
