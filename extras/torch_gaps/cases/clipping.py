"""Gradient norms and fused optimizers over parameters of several kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from extras.torch_gaps.checks import (
    WIDTH,
    Wrong,
    batch,
    expect_same,
    expect_same_gradients,
    expect_same_parameters,
    mean_backward,
    squared_output,
    whole,
)
from extras.torch_gaps.registry import Trial, case

AREA = "Clipping and fused optimizers"
MAX_NORM = 0.05


def _partly_parallel(trial: Trial) -> tuple[nn.Sequential, nn.Sequential]:
    """Two layers with tensor parallelism and a norm without, sharded on a 2 x 2 mesh, and the plain model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH))
    nn.init.uniform_(model[3].weight)
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trial.api.fully_shard(model, mesh=mesh["dp"])
    return model, plain


def _partly_sharded(trial: Trial) -> tuple[nn.Sequential, nn.Sequential]:
    """A sharded layer and an ignored one, whose gradients the user averages."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model, ignored_params=set(model[2].parameters()))
    return model, plain


def _backward(trial: Trial, model: nn.Sequential, plain: nn.Sequential, data_ranks: int) -> None:
    squared_output(model, batch(trial.rank * data_ranks // trial.world_size)).backward()
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= trial.world_size
    mean_backward(Trial(trial.api, trial.rank, data_ranks), plain, 0)


def _expect_clipped(trial: Trial, model: nn.Sequential, plain: nn.Sequential, data_ranks: int) -> None:
    _backward(trial, model, plain, data_ranks)
    norm = trial.api.clip_grad_norm_(model.parameters(), MAX_NORM)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
    expect_same(whole(norm), expected, "the norm")
    expect_same_gradients(model, plain)


@case(
    AREA,
    "`clip_grad_norm_` with tensor parallelism in some layers",
    asked="pytorch#180346 Automodel#3301 accelerate#4219",
    world_size=4,
)
def clip_over_meshes(trial: Trial) -> None:
    _expect_clipped(trial, *_partly_parallel(trial), data_ranks=2)


@case(AREA, "`clip_grad_norm_` with ignored (plain) parameters beside sharded ones", asked="transformers#48208")
def clip_with_plain_parameters(trial: Trial) -> None:
    _expect_clipped(trial, *_partly_sharded(trial), data_ranks=2)


@case(AREA, "`clip_grad_norm_` returns the whole norm as a plain tensor", asked="torchtitan#732")
def clip_returns_a_plain_tensor(trial: Trial) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model)
    squared_output(model, batch(trial.rank)).backward()
    norm = trial.api.clip_grad_norm_(model.parameters(), MAX_NORM)
    mean_backward(trial, plain, 0)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
    expect_same(torch.tensor(norm.item()), expected, "`norm.item()`")
    if isinstance(norm, DTensor):
        raise Wrong(
            f"it is a DTensor with placements ({', '.join(map(repr, norm.placements))}); its `.item()` is right"
        )


def _foreach_adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, foreach=True)


def _expect_step(trial: Trial, models: Callable[[Trial], tuple[nn.Sequential, nn.Sequential]], data_ranks: int) -> None:
    model, plain = models(trial)
    ours, reference = _foreach_adam(model.parameters()), _foreach_adam(plain.parameters())
    _backward(trial, model, plain, data_ranks)
    for each in (ours, reference):
        each.step()
    expect_same_parameters(model, plain, tolerance=1e-3)


@case(
    AREA,
    "`AdamW(foreach=True)` with tensor parallelism in some layers",
    asked="pytorch#180501 Megatron-LM#6489",
    world_size=4,
)
def foreach_over_meshes(trial: Trial) -> None:
    _expect_step(trial, _partly_parallel, 2)


@case(AREA, "`AdamW(foreach=True)` with ignored (plain) parameters beside sharded ones", asked="transformers#48208")
def foreach_with_plain_parameters(trial: Trial) -> None:
    _expect_step(trial, _partly_sharded, 2)
