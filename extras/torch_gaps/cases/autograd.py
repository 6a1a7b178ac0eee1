"""Unusual ways through autograd and the compiler."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from extras.torch_gaps.checks import (
    WIDTH,
    batch,
    expect_same,
    expect_same_gradients,
    expect_trains_alike,
    mean_backward,
    squared_output,
)
from extras.torch_gaps.registry import Trial, case

AREA = "Autograd and compilation"


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _shard(trial: Trial, model: nn.Sequential) -> None:
    for unit in (model[0], model[2], model):
        trial.api.fully_shard(unit)


def _penalized(model: nn.Module, inputs: Tensor) -> Tensor:
    """The squared norm of the gradient with respect to the inputs, as in WGAN-GP and score matching."""
    inputs = inputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return gradient.square().mean()


def _penalty_backward(trial: Trial, plain: nn.Module) -> None:
    for rank in range(trial.world_size):
        (_penalized(plain, batch(rank)) / trial.world_size).backward()


@case(
    AREA,
    "a gradient penalty: `autograd.grad(create_graph=True)`, then backward",
    asked="pytorch#172543 pytorch#172770 torchebm#244",
)
def double_backward(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    _shard(trial, model)
    _penalized(model, batch(trial.rank)).backward()
    _penalty_backward(trial, plain)
    expect_same_gradients(model, plain)


@case(AREA, "the same with `set_reshard_after_backward(False)`, then `reshard()` on each module")
def double_backward_unsharded(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    _shard(trial, model)
    model.set_reshard_after_backward(False)
    _penalized(model, batch(trial.rank)).backward()
    for module in (model[0], model[2], model):
        module.reshard()
    _penalty_backward(trial, plain)
    expect_same_gradients(model, plain)


@case(AREA, "two backwards over one graph (`retain_graph=True`)", asked="pytorch#120926")
def second_backward(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    _shard(trial, model)
    for each, ranks in ((model, [trial.rank]), (plain, range(trial.world_size))):
        for rank in ranks:
            output = each(batch(rank))
            scale = 1 / len(ranks)
            (output.square().mean() * scale).backward(retain_graph=True)
            (output.abs().mean() * scale).backward()
    expect_same_gradients(model, plain)


@case(AREA, "`loss.backward(inputs=list(model.parameters()))`")
def backward_with_inputs(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    _shard(trial, model)
    parameters = list(model.parameters())
    squared_output(model, batch(trial.rank)).backward(inputs=parameters)
    mean_backward(trial, plain, 0)
    expect_same_gradients(model, plain)


@case(AREA, "the first forward in `torch.inference_mode()`, then training")
def inference_mode_first(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    _shard(trial, model)
    with torch.inference_mode():
        expect_same(model(batch(trial.rank)), plain(batch(trial.rank)), "the output")
    expect_trains_alike(trial, model, plain)


@case(AREA, "the whole model compiled with `fullgraph=True`", asked="pytorch#136842 pytorch#181924 torchtitan#1980")
def fullgraph(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    _shard(trial, model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    squared_output(compiled, batch(trial.rank)).backward()
    mean_backward(trial, plain, 0)
    expect_same_gradients(model, plain)
