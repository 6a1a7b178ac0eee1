"""`auto_shard` does what `choose_groups` says, on random trees of modules; and what it does besides. Nothing is run."""

from __future__ import annotations

import copy
import logging
import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp2 import FSDPTypeError, FSDPValueError, MixedPrecisionPolicy, auto_shard, choose_groups, fully_shard
from fsdp2.core.state import FSDPState, state_of, states_below
from tests.harness import fake_world, others_full
from tests.harness.shared.grouped_models import GPTBlock, Shaped


class Bag(nn.Module):
    """Has no forward."""


class Other(Shaped):
    """A second class with forward."""


class RandomTree:
    """Draws a model: blocks, containers, bags, attention, modules and weights that occur twice.

    Attributes:
        model: what was drawn.
        shares_bags: whether modules without forward occur twice, which keeps what is around them from being groups.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.shares_bags = False
        self._modules: list[nn.Module] = []
        self._weights: list[nn.Parameter] = []
        self.model: nn.Module = Shaped()
        for number in range(self._draw.randint(1, 5)):
            self.model.add_module(f"child{number}", self._module(depth=self._draw.randint(0, 4)))

    def _module(self, depth: int) -> nn.Module:
        draw = self._draw
        if self._modules and draw.random() < 0.05:
            module = draw.choice(self._modules)
            self.shares_bags |= any(not is_called(each) for each in module.modules())
            return module
        if depth == 0:
            module = self._leaf()
        else:
            kind = draw.choice([nn.ModuleList, nn.ModuleDict, nn.Sequential, Shaped, Other, Bag])
            children = [self._module(depth - 1) for _ in range(draw.randint(1, 3))]
            if draw.random() < 0.5:
                children += [copy.deepcopy(children[0]) for _ in range(draw.randint(1, 3))]
            module = kind()
            for number, child in enumerate(children):
                module.add_module(str(number), child)
            if draw.random() < 0.2:
                module.register_parameter("table", nn.Parameter(torch.zeros(draw.randint(1, 3000), device="meta")))
        self._modules.append(module)
        return module

    def _leaf(self) -> nn.Module:
        draw = self._draw
        if draw.random() < 0.1:
            return nn.MultiheadAttention(draw.choice([8, 16]), 2, device="meta")
        leaf = nn.Linear(draw.randint(1, 60), draw.randint(1, 60), bias=draw.random() < 0.5, device="meta")
        if self._weights and draw.random() < 0.15:
            leaf.weight = draw.choice(self._weights)
        self._weights.append(leaf.weight)
        return leaf


def is_called(module: nn.Module) -> bool:
    return isinstance(module, (Shaped, nn.Sequential, nn.Linear, nn.MultiheadAttention))


def unsplittable(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of ``module`` that none of its submodules could have in a group of its own."""
    if isinstance(module, nn.MultiheadAttention):
        return set(module.parameters())
    found = set(module.parameters(recurse=False))
    return found.union(*(unsplittable(child) for child in module.children() if not is_called(child)))


def nbytes(parameters: set[nn.Parameter]) -> int:
    return sum(parameter.numel() * 4 for parameter in parameters)


def owned_bytes(state: FSDPState) -> int:
    """What is in the groups that this state's `fully_shard` call made; states that share a group list it too."""
    groups = [group for group in state.unit if group.sharers[0] is state]
    return sum(math.prod(param.shape) * 4 for group in groups for param in group.params)


def drawn_sizes(seed: int) -> dict[str, int]:
    draw = random.Random(seed)
    return {"max_bytes": draw.choice([2000, 10_000, 50_000, 2**30]), "min_bytes": draw.choice([0, 100, 2000])}


