"""Gradients that a later backward, which does not come to their group, must still deliver: on every rank alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of

WIDTH = 6


class Branch(nn.Module):
    """May leave its weight unused, though it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        return x + F.linear(x, self.weight) if uses else x * 1


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(4))

    def forward(self, x: Tensor, uses: tuple[bool | None, ...]) -> Tensor:
        """``uses``: for every branch whether it uses its weight; None: it is not called."""
        for branch, each in zip(self.branches, uses, strict=True):
            x = x if each is None else branch(x, each)
        return x


def build() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Branches()


def shard(**options: Any) -> Any:
    model = build()
    for branch in model.branches:
        fully_shard(branch, **options)
    return fully_shard(model, **options)


def loss(model: Any, step: int, rank: int, uses: tuple[bool | None, ...]) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x.requires_grad_(), uses).square().mean()  # type: ignore[no-any-return]


def compare(model: Any, passes: list[list[tuple[bool | None, ...]]]) -> None:
    """``passes``: for every backward, what each rank uses."""
    plain, ranks = build(), len(passes[0])
    for step, of_rank in enumerate(passes):
        for rank, uses in enumerate(of_rank):
            (loss(plain, step, rank, uses) / ranks).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=SUM_ORDER)


@multi_rank(4)
@pytest.mark.parametrize("buffers", [1, 2, 4])
@pytest.mark.parametrize("second", range(4))
def test_partly_reduced_gradients_of_a_group_that_the_last_backward_skips(second: int, buffers: int) -> None:
    """Over shards only, and still in flight when the backward that all-reduces begins."""
    model = shard(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    model.set_reduce_scatter_max_input_buffers(buffers)
    all_of_them: tuple[bool | None, ...] = (True,) * 4
    one_of_them = tuple(True if index == second else None for index in range(4))
    for step, uses in enumerate([all_of_them, one_of_them]):
        model.set_requires_all_reduce(step == 1)
        model.set_is_last_backward(step == 1)
        loss(model, step, dist.get_rank(), uses).backward()
    compare(model, [[all_of_them] * 4, [one_of_them] * 4])


class Shifted(nn.Module):
    """An embedding with a shift of its own, whose inputs need no gradient."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH)) if weight is None else weight
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor, uses: bool) -> Tensor:
        return F.embedding(ids, self.weight) + (self.shift if uses else 0)


class TiedEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Shifted()
        self.second = Shifted(self.first.weight)

    def forward(self, ids: Tensor, uses: bool) -> Tensor:
        return (self.first(ids, True) * self.second(ids, uses)).sum()


@multi_rank(2, timeout=20)
@pytest.mark.parametrize("manual", [False, True])
def test_a_rank_without_gradients_takes_part(manual: bool, world_size: int) -> None:
    """In a group of its own beside a tied weight: what is reduced depends on what was called, at the end of all too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = TiedEmbeddings()
        plain = copy.deepcopy(model)
    for module in (model.first, model.second, model):
        fully_shard(module)
    model.set_manual_backward_finalization(manual)
    ids = [torch.arange(3), torch.arange(1, 4)]
    rank = dist.get_rank()
    model(ids[rank], rank == 0).backward()
    if manual:
        model.finalize_backward()
    for each in range(world_size):
        (plain(ids[each], each == 0) / world_size).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=SUM_ORDER)
