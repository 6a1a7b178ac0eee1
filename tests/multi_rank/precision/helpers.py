"""Models with and without `cache_shards`, and what is compared of them: shared by the tests of cached shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.core import gather
from tests.harness.models import ModelCase
from tests.harness.shared.training import CASE, loss_on

HALF = torch.bfloat16
PLAIN = MixedPrecisionPolicy(HALF, torch.float32)
CACHED = dataclasses.replace(PLAIN, cache_shards=True)
MICROBATCHES = 3


def shard(policy: Any, case: ModelCase = CASE, model: Any = None, **options: Any) -> Any:
    """``model``, or a new one, sharded bottom-up as ``case`` says."""
    model = case.build() if model is None else model
    for unit in case.units(model):
        fully_shard(unit, mp_policy=policy, **options)
    return model


@contextmanager
def casts(counted: list[int]) -> Iterator[None]:
    """Appends to ``counted`` how many elements are copied into send buffers in each gather that does."""
    original = gather.Gather.copy_in

    def copy_in(self: gather.Gather, *args: Any) -> None:
        with mock.patch("fsdp2._torch.foreach_copy", wraps=fsdp2._torch.foreach_copy) as copied:
            original(self, *args)
        counted.extend(sum(each.numel() for each in call.args[0]) for call in copied.call_args_list)

    with mock.patch.object(gather.Gather, "copy_in", copy_in):
        yield


def microbatch(model: Any, step: int, micro: int, case: ModelCase = CASE) -> Tensor:
    loss = loss_on(case, model, step, dist.get_rank(), micro)
    loss.backward()
    return loss.detach()


def state_of(model: Any) -> list[Tensor]:
    return [local(each) for parameter in model.parameters() for each in (parameter, parameter.grad) if each is not None]


def local(value: Tensor) -> Tensor:
    return value.detach().to_local() if isinstance(value, DTensor) else value.detach()


def assert_alike(*models: Any) -> None:
    ours, theirs = map(state_of, models)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


def casts_of_a_step(model: Any, optimizer: torch.optim.Optimizer) -> list[int]:
    counted: list[int] = []
    with casts(counted):
        for micro in range(MICROBATCHES):
            microbatch(model, 0, micro)
    optimizer.step()
    return counted


def halve(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 0.5)


def halve_locals(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(0.5)