@pytest.mark.parametrize("seeds", others_full([range(start, start + 20) for start in range(0, 200, 20)], [range(20)]))
def test_choices_in_random_trees(seeds: range) -> None:
    for seed in seeds:
        drawn, sizes = RandomTree(seed), drawn_sizes(seed)
        model, max_bytes = drawn.model, sizes["max_bytes"]
        choice = choose_groups(model, **sizes)
        assert choice == choose_groups(copy.deepcopy(model), **sizes), f"seed {seed}: deterministic"
        assert sum(group.nbytes for group in choice.groups) == nbytes(set(model.parameters())), f"seed {seed}: once"
        assert len({group.name for group in choice.groups}) == len(choice.groups) and choice.groups[-1].name == ""
        for group in choice.groups:
            module = model.get_submodule(group.name)
            assert is_called(module) and "out_proj" not in group.name, f"seed {seed}"
            if group.nbytes > max_bytes:
                assert group.reason.endswith("; above max_bytes, but cannot be split")
                assert drawn.shares_bags or nbytes(unsplittable(module)) > max_bytes, f"seed {seed}"


@pytest.mark.parametrize("seeds", others_full([range(5), range(5, 30)], [range(5)]))
@fake_world(4)
def test_auto_shard_makes_the_groups_that_were_chosen(seeds: range) -> None:
    for seed in seeds:
        model, sizes = RandomTree(seed).model, drawn_sizes(seed)
        parameters = set(model.parameters())
        choice = choose_groups(model, **sizes)
        assert auto_shard(model, **sizes) is model
        states = {name: state_of(module) for name, module in model.named_modules() if state_of(module)}
        assert set(states) == {group.name for group in choice.groups}
        for group in choice.groups:
            assert owned_bytes(states[group.name]) == group.nbytes, (seed, group)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert len(set(model.parameters())) == len(parameters)


class Towers(Shaped):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GPTBlock(16) for _ in range(3))
        self.head = nn.Linear(16, 4)


NAMES = ["blocks.0", "blocks.1", "blocks.2", ""]


def sharded_names(model: nn.Module) -> list[str]:
    return sorted(
        (name for name, module in model.named_modules() if state_of(module)), key=lambda name: (not name, name)
    )


@fake_world(4)
def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = Towers()
    expected = str(choose_groups(model, blocks=GPTBlock))
    with caplog.at_level(logging.INFO, "fsdp2"):
        auto_shard(model, blocks=GPTBlock)
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("fsdp2", "INFO", expected)
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "fsdp2"):
        auto_shard(model, blocks=GPTBlock)
    assert caplog.messages == ["Towers is sharded already: no groups were chosen"]


@fake_world(4)
def test_a_second_call_changes_nothing_and_compares_the_arguments_of_fully_shard() -> None:
    model, mesh = Towers(), init_device_mesh("cpu", (4,))
    auto_shard(model, mesh, blocks=GPTBlock, ignored_params=iter([model.head.bias]))
    before, parameters = states_below(model), list(model.parameters())
    assert auto_shard(model, mesh, blocks=GPTBlock, ignored_params=[model.head.bias]) is model
    assert auto_shard(model, blocks=GPTBlock, ignored_params=[model.head.bias]) is model
    assert states_below(model) == before and sharded_names(model) == NAMES
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not isinstance(model.head.bias, DTensor)
    with pytest.raises(FSDPValueError, match="another argument 'reshard_after_forward'"):
        auto_shard(model, blocks=GPTBlock, ignored_params=[model.head.bias], reshard_after_forward=False)
    with pytest.raises(FSDPValueError, match="blocks names 'LSTM'"):
        auto_shard(model, blocks=nn.LSTM)


@pytest.mark.full
@fake_world(4)
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("blocks", None, r"\(GPTBlock\) before, None now"),
        ("blocks", {"GPTBlock", nn.Linear}, r"\(GPTBlock\) before, \(GPTBlock, Linear\) now"),
        ("max_bytes", 2**25, f"{2**30} before, {2**25} now"),
        ("min_bytes", 5, f"{2**20} before, 5 now"),
    ],
)
def test_a_second_call_that_would_choose_otherwise(name: str, value: Any, text: str) -> None:
    model = auto_shard(Towers(), blocks=GPTBlock)
    for each in (model, copy.deepcopy(model)):
        assert auto_shard(each, blocks=["GPTBlock"]) is each
        with pytest.raises(
            FSDPValueError, match=f"already called on this Towers with another argument '{name}': {text}"
        ):
            auto_shard(each, **{"blocks": GPTBlock, name: value})
        assert fully_shard(each) is each
    by_hand = fully_shard(Towers())
    assert auto_shard(by_hand, min_bytes=0) is by_hand and sharded_names(by_hand) == [""]


