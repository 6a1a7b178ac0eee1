"""Optimizers that were built at another time than after `fully_shard`; parameters that come later."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from extras.torch_gaps.checks import (
    WIDTH,
    Wrong,
    batch,
    expect_same,
    expect_same_gradients,
    expect_same_parameters,
    expect_trains_alike,
    mean_backward,
    sgd,
    squared_output,
)
from extras.torch_gaps.registry import Trial, case

AREA = "Optimizers and later changes"


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@case(AREA, "an optimizer built before `fully_shard`", asked="accelerate#3394 pytorch#149205")
def optimizer_before(trial: Trial) -> None:
    model = _layers()
    plain, start = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    trial.api.fully_shard(model)
    # zero_grad of the model: what an optimizer that was built too early clears is not asked here.
    for step in range(2):
        model.zero_grad()
        squared_output(model, batch(trial.rank, step)).backward()
        optimizer.step()
    reference = sgd(plain.parameters())
    for step in range(2):
        reference.zero_grad()
        mean_backward(trial, plain, step)
        reference.step()
    expect_same_parameters(model, plain, start=start)


@case(AREA, "an optimizer built after an evaluation", asked="pytorch#144289")
def optimizer_after_evaluation(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    with torch.no_grad():
        model(batch(trial.rank))
    optimizer = sgd(model.parameters())
    expect_trains_alike(trial, model, plain, optimizer=optimizer)


@case(AREA, "an evaluation between backward and the optimizer's step")
def evaluation_before_step(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    ours, reference = sgd(model.parameters()), sgd(plain.parameters())
    squared_output(model, batch(trial.rank)).backward()
    mean_backward(trial, plain, 0)
    with torch.no_grad():
        model(batch(trial.rank, 1))
    for each in (ours, reference):
        each.step()
        each.zero_grad()
    with torch.no_grad():
        expect_same(model(batch(trial.rank, 1)), plain(batch(trial.rank, 1)), "the output after the step")


class Extended(nn.Module):
    """A linear layer, and a scale if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale: nn.Parameter | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(inputs)
        return output if self.scale is None else output * self.scale


@case(AREA, "a parameter added after `fully_shard` is trained alike on all ranks", asked="pytorch#132721 trl#6527")
def parameter_added(trial: Trial) -> None:
    model = Extended()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    for each in (model, plain):
        each.scale = nn.Parameter(torch.ones(WIDTH))
    squared_output(model, batch(trial.rank)).backward()
    mean_backward(trial, plain, 0)
    expect_same_gradients(model, plain)


@case(AREA, "a parameter replaced after the first forward is the one used")
def parameter_replaced(trial: Trial) -> None:
    model = _layers()
    plain = copy.deepcopy(model)
    for unit in (model[0], model[2], model):
        trial.api.fully_shard(unit)
    squared_output(model, batch(trial.rank)).backward()
    for each in (model, plain):
        each[0].bias = nn.Parameter(torch.ones(WIDTH))
    expect_same(model(batch(trial.rank)).detach(), plain(batch(trial.rank)).detach(), "the output")


@case(AREA, "an optimizer's step between a forward and its backward is an error, as in plain PyTorch")
def step_before_backward(trial: Trial) -> None:
    model = _layers()
    for unit in (model[0], model[2], model):
        trial.api.fully_shard(unit)
    optimizer = sgd(model.parameters())
    squared_output(model, batch(trial.rank)).backward()
    loss = squared_output(model, batch(trial.rank, 1))
    try:
        optimizer.step()
        loss.backward()
    except RuntimeError:
        return
    raise Wrong("no error: gradients of the old activations with the new parameters")
