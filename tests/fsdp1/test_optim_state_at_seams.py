"""State dicts of optimizers where the optimizer or the model is not as a plain loop leaves it."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp2 import FSDPRuntimeError
from fsdp2.compat import install
from fsdp2.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    flat_optim_state_dict,
    flat_optim_state_dict_to_load,
    whole,
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
@pytest.mark.full
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
            with pytest.warns(UserWarning, match="`optim_input` argument is deprecated"):
                loaded = cls.shard_full_optim_state_dict(saved, model, optim_input=before)
        else:
            loaded = flat_optim_state_dict_to_load(model, optimizer, flat)
        numbered = cls.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
        assert list(numbered["state"]) == [0, 1, 2, 3]
        optimizer.load_state_dict(loaded)
        assert_holds(cls.optim_state_dict(model, optimizer), expected)


@multi_rank(2)
@pytest.mark.full
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


def settings(kind: str) -> tuple[Any, ...]:
    """FULL on all ranks, FULL on the first, or SHARDED."""
    if kind == "SHARDED":
        return (StateDictType.SHARDED_STATE_DICT,)
    on_first = kind == "ON_FIRST"
    configs = FullStateDictConfig(rank0_only=on_first), FullOptimStateDictConfig(rank0_only=on_first)
    return (StateDictType.FULL_STATE_DICT, *configs)


@multi_rank(2)
@pytest.mark.parametrize("kind", ["FULL", "ON_FIRST", "SHARDED"])
def test_a_state_that_is_of_no_parameter_comes_back(kind: str, world_size: int) -> None:
    cls, model = FullyShardedDataParallel, wrapped(layers())
    optimizer = trained(model)
    of_program: dict[Any, Any] = {"global": {"count": 5, "scale": torch.ones(3)}, "epoch": 2, "total": torch.ones(2)}
    seen = {"steps": defaultdict(int, {3: 4}), "words": Counter("abb"), "order": OrderedDict(b=1, a=torch.zeros(1))}
    of_program["global"] |= seen
    optimizer.state.update(of_program)
    with cls.state_dict_type(model, *settings(kind)):
        saved = cls.optim_state_dict(model, optimizer)
        assert bool(saved) or (kind == "ON_FIRST" and dist.get_rank() == 1)
        optimizer.state.clear()
        optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, saved))
        for name, value in of_program.items():
            torch.testing.assert_close(optimizer.state[name], value)
        found = optimizer.state["global"]
        assert [type(found[name]) for name in seen] == [type(each) for each in seen.values()]
        assert found["steps"].default_factory is int and found["words"]["b"] == 2
        assert len(optimizer.state) == len(NAMES) + 3
        for group in saved.get("param_groups", ()):
            group["params"].append("2.weight")
        if saved:
            saved["state"]["2.weight"] = {"exp_avg": torch.ones(2)}
        with pytest.raises(FSDPRuntimeError, match=r"the optimizer's state has '2\.weight'"):
            cls.optim_state_dict_to_load(model, optimizer, saved)


@multi_rank(2)
@pytest.mark.parametrize("on_first", [False, True])
def test_a_state_without_groups(on_first: bool, world_size: int) -> None:
    """As programs save that take the groups from their own settings."""
    cls, model = FullyShardedDataParallel, wrapped(layers())
    optimizer = trained(model)
    with cls.state_dict_type(model, *settings("ON_FIRST" if on_first else "FULL")):
        saved = cls.optim_state_dict(model, optimizer)
        saved.pop("param_groups", None)
        loaded = cls.optim_state_dict_to_load(model, optimizer, saved)
        assert loaded["param_groups"][0]["lr"] == 0.1 and list(loaded["state"]) == [0, 1, 2, 3]
        if saved:
            saved["state"]["2.weight"] = {"exp_avg": torch.ones(2)}
        with pytest.raises(FSDPRuntimeError, match=r"the optimizer's state has '2\.weight'"):
            cls.optim_state_dict_to_load(model, optimizer, saved)
    if saved:
        assert list(cls.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, model, optim=optimizer)) == ["state"]


def compiled(module: nn.Sequential) -> Any:
    """A unit around a compiled module, in a wrapper that is compiled: both write `_orig_mod.` into names."""
    module[0] = FullyShardedDataParallel(torch.compile(module[0], backend="eager"))
    return torch.compile(FullyShardedDataParallel(module), backend="eager")


def with_names_of_compiled(state: dict[str, Any]) -> dict[str, Any]:
    def renamed(name: str) -> str:
        return f"_orig_mod.{name.replace('0.', '0._orig_mod.')}"

    groups = [{**group, "params": [renamed(name) for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {renamed(name): entry for name, entry in state["state"].items()}, "param_groups": groups}


@multi_rank(2)
@pytest.mark.parametrize("kind", ["FULL", "ON_FIRST", "SHARDED"])
def test_names_of_compiled_modules_are_those_of_parameters(kind: str, world_size: int) -> None:
    cls, plain = FullyShardedDataParallel, layers()
    expected, model = trained(plain), compiled(layers())
    with torch.compiler.set_stance("force_eager"):
        optimizer = trained(model)
    with cls.state_dict_type(model, *settings(kind)):
        saved = cls.optim_state_dict(model, optimizer)
        given = with_names_of_compiled(saved) if saved else {}
        if saved:
            assert list(saved["state"]) == NAMES
            numbered = cls.rekey_optim_state_dict(given, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
            assert list(numbered["state"]) == numbered["param_groups"][0]["params"] == [0, 1, 2, 3]
        optimizer.state.clear()
        optimizer.load_state_dict(cls.optim_state_dict_to_load(model, optimizer, given))
    with cls.state_dict_type(model, *settings("SHARDED")):
        found = cls.optim_state_dict(model, optimizer, with_names_of_compiled(cls.optim_state_dict(model, optimizer)))
        assert_holds(found, expected)


@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.filterwarnings("ignore:fsdp2.compat.install.. comes too late", "ignore::FutureWarning")
def test_torchs_functions_save_and_load_the_optimizer_of_a_compiled_model(full: bool, world_size: int) -> None:
    """They put `_orig_mod.` into the names that they give the wrapper."""
    expected = trained(layers())
    with install():
        model: Any = torch.compile(wrapped(layers()), backend="eager")
        with torch.compiler.set_stance("force_eager"):
            optimizer = trained(model)
        options = StateDictOptions(full_state_dict=full)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        assert set(saved["state"]) == set(NAMES)
        other = torch.optim.AdamW(model.parameters(), lr=0.5)
        set_optimizer_state_dict(model, other, saved, options=options)
        assert other.param_groups[0]["lr"] == 0.1
        assert_holds(FullyShardedDataParallel.optim_state_dict(model, other), expected)


@multi_rank(2)
def test_ranks_that_get_nothing_keep_no_whole_tensor(world_size: int) -> None:
    """They take part in the collectives, and at most one tensor, or one batch of small ones, is there at a time."""
    cls, most = FullyShardedDataParallel, 0
    torch.manual_seed(0)
    sizes = (64, 256, 256, 256, 63)  # small ones travel together, one is of odd rows, the rest alone
    model = cls(nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, sizes[0])).sum().backward()
    optimizer.step()
    made: list[Any] = []

    def alive() -> int:
        return len({id(each()) for each in made if each() is not None})

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal most
            most = max(most, alive())
            found = original(*args, **kwargs)
            made.extend(weakref.ref(each) for each in (found.values() if isinstance(found, dict) else [found]))
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("whole", "_gathered_in_place", "_gathered_together"):
            patch.setattr(whole, name, counted(getattr(whole, name)))
        saved = cls.full_optim_state_dict(model, optimizer, rank0_only=True)
    is_first = dist.get_rank() == 0
    assert len(saved.get("state", ())) == (8 if is_first else 0) and len(made) >= 8
    deadline = time.monotonic() + 5
    while alive() != (8 if is_first else 0) and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's thread may hold the last one yet
    assert alive() == (8 if is_first else 0)
    assert is_first or most <= 1


@multi_rank(2)
@pytest.mark.full
def test_optimizers_that_have_parameters_in_another_order_on_each_rank(world_size: int) -> None:
    """The weights are alike in shape: gathered in the optimizers' orders, one would be made of pieces of two."""
    cls, plain = FullyShardedDataParallel, layers()
    expected, model = trained(plain), wrapped(layers())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[::-1] if dist.get_rank() == 1 else parameters, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert_holds(cls.full_optim_state_dict(model, optimizer, rank0_only=False), expected)
    sharded = cls.sharded_optim_state_dict(model, optimizer)
    assert list(sharded["state"]) == NAMES  # what gathers it walks through it on all ranks alike
    assert_holds(sharded, expected)


@multi_rank(2)
def test_ranks_whose_optimizers_have_not_the_same_states(world_size: int) -> None:
    model = wrapped(layers())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[:-1] if dist.get_rank() == 1 else parameters, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    lacks = r"optimizer states needed by rank 0's.*rank 1 lacks \[\"'exp_avg' \[3\] torch.float32 of '1.bias'\""
    with pytest.raises(FSDPRuntimeError, match=lacks):
        FullyShardedDataParallel.full_optim_state_dict(model, optimizer)
    sharded = FullyShardedDataParallel.sharded_optim_state_dict(model, optimizer)  # waits for nobody
    assert list(sharded["state"]) == NAMES[: 3 if dist.get_rank() == 1 else 4]


@multi_rank(2)
@pytest.mark.full
def test_a_state_that_is_given_without_groups(world_size: int) -> None:
    cls, model = FullyShardedDataParallel, wrapped(layers())
    optimizer = trained(model)
    given = {"state": optimizer.state_dict()["state"]}
    saved = cls.optim_state_dict(model, optimizer, given)
    assert saved.keys() == {"state"}
    assert_holds(saved, trained(layers()))
    loaded = cls.optim_state_dict_to_load(model, optimizer, saved)
    assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]
