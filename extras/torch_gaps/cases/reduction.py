"""What gradients are divided by, and when they are reduced."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from extras.torch_gaps.checks import WIDTH, batch, expect_same_gradients, mean_backward, squared_output
from extras.torch_gaps.registry import Trial, case

AREA = "Gradient reduction"


def _models(trial: Trial) -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model[0])
    trial.api.fully_shard(model)
    return model, plain


def _expect_sum(trial: Trial, set_up: Callable[[nn.Sequential], None]) -> None:
    model, plain = _models(trial)
    set_up(model)
    squared_output(model, batch(trial.rank)).backward()
    for rank in range(trial.world_size):
        squared_output(plain, batch(rank)).backward()
    expect_same_gradients(model, plain)


@case(AREA, "the sum on gloo: `set_gradient_divide_factor(1.0)` on every sharded module", asked="miles#3231 verl#5625")
def gradient_sum(trial: Trial) -> None:
    def set_up(model: nn.Sequential) -> None:
        for module in (model[0], model):
            module.set_gradient_divide_factor(1.0)

    _expect_sum(trial, set_up)


@case(AREA, "the same with `set_force_sum_reduction_for_comms(True)` on every one as well")
def gradient_sum_with_two_setters(trial: Trial) -> None:
    _expect_sum(trial, trial.api.gradient_sum)


@case(AREA, "the sum for a whole model, by one call on it", asked="torchtitan#1803")
def gradient_sum_recursive(trial: Trial) -> None:
    _expect_sum(trial, trial.api.gradient_sum_by_one_call)


def _expect_token_mean(trial: Trial, denominator: Callable[[torch.Tensor], object]) -> None:
    """Each rank has another number of tokens in each step; the gradient is that of the mean over all of them."""
    model, plain = _models(trial)
    for step in range(2):
        counts = [1 + (rank + 2 * step) % 4 for rank in range(trial.world_size)]
        total = torch.tensor(float(counts[trial.rank]))
        dist.all_reduce(total)
        trial.api.gradient_sum(model, denominator(total))
        (model(batch(trial.rank, step)[: counts[trial.rank]]).square().mean(dim=1).sum()).backward()
        for rank, count in enumerate(counts):
            (plain(batch(rank, step)[:count]).square().mean(dim=1).sum() / sum(counts)).backward()
        expect_same_gradients(model, plain)


@case(AREA, "the mean over a step's tokens, their number a float", asked="prime-rl#2562 VeOmni#1079")
def token_mean(trial: Trial) -> None:
    _expect_token_mean(trial, lambda total: total.item())


@case(AREA, "the same, their number a 0-D tensor (no wait for the device)")
def token_mean_by_tensor(trial: Trial) -> None:
    _expect_token_mean(trial, lambda total: total)


@case(AREA, "microbatches without communication, by a context (`no_sync`)", asked="accelerate#3762")
def no_sync(trial: Trial) -> None:
    model, plain = _models(trial)
    with trial.api.without_communication(model):
        squared_output(model, batch(trial.rank, 0)).backward()
    squared_output(model, batch(trial.rank, 1)).backward()
    for step in range(2):
        mean_backward(trial, plain, step)
    expect_same_gradients(model, plain)


@case(AREA, "the same by `set_requires_gradient_sync`")
def no_sync_by_setter(trial: Trial) -> None:
    model, plain = _models(trial)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        squared_output(model, batch(trial.rank, step)).backward()
        mean_backward(trial, plain, step)
    expect_same_gradients(model, plain)
