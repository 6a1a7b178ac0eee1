"""Tied weights, and modules that several others use."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from extras.torch_gaps.checks import (
    WIDTH,
    Wrong,
    batch,
    expect_same_gradients,
    expect_trains_alike,
    mean_backward,
    squared_output,
)
from extras.torch_gaps.registry import Trial, case

AREA = "Shared parameters and modules"
VOCABULARY = 11


class Language(nn.Module):
    """Embedding, one layer, and an output head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        ids = inputs.abs().mul(1000).long().remainder(VOCABULARY)
        output: Tensor = self.head(torch.tanh(self.layer(self.embedding(ids))))
        return output


@case(AREA, "embedding and head tied, in a call each", asked="accelerate#4171 Model-Optimizer#2059 torchtitan#2495")
def tied_across_groups(trial: Trial) -> None:
    model = Language()
    plain = copy.deepcopy(model)
    for unit in (model.embedding, model.layer, model.head, model):
        trial.api.fully_shard(unit)
    expect_trains_alike(trial, model, plain)


@case(AREA, "the same, embedding and head in one call")
def tied_in_one_group(trial: Trial) -> None:
    model = Language()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model.layer)
    trial.api.fully_shard([model.embedding, model.head])
    trial.api.fully_shard(model)
    expect_trains_alike(trial, model, plain)


def _expect_tied(model: Language, after: str) -> None:
    if model.head.weight is not model.embedding.weight:
        raise Wrong(f"`head.weight` is no longer `embedding.weight` {after}")


@case(AREA, "tied still after `to_empty` of a model built on meta", asked="transformers#46707")
def tied_after_to_empty(trial: Trial) -> None:
    with torch.device("meta"):
        model = Language()
    trial.api.fully_shard(model)
    model.to_empty(device="cpu")
    _expect_tied(model, "after to_empty")


@case(AREA, "tied still after `load_state_dict`, values loaded")
def tied_after_loading(trial: Trial) -> None:
    model = Language()
    trial.api.fully_shard(model)
    state = {name: value.detach().clone() + 1 for name, value in model.state_dict().items()}
    plain = Language()
    plain.load_state_dict({name: value.full_tensor() for name, value in state.items()})
    model.load_state_dict(state)
    _expect_tied(model, "after load_state_dict")
    expect_trains_alike(trial, model, plain)


@case(AREA, "one sharded encoder used by two sharded models in turn", asked="accelerate#3585")
def two_roots(trial: Trial) -> None:
    encoder = nn.Linear(WIDTH, WIDTH)
    models = [nn.Sequential(encoder, nn.ReLU(), nn.Linear(WIDTH, width)) for width in (3, 5)]
    plain_models = copy.deepcopy(models)
    trial.api.fully_shard(encoder)
    for model in models:
        trial.api.fully_shard(model)
    for step in range(2):
        for model, plain in zip(models, plain_models, strict=True):
            squared_output(model, batch(trial.rank, step)).backward()
            mean_backward(trial, plain, step)
            expect_same_gradients(model, plain)


@case(AREA, "a sharded submodule run on its own before the model", asked="pytorch#125394")
def submodule_first(trial: Trial) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    for unit in (model[0], model[2], model):
        trial.api.fully_shard(unit)
    with torch.no_grad():
        model[0](batch(trial.rank))
    expect_trains_alike(trial, model, plain)
