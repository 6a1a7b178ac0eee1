"""`offload_policy` by names of parameters and as a function, and `cpu_offload_by_budget`.

On CPU all memory is the host's, so where a parameter rests is read off its group. What a group in host memory copies
and waits for on a device is tested on the recording device (`tests/fake_pg/test_stream_races.py`), as for one policy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torchs_state_dict
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
import fsdp2.compat
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPTypeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    cpu_offload_by_budget,
    fully_shard,
)
from fsdp2.core.param import fsdp_param_of
from tests.harness import FakeWorlds, multi_rank
from tests.harness.models import UNEVEN_MLP, ModelCase
from tests.harness.shared.strategies import HOW, reference_for, train
from tests.harness.shared.training import loss_on

ON_HOST = CPUOffloadPolicy()


def rests_on_host(model: nn.Module) -> set[str]:
    """Names of parameters whose shards are in host memory."""
    found = set()
    for name, parameter in model.named_parameters():
        owner = fsdp_param_of(parameter)
        assert owner is not None and owner.group is not None
        if owner.group.storage.offloading.is_host:
            found.add(name)
    return found


def every_other(module: nn.Module) -> dict[str, Any]:
    """A policy for every other parameter that no call below has sharded."""
    names = [name for name, each in module.named_parameters() if fsdp_param_of(each) is None]
    return dict.fromkeys(names[::2], ON_HOST)


def shard(case: ModelCase, **options: Any) -> Any:
    model = case.build()
    for unit in case.units(model):
        assert isinstance(unit, nn.Module)
        fully_shard(unit, offload_policy=every_other(unit), **options)
    return model


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("setting", ["uneven", "kept", "mixed precision"])
def test_it_trains_like_the_reference(setting: str, how: str, world_size: int) -> None:
    options: dict[str, Any] = {"reshard_after_forward": False} if setting == "kept" else {}
    dtypes: dict[str, Any] = {}
    if setting == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(torch.float64, torch.float64)
        dtypes = {"param_dtype": torch.float64, "grad_dtype": torch.float64, "reduce_dtype": torch.float64}
    model = shard(UNEVEN_MLP, **options)
    offloaded = rests_on_host(model)
    assert offloaded and len(offloaded) < len(list(model.parameters()))
    train(reference_for(UNEVEN_MLP, world_size, how, **dtypes), model, how=how)
    assert rests_on_host(model) == offloaded


@pytest.mark.full
@multi_rank(2)
def test_state_dicts_and_torchs_checkpoint_functions(world_size: int) -> None:
    """What one saves, one without offload loads, and the other way round; optimizers too."""
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build(seed=1)
    fully_shard(plain)
    optimizers = []
    for each, seed in ((model, 0), (plain, 1)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        loss_on(UNEVEN_MLP, each, seed, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizers.append(optimizer)
    found = torchs_state_dict.get_state_dict(model, optimizers[0])
    torchs_state_dict.set_state_dict(plain, optimizers[1], model_state_dict=found[0], optim_state_dict=found[1])
    for (name, ours), (_, its) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), its.full_tensor()), name  # type: ignore[attr-defined]
        for key in ("exp_avg", "exp_avg_sq"):
            states = [
                optimizer.state[each][key].full_tensor()
                for optimizer, each in zip(optimizers, (ours, its), strict=True)
            ]
            assert torch.equal(*states), name


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("install", [False, True])
def test_gradients_in_both_places_are_clipped_together(install: bool, world_size: int) -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    fully_shard(plain)
    norms = []
    with fsdp2.compat.install() if install else nullcontext():
        for each in (model, plain):
            loss_on(UNEVEN_MLP, each, 0, dist.get_rank(), 0).backward()
            clip = nn.utils.clip_grad_norm_ if install else fsdp2.clip_grad_norm_
            norms.append(clip(each.parameters(), 0.01))
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_local(), its.grad.to_local())  # type: ignore[union-attr]
    torch.testing.assert_close(*[each.full_tensor() if isinstance(each, DTensor) else each for each in norms])


# ---- which ones --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(8, 32)
        self.small = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.small(torch.tanh(self.big(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)
        self.tail = nn.Linear(8, 8, bias=False)
        self.tail.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(torch.tanh(self.head(x)))


def test_names_functions_and_torchs_policies(simulate: FakeWorlds) -> None:
    simulate(4)
    block = fully_shard(Block(), offload_policy={"big.weight": torchs.CPUOffloadPolicy(), "big.bias": None})
    assert rests_on_host(block) == {"big.weight"}
    assert len(block._get_fsdp_state().unit) == 2
    alike = fully_shard(
        Block(),
        offload_policy={
            "big.weight": ON_HOST,
            "big.bias": ON_HOST,
            **dict.fromkeys(["small.weight", "small.bias"], ON_HOST),
        },
    )
    assert len(alike._get_fsdp_state().unit) == 1, "all in one place travel together"
    by_size = fully_shard(Block(), offload_policy=lambda name, each: ON_HOST if each.dim() > 1 else None)
    assert rests_on_host(by_size) == {"big.weight", "small.weight"}
    none = fully_shard(Block(), offload_policy={})
    assert not rests_on_host(none) and len(none._get_fsdp_state().unit) == 1
    pins = fully_shard(
        Block(), offload_policy={"big.weight": CPUOffloadPolicy(pin_memory=False), "small.weight": ON_HOST}
    )
    assert rests_on_host(pins) == {"big.weight", "small.weight"}
    partly = fully_shard(Block(), offload_policy={"big.weight": CPUOffloadPolicy(parameters=False, gradients=True)})
    (one,) = [group for group in partly._get_fsdp_state().unit if group.storage.offloading.sums_on_host]
    assert [param.path for param in one.params] == ["big.weight"]


def test_a_second_call_must_say_the_same(simulate: FakeWorlds) -> None:
    simulate(2)
    block = fully_shard(Block(), offload_policy={"big.weight": ON_HOST})
    assert fully_shard(block, offload_policy={"big.weight": ON_HOST}) is block
    with pytest.raises(FSDPValueError, match="offload_policy"):
        fully_shard(block, offload_policy={"big.bias": ON_HOST})


def test_auto_shard_takes_names_of_the_model(simulate: FakeWorlds) -> None:
    simulate(2)
    chosen = {"blocks.1.big.weight": ON_HOST, "tail.weight": ON_HOST}
    model = fsdp2.auto_shard(Net(), blocks=Block, min_bytes=0, offload_policy=chosen)
    assert rests_on_host(model) == {"blocks.1.big.weight", "head.weight"}, "a tied one by any of its names"
    assert rests_on_host(copy.deepcopy(model)) == rests_on_host(model)
    assert fsdp2.auto_shard(model, blocks=Block, min_bytes=0, offload_policy=chosen) is model
    with pytest.raises(FSDPValueError, match="offload_policy"):
        fsdp2.auto_shard(model, blocks=Block, min_bytes=0, offload_policy={})
    with pytest.raises(FSDPValueError, match=r"'blocks.2.big.weight'.*Did you mean 'blocks..\.big.weight'"):
        fsdp2.auto_shard(Net(), blocks=Block, min_bytes=0, offload_policy={"blocks.2.big.weight": ON_HOST})
    assert all(type(each) is nn.Parameter for each in fsdp2.unwrap(model).parameters())


def test_a_tied_parameter_rests_where_its_first_call_said(simulate: FakeWorlds) -> None:
    simulate(2)
    model = Net()
    fully_shard(model.head, offload_policy={"weight": ON_HOST})
    with pytest.raises(FSDPValueError, match=r"'weight' of Linear is tied to .* another 'offload_policy'"):
        fully_shard(model.tail)
    fully_shard(model.tail, offload_policy={"weight": ON_HOST})
    fully_shard(model)
    assert rests_on_host(model) == {"head.weight"}


@pytest.mark.parametrize(
    "policy, error, message",
    [
        (
            {"big.weigth": ON_HOST},
            FSDPValueError,
            r"'big.weigth'.*shards no such parameter.*Did you mean 'big.weight'\?",
        ),
        ({"big": ON_HOST}, FSDPValueError, "'big'.*names are those below the module"),
        ({0: ON_HOST}, FSDPTypeError, "names of parameters, got a key 0"),
        ({"big.weight": True}, FSDPTypeError, r"offload_policy\['big.weight'\] must be an OffloadPolicy"),
        (
            lambda name, parameter: "cpu",
            FSDPTypeError,
            r"offload_policy\('big.weight', \.\.\.\) must be an OffloadPolicy",
        ),
        ([ON_HOST], FSDPTypeError, "offload_policy must be an OffloadPolicy"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, error: type[Exception], message: str, simulate: FakeWorlds) -> None:
    simulate(2)
    block = Block()
    with pytest.raises(error, match=message):
        fully_shard(block, offload_policy=policy)
    fully_shard(block)  # nothing was sharded


def test_names_that_contradict_each_other_are_refused(simulate: FakeWorlds) -> None:
    simulate(2)
    model = Net()
    with pytest.raises(FSDPValueError, match="which are one parameter; say it once"):
        fully_shard(model, offload_policy={"head.weight": ON_HOST, "tail.weight": OffloadPolicy()})
    fully_shard(model.blocks[0])
    with pytest.raises(FSDPValueError, match=r"'blocks.0.big.weight'.*that no other call has sharded"):
        fully_shard(model, offload_policy={"blocks.0.big.weight": ON_HOST})


# ---- by budget ---------------------------------------------------------------------------------


def bytes_of(model: nn.Module, chosen: Mapping[str, Any]) -> int:
    return sum(model.get_parameter(name).numel() * model.get_parameter(name).element_size() for name in chosen)


def test_the_largest_come_first_and_never_too_many() -> None:
    with torch.device("meta"):
        model = Net()
    matrix, head = 8 * 32 * 4, 8 * 8 * 4
    names = ["blocks.0.big.weight", "blocks.0.small.weight", "blocks.1.big.weight", "blocks.1.small.weight"]
    assert cpu_offload_by_budget(model, 0) == {}
    assert list(cpu_offload_by_budget(model, matrix)) == names[:1], "of equal ones the first by name"
    assert list(cpu_offload_by_budget(model, 4 * matrix)) == names
    assert list(cpu_offload_by_budget(model, 4 * matrix + head)) == [*names, "head.weight"], "tied ones count once"
    assert next(iter(cpu_offload_by_budget(model, matrix - 1))) == "head.weight", "what does not fit is left out"
    everything = cpu_offload_by_budget(model, 1 << 40, pin_memory=False)
    assert everything.keys() == dict(model.named_parameters()).keys()
    assert set(everything.values()) == {CPUOffloadPolicy(pin_memory=False)}
    before = 0
    for budget in range(0, 5 * matrix, 37):
        now = bytes_of(model, cpu_offload_by_budget(model, budget))
        assert before <= now <= budget
        before = now


@pytest.mark.parametrize(
    "budget, error, message",
    [(-1, FSDPValueError, "budget_bytes"), (1.5, FSDPTypeError, "an int"), (True, FSDPTypeError, "an int")],
)
def test_budgets_that_are_none_are_refused(budget: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cpu_offload_by_budget(nn.Linear(2, 2), budget)
    with pytest.raises(FSDPTypeError, match=r"takes a Module"):
        cpu_offload_by_budget([], 1)  # type: ignore[arg-type]


@multi_rank(2)
def test_hooks_and_collectives_of_a_module_are_those_of_both_places() -> None:
    """Its parameters are in two groups, and on one mesh."""
    model = fully_shard(nn.Linear(4, 4), offload_policy={"weight": ON_HOST})
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(seen.append)
    model(torch.ones(2, 4)).sum().backward()
    assert len(seen) == 2
