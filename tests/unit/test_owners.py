"""`balanced_owners`: which parameters get owners, how evenly, and what it refuses."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import FSDPTypeError, FSDPValueError, Owned, balanced_owners
from fsdp2.plugs.parameters.owned import assign_ranks, newton_schulz_flops
from tests.harness import fake_world
from tests.unit.helpers import for_each


def mesh_of(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


class Block(nn.Module):
    """Matrices of two sizes, a stack of them, and what no owner is for."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.experts = nn.Parameter(torch.randn(3, width, 2 * width))
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv2d(2, 2, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight


def load_of(model: nn.Module, owners: Any, world_size: int) -> list[float]:
    loads = [0.0] * world_size
    for parameter in model.parameters():
        if owners(parameter) is not None:
            loads[owners(parameter).rank] += newton_schulz_flops(parameter)
    return loads


def test_the_cost_of_a_matrix_is_that_of_its_products() -> None:
    assert newton_schulz_flops(nn.Parameter(torch.empty(3, 10))) == 5 * (2 * 9 * 10 * 2 + 2 * 27)
    assert newton_schulz_flops(nn.Parameter(torch.empty(10, 3))) == 5 * (2 * 9 * 10 * 2 + 2 * 27)
    assert newton_schulz_flops(nn.Parameter(torch.empty(4, 3, 10))) == 4 * 5 * (2 * 9 * 10 * 2 + 2 * 27)


def test_a_hand_dealt_example() -> None:
    """Hands 5 | 4 | 3 + 2: the heaviest to ranks 0 and 1. Of the next group, 7 goes to rank 2, which has least, 4."""
    assert assign_ranks([[2, 3, 4, 5], [7, 1]], 3) == [[1, 1, 2, 0], [2, 0]]
    assert assign_ranks([[1, 1, 1]], 2) == [[0, 1, 0]]
    assert assign_ranks([[], [3]], 2) == [[], [0]]


@for_each("seed", range(10))
def test_groups_and_the_whole_are_balanced(seed: int) -> None:
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 3, 4])
    groups = [[generator.choice([1, 2, 3, 5, 8]) for _ in range(generator.randint(0, 6))] for _ in range(5)]
    dealt = assign_ranks(groups, world_size)
    for costs, ranks in zip(groups, dealt, strict=True):
        loads = [sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(world_size)]
        best = min(
            max(sum(c for c, r in zip(costs, way, strict=True) if r == rank) for rank in range(world_size))
            for way in itertools.product(range(world_size), repeat=len(costs))
        )
        assert max(loads) <= 4 / 3 * best
    costs = [cost for group in groups for cost in group]
    ranks = [rank for group in dealt for rank in group]
    totals = [sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(world_size)]
    heaviest_hand = max((sum(group) for group in groups), default=0)
    assert max(totals) - min(totals) <= heaviest_hand, "no group makes it worse than what one hand weighs"


@fake_world(4)
def test_matrices_and_stacks_get_owners_and_nothing_else() -> None:
    model = Model()
    owners = balanced_owners(model, mesh_of(4), units=model.blocks)
    owned = {name for name, parameter in model.named_parameters() if owners(parameter) is not None}
    names = ("q.weight", "k.weight", "v.weight", "o.weight", "up.weight", "down.weight", "experts")
    assert owned == {f"blocks.{index}.{name}" for index in range(6) for name in names}
    assert {type(owners(parameter)) for parameter in model.parameters()} == {Owned, type(None)}
    loads = load_of(model, owners, 4)
    assert max(loads) <= 1.1 * sum(loads) / 4
    for block in model.blocks:
        of_block = load_of(block, owners, 4)
        assert max(of_block) <= 4 / 3 * sum(of_block) / 4 + newton_schulz_flops(block.q.weight)


@fake_world(64)
def test_more_ranks_than_matrices_still_share_the_work() -> None:
    model = Model()
    owners = balanced_owners(model, mesh_of(64), units=model.blocks)
    ranks = [owners(parameter).rank for parameter in model.parameters() if owners(parameter) is not None]
    assert len(ranks) == len(set(ranks)) == 42, "no rank gets a second matrix while another has none"


@fake_world(4)
def test_frozen_matrices_keep_the_default_and_a_choice_overrides() -> None:
    model = Model()
    model.blocks[0].requires_grad_(False)
    owners = balanced_owners(model, mesh_of(4))
    assert all(owners(parameter) is None for parameter in model.blocks[0].parameters())
    owners = balanced_owners(model, mesh_of(4), select=lambda name, parameter: name == "blocks.0.q.weight")
    assert [name for name, parameter in model.named_parameters() if owners(parameter)] == ["blocks.0.q.weight"]


@fake_world(8)
def test_the_shard_dim_of_a_mesh_with_replicas_counts() -> None:
    model = Model()
    owners = balanced_owners(model, init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard")))
    assert {owners(parameter).rank for parameter in model.parameters() if owners(parameter)} == {0, 1}


@fake_world(4)
def test_parameters_can_be_given_and_costs_chosen() -> None:
    small, large = nn.Parameter(torch.empty(2, 2)), nn.Parameter(torch.empty(4, 4))
    owners = balanced_owners([small, large], mesh_of(4), cost=torch.numel)
    assert (owners(large), owners(small)) == (Owned(0), Owned(1))
    owners = balanced_owners([small, large], mesh_of(4), cost=lambda parameter: 1 / parameter.numel())
    assert (owners(large), owners(small)) == (Owned(1), Owned(0))


@fake_world(4)
def test_mistakes_are_named() -> None:
    model = Model()
    with pytest.raises(FSDPTypeError, match="takes the DeviceMesh that fully_shard gets, got int"):
        balanced_owners(model, 4)  # type: ignore[arg-type]
    with pytest.raises(
        FSDPTypeError, match=r"takes a Module or an iterable, each a Parameter as 'module', got \['q'\]"
    ):
        balanced_owners(["q"], mesh_of(4))  # type: ignore[list-item]
    with pytest.raises(FSDPTypeError, match="as 'module', got a Parameter"):
        balanced_owners(model.head.weight, mesh_of(4))
    with pytest.raises(FSDPTypeError, match=r"as 'units', got \['blocks'\]"):
        balanced_owners(model, mesh_of(4), units=["blocks"])  # type: ignore[list-item]
    with pytest.raises(FSDPValueError, match="must be a number, 0 or more, got nan"):
        balanced_owners(model, mesh_of(4), cost=lambda parameter: float("nan"))
    for cost in (-1.0, None, float("inf")):
        with pytest.raises(FSDPValueError, match=r"the cost of '.*' must be a number, 0 or more"):
            balanced_owners(model, mesh_of(4), cost=lambda parameter, cost=cost: cost)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(FSDPValueError, match="got 3 dims"):
        balanced_owners(model, mesh)
    scalar = nn.ParameterList([nn.Parameter(torch.tensor(1.0))])
    with pytest.raises(FSDPValueError, match="'0' has no dims"):
        balanced_owners(scalar, mesh_of(4), select=lambda name, parameter: True)
    for rank in (-1, True, 1.0):
        with pytest.raises(FSDPValueError, match="Owned takes a rank"):
            Owned(rank)  # type: ignore[arg-type]