@fake_world(4)
def test_all_arguments_reach_every_group() -> None:
    model, policy = Towers(), MixedPrecisionPolicy(torch.bfloat16)
    auto_shard(model, blocks=GPTBlock, mp_policy=policy, strategy="zero2")
    for state in states_below(model):
        assert state.arguments.mp_policy == policy and state.arguments.strategy == "zero2"
    with pytest.raises(TypeError, match="takes no argument 'mp_polic'"):
        auto_shard(Towers(), mp_polic=policy)


@fake_world(4)
def test_what_is_sharded_before_stays_as_it_is() -> None:
    model = Towers()
    state = state_of(fully_shard(model.blocks[1], reshard_after_forward=False))
    choice = choose_groups(model, min_bytes=0)
    assert choice.sharded_before == ("blocks.1",)
    assert str(choice).endswith("\n  sharded before, left as they are: blocks.1")
    auto_shard(model, min_bytes=0)
    assert state_of(model.blocks[1]) is state and sharded_names(model) == NAMES
    inner = Towers()
    fully_shard(inner.blocks[0].mlp)
    assert [group.name for group in choose_groups(inner, min_bytes=0).groups] == NAMES
    tied = Towers()
    tied.blocks[1].mlp[0].weight = tied.blocks[0].mlp[0].weight
    fully_shard(tied.blocks[0])
    sizes = {group.name: group.nbytes for group in choose_groups(tied, blocks=GPTBlock).groups}
    assert sizes["blocks.2"] - sizes["blocks.1"] == 16 * 64 * 4


@fake_world(4)
def test_below_a_sharded_module() -> None:
    model = Towers()
    fully_shard(model)
    with pytest.raises(FSDPValueError, match="bottom-up"):
        auto_shard(model.blocks[0])


@fake_world(4)
def test_a_failure_says_what_to_undo(caplog: pytest.LogCaptureFixture) -> None:
    model = Towers()
    kinds = {"mp_policy": lambda fqn, parameter: 3 if "ln_1" not in fqn and "head" in fqn else None}
    with pytest.raises(FSDPTypeError, match=r"mp_policy\('head.weight', ...\) must return"):
        auto_shard(model, blocks=GPTBlock, **kinds)
    assert sharded_names(model) == NAMES[:3]
    assert caplog.messages == [
        "auto_shard failed at '', when 3 groups were sharded already; call fsdp2.unwrap(model) before you call it "
        "again with other arguments"
    ]
    caplog.clear()
    with pytest.raises(FSDPValueError):
        auto_shard(Towers(), blocks=GPTBlock, strategy="zero7")
    with pytest.raises(FSDPValueError, match="auto_shard cannot shard a ModuleList"):
        auto_shard(nn.ModuleList([Towers()]), blocks=GPTBlock)
    assert not caplog.messages


@fake_world(8)
def test_under_tensor_parallelism_a_ranks_part_counts() -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = Towers()
    whole = {group.name: group.nbytes for group in choose_groups(model, blocks=GPTBlock).groups}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"mlp.0": ColwiseParallel()})
    assert model.blocks[0].mlp[0].weight.placements == (Shard(0),)
    part = {group.name: group.nbytes for group in choose_groups(model, blocks=GPTBlock).groups}
    assert whole["blocks.0"] - part["blocks.0"] == (16 * 64 + 64) * 4 // 2
    auto_shard(model, mesh["dp"], blocks=GPTBlock)
    assert sharded_names(model) == NAMES


@fake_world(4)
def test_on_meta_and_without_parameters() -> None:
    with torch.device("meta"):
        model = Towers()
    auto_shard(model, blocks=GPTBlock)
    assert sharded_names(model) == NAMES and model.head.weight.is_meta
    assert sharded_names(auto_shard(nn.Sequential(nn.ReLU()))) == [""]


@fake_world(4)
def test_by_hand_from_the_choice() -> None:
    model = Towers()
    for group in choose_groups(model, blocks=GPTBlock).groups:
        if group.name != "blocks.1":
            fully_shard(model.get_submodule(group.name))
    assert sharded_names(model) == ["blocks.0", "blocks.2", ""]
