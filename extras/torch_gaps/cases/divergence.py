"""Ranks that do not all use the same parameters, and iterations that fail."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

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

AREA = "Ranks that differ, iterations that fail"


class Branching(nn.Module):
    """A text layer, and an image layer that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(WIDTH, WIDTH)
        self.image = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.has_image = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.text(inputs)
        if self.has_image:
            hidden = hidden + self.image(inputs)
        output: Tensor = self.output(hidden)
        return output


def _expect_gradients(trial: Trial, model: Branching, plain: Branching) -> None:
    """A few steps in which every rank but the last skips the image layer."""
    last = trial.world_size - 1
    model.has_image = trial.rank == last
    for step in range(2):
        squared_output(model, batch(trial.rank, step)).backward()
        for rank in range(trial.world_size):
            plain.has_image = rank == last
            (squared_output(plain, batch(rank, step)) / trial.world_size).backward()
        expect_same_gradients(model, plain)


@case(AREA, "a parameter without gradient on some ranks", asked="pytorch#158719 pytorch#152964")
def parameter_on_some_ranks(trial: Trial) -> None:
    model = Branching()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    _expect_gradients(trial, model, plain)


@case(AREA, "the same with `set_reduce_scatter_unused_params(True)`")
def parameter_on_some_ranks_with_setter(trial: Trial) -> None:
    model = Branching()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    trial.api.method(model, "set_reduce_scatter_unused_params")(True)
    _expect_gradients(trial, model, plain)


@case(AREA, "a sharded module that some ranks skip", asked="pytorch#148334 torchtitan#2747")
def module_on_some_ranks(trial: Trial) -> None:
    model = Branching()
    plain = copy.deepcopy(model)
    for unit in (model.text, model.image, model.output, model):
        trial.api.fully_shard(unit)
    _expect_gradients(trial, model, plain)


@case(AREA, "the same with `set_reduce_scatter_unused_params(True)`")
def module_on_some_ranks_with_setter(trial: Trial) -> None:
    model = Branching()
    plain = copy.deepcopy(model)
    for unit in (model.text, model.image, model.output, model):
        trial.api.fully_shard(unit)
    trial.api.method(model, "set_reduce_scatter_unused_params")(True)
    _expect_gradients(trial, model, plain)


@case(AREA, "the same with `set_divergence('join')`", asked="pytorch#148334 torchtitan#2747")
def module_on_some_ranks_that_join(trial: Trial) -> None:
    model = Branching()
    plain = copy.deepcopy(model)
    for unit in (model.text, model.image, model.output, model):
        trial.api.fully_shard(unit)
    trial.api.method(model, "set_divergence")("join")
    _expect_gradients(trial, model, plain)


@case(AREA, "a rank that has no batch in a step")
def rank_without_a_batch(trial: Trial) -> None:
    model = Branching()
    plain = copy.deepcopy(model)
    for unit in (model.text, model.image, model.output, model):
        trial.api.fully_shard(unit)
    trial.api.method(model, "set_divergence")("join")
    if trial.rank == 0:
        squared_output(model, batch(0)).backward()
    else:
        trial.api.method(model, "join_step")()
    (squared_output(plain, batch(0)) / trial.world_size).backward()
    expect_same_gradients(model, plain)


@case(AREA, "equal blocks that one rank runs in another order: right numbers, or an error on every rank")
def blocks_in_another_order(trial: Trial) -> None:
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    plain = copy.deepcopy(model)
    for unit in model:
        trial.api.fully_shard(unit)
    order = (0, 1) if trial.rank == 0 else (1, 0)
    try:
        found = batch(trial.rank)
        for index in order:
            found = model[index](found)
    except RuntimeError as error:
        if "ranks" in str(error):
            return
        raise
    expected = batch(trial.rank)
    for index in order:
        expected = plain[index](expected)
    if not torch.allclose(found, expected):
        raise Wrong("one rank's layers are the other's")


@case(AREA, "replicas (hybrid sharding) that were initialized differently: an error on every rank", world_size=2)
def replicas_that_differ(trial: Trial) -> None:
    torch.manual_seed(trial.rank)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    mesh = init_device_mesh("cpu", (trial.world_size, 1), mesh_dim_names=("replicate", "shard"))
    trial.api.fully_shard(model, mesh=mesh)
    try:
        squared_output(model, batch(trial.rank)).backward()
    except RuntimeError as error:
        if "replicas" in str(error):
            return
        raise
    raise Wrong("no error: they train apart")


class Failing(nn.Module):
    """Two layers; the forward or the backward of the middle raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.fails_in = ""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        if self.fails_in == "forward":
            raise MemoryError
        if self.fails_in == "backward":
            hidden.register_hook(_fail)
        output: Tensor = self.second(hidden)
        return output


def _fail(gradient: Tensor) -> Tensor:
    raise MemoryError


def _sharded(trial: Trial) -> tuple[Failing, Failing]:
    model = Failing()
    plain = copy.deepcopy(model)
    for unit in (model.first, model.second, model):
        trial.api.fully_shard(unit)
    return model, plain


def _fail_once(model: Failing, inputs: Tensor, where: str) -> None:
    model.fails_in = where
    try:
        squared_output(model, inputs).backward()
    except MemoryError:
        pass
    else:
        raise RuntimeError("the program should have failed here")
    model.fails_in = ""


@case(
    AREA,
    "accumulated microbatches, an exception, `reset_iter_state()`, `zero_grad()`, a clean step",
    asked="composer#3866",
)
def reset_drops_accumulation(trial: Trial) -> None:
    model, plain = _sharded(trial)
    model.set_requires_gradient_sync(False)
    squared_output(model, batch(trial.rank, 1)).backward()
    _fail_once(model, batch(trial.rank, 1), "forward")
    model.reset_iter_state()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    squared_output(model, batch(trial.rank, 1)).backward()
    mean_backward(trial, plain, 1)
    expect_same_gradients(model, plain)


@case(AREA, "an exception in backward, nothing called, the next step", asked="torchtitan#1329 verl#2159")
def failure_in_backward(trial: Trial) -> None:
    model, plain = _sharded(trial)
    squared_output(model, batch(trial.rank)).backward()
    model.zero_grad()
    _fail_once(model, batch(trial.rank), "backward")
    model.zero_grad()
    expect_trains_alike(trial, model, plain)


@case(AREA, "the same, `reset_iter_state()` called on all ranks")
def failure_in_backward_then_reset(trial: Trial) -> None:
    model, plain = _sharded(trial)
    squared_output(model, batch(trial.rank)).backward()
    model.zero_grad()
    _fail_once(model, batch(trial.rank), "backward")
    model.reset_iter_state()
    model.zero_grad()
    expect_trains_alike(trial, model, plain)


@case(AREA, "out of memory in the forward of one rank only: the others hear of it", asked="Model-Optimizer#1860")
def failure_on_one_rank(trial: Trial) -> None:
    model, plain = _sharded(trial)
    try:
        if trial.rank == 0:
            _fail_once(model, batch(trial.rank), "forward")
        else:
            squared_output(model, batch(trial.rank)).backward()
    except RuntimeError:
        pass
    model.zero_grad()
    torch.distributed.barrier()
    expect_trains_alike(trial, model, plain)


@case(
    AREA,
    "ranks that built layers of different sizes get an error, on every rank",
    asked="pytorch#171874 torchtitan#1092",
)
def different_models(trial: Trial) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH + trial.rank), nn.ReLU())
    trial.api.fully_shard(model)
    try:
        squared_output(model, batch(trial.rank)).backward()
    except Exception:
        return
    raise Wrong("no error")
