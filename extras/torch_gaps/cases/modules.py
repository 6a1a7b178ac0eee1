"""Sharded modules as objects: copied, sharded again, made plain again."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from extras.torch_gaps.checks import (
    WIDTH,
    Wrong,
    batch,
    expect_same,
    expect_same_parameters,
    expect_trains_alike,
    squared_output,
)
from extras.torch_gaps.registry import Trial, case

AREA = "Sharded modules as objects"


def _models(trial: Trial) -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, WIDTH))
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model[0])
    trial.api.fully_shard(model)
    return model, plain


@case(AREA, "`copy.deepcopy`, and the copy trained (EMA, target networks)", asked="pytorch#82070 Model-Optimizer#1326")
def deep_copy(trial: Trial) -> None:
    model, plain = _models(trial)
    expect_trains_alike(trial, copy.deepcopy(model), copy.deepcopy(plain))
    expect_same_parameters(model, plain)
    expect_trains_alike(trial, model, plain)


@case(AREA, "`fully_shard` again, with equal arguments", asked="trl#6527 accelerate#3231")
def sharded_again(trial: Trial) -> None:
    model, plain = _models(trial)
    trial.api.fully_shard(model)
    expect_trains_alike(trial, model, plain)


@case(AREA, "a plain module with full parameters again", asked="michelangelo#1877 accelerate#3231")
def unwrapped(trial: Trial) -> None:
    model, plain = _models(trial)
    unwrap = trial.api.find("unwrap", otherwise="cannot be undone: build another model and load the full state dict")
    squared_output(model, batch(trial.rank)).backward()
    model = unwrap(model)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()) or type(model) is not nn.Sequential:
        raise Wrong("the module is still sharded")
    expect_same_parameters(model, plain)
    expect_same(model(batch(trial.rank)).detach(), plain(batch(trial.rank)).detach(), "the output")


@case(
    AREA,
    "full parameters of a whole model for a while, written to (`summon_full_params`)",
    asked="pytorch#137129 composer#3907",
)
def full_parameters_for_a_while(trial: Trial) -> None:
    model, plain = _models(trial)
    with trial.api.whole_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    expect_same_parameters(model, plain)


@case(AREA, "the same by `unshard()`, the change made on the unsharded parameters of each module")
def written_while_unsharded(trial: Trial) -> None:
    model, plain = _models(trial)
    with torch.no_grad():
        for module in (model[0], model):
            module.unshard()
        for parameter in model.parameters():
            parameter.mul_(2)
        for module in (model[0], model):
            module.reshard()
        for parameter in plain.parameters():
            parameter.mul_(2)
    expect_same_parameters(model, plain)
