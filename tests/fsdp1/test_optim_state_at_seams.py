"""State dicts of optimizers where the optimizer or the model is not as a plain loop leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2.compat.fsdp1 import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    flat_optim_state_dict,
    flat_optim_state_dict_to_load,
)
from tests.harness import multi_rank

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))


def wrapped(module: nn.Sequential, strategy: str = "FULL_SHARD") -> Any:
    kind = ShardingStrategy[strategy]
    module[0] = FullyShardedDataParallel(module[0], sharding_strategy=kind)
    return FullyShardedDataParallel(module, sharding_strategy=kind)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def moments(state: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The first moments, whole."""
    for name, entry in state["state"].items():
        value = entry["exp_avg"]
        yield name, value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_holds(state: dict[str, Any], plain: torch.optim.Optimizer) -> None:
    """As the plain model's optimizer does."""
    expected = dict(zip(NAMES, (each["exp_avg"] for each in plain.state.values()), strict=True))
    assert state["state"].keys() == expected.keys()
    for name, value in moments(state):
        torch.testing.assert_close(value, expected[name])


@multi_rank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_from_before_wrapping_that_has_not_stepped(strategy: str, world_size: int) -> None:
    """It holds the plain parameters yet: a program that resumes loads its state before the first step."""
    cls, plain = FullyShardedDataParallel, layers()
    expected = trained(plain)
    source = wrapped(layers(), strategy)
    first = trained(source)
    saved, flat = cls.full_optim_state_dict(source, first, rank0_only=False), flat_optim_state_dict(source, first)
    on_first = saved if dist.get_rank() == 0 else None
    for way in ("to_load", "scatter", "input", "flat"):
        module = layers()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        before = list(module.parameters())
        model = wrapped(module, strategy)
        if way == "to_load":
            assert cls.optim_state_dict(model, optimizer)["param_groups"][0]["params"] == NAMES
            loaded = cls.optim_state_dict_to_load(model, optimizer, saved)
        elif way == "scatter":
            loaded = cls.scatter_full_optim_state_dict(on_first, model, optim=optimizer)
        elif way == "input":
            loaded = cls.shard_full_optim_state_dict(saved, model, optim_input=before)
        else:
            loaded = flat_optim_state_dict_to_load(model, optimizer, flat)
        numbered = cls.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
        assert list(numbered["state"]) == [0, 1, 2, 3]
        optimizer.load_state_dict(loaded)
        assert_holds(cls.optim_state_dict(model, optimizer), expected)


@multi_rank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_an_evaluation_that_leaves_parameters_whole(strategy: str, world_size: int) -> None:
    cls, plain = FullyShardedDataParallel, layers()
    expected, model = trained(plain), wrapped(layers(), strategy)
    optimizer = trained(model)
    flat = flat_optim_state_dict(model, optimizer)

    def evaluated() -> Any:
        with torch.no_grad():
            model(torch.ones(2, 4))
        return model

    saved = cls.optim_state_dict(evaluated(), optimizer)
    assert list(saved["state"]) == NAMES
    assert_holds(saved, expected)
    numbered = cls.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, evaluated(), optim=optimizer)
    assert list(numbered["state"]) == [0, 1, 2, 3]
    optimizer.state.clear()
    optimizer.load_state_dict(cls.optim_state_dict_to_load(evaluated(), optimizer, saved))
    assert_holds(cls.optim_state_dict(model, optimizer), expected)
    again = flat_optim_state_dict(evaluated(), optimizer)
    assert again["state"].keys() == flat["state"].keys()
    for key, entry in flat["state"].items():
        assert torch.equal(again["state"][key]["exp_avg"], entry["exp_avg"])
    optimizer.load_state_dict(flat_optim_state_dict_to_load(evaluated(), optimizer, flat))
    assert_holds(cls.optim_state_dict(model, optimizer), expected)
