"""Large gradients that are cast one by one before they are reduced: parameters in bf16, reduced in fp32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import assert_sharded_same, gradients_of
from tests.harness.internals import groups_of
from tests.harness.pooling import needs_pool

WIDTH = 512  # a matrix of 1 MiB in fp32, which travels by itself


class Block(nn.Module):
    """Matrices of 1 MiB, one of them transposed in memory, one that some ranks do not use, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5),
            nn.Parameter((torch.randn(WIDTH, WIDTH) / WIDTH**0.5).t()),
            nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5),
        )
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, uses_third: bool) -> Tensor:
        x = torch.tanh(x @ self.first @ self.second + self.bias)
        return x @ self.third if uses_third else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, uses_third: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, uses_third)
        return x.float().sum()


def build() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def arguments(rank: int, step: int) -> tuple[Tensor, bool]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator).bfloat16(), (rank + step) % 2 == 0


def expected_gradients(plain: Model, step: int, world_size: int) -> dict[str, Tensor]:
    """What each rank computes in bf16, added in fp32 in the order of the ranks."""
    sums: dict[str, Tensor] = {}
    for rank in range(world_size):
        half = copy.deepcopy(plain).bfloat16()
        half(*arguments(rank, step)).backward()
        for name, parameter in half.named_parameters():
            gradient = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.float()
            sums[name] = sums[name] + gradient if name in sums else gradient
    return {name: total / world_size for name, total in sums.items()}


@multi_rank(2, 4)
@pytest.mark.parametrize("pooled", [False, pytest.param(True, marks=needs_pool)])
def test_bitwise_as_the_sum_of_casts(pooled: bool, world_size: int) -> None:
    model: Any = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if pooled:
        model.set_communication_memory_pool(True)
    for step in range(3):
        model(*arguments(dist.get_rank(), step)).backward()
        ways = [slot.direct for group in groups_of(model) for one in group.reducer.buckets for slot in one.layout.slots]
        assert ways == [True, False, True, False] * 3 or ways == [True, True, True, False] * 3
        assert_sharded_same(f"step {step}", gradients_of(model), expected_gradients(build(), step, world_size))
        model.zero_grad()
