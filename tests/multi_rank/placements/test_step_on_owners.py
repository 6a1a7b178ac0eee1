"""`step_on_owners`: torch's own Muon, which knows no DTensors, on owned parameters, beside the unsharded model."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fsdp2 import (
    FSDPNotImplementedError,
    FSDPRuntimeError,
    FSDPTypeError,
    FSDPValueError,
    fully_shard,
    offload_optimizer_state,
    step_on_owners,
)
from tests.harness import multi_rank
from tests.harness.compare import Tolerance, assert_sharded_same, parameters_of
from tests.harness.counting import Collectives
from tests.harness.reference import adamw
from tests.harness.shared.owned import NET, USED_NET, is_matrix, sharded
from tests.harness.shared.training import loss_on

BF16 = Tolerance(0.05, 2e-3, "torch's Muon orthogonalizes in bf16, which magnifies what the order of sums leaves")


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What torch's Muon takes, and the rest."""
    named = list(model.named_parameters())
    muon = [p for name, p in named if is_matrix(name, p) and p.dim() == 2]
    return muon, [p for name, p in named if not (is_matrix(name, p) and p.dim() == 2)]


def optimizers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    muon, rest = split(model)
    return torch.optim.Muon(muon, lr=0.02), adamw(rest)


def train(model: nn.Module, optimizers: Any, step: int, *, world_size: int, rank: int | None) -> None:
    """One step; of the unsharded model (no ``rank``), with the batches of all ranks."""
    if rank is None:
        (sum(loss_on(USED_NET, model, step, each) for each in range(world_size)) / world_size).backward()
    else:
        loss_on(USED_NET, model, step, rank).backward()
    muon, rest = optimizers
    if rank is None:
        muon.step()
    else:
        step_on_owners(muon)
    rest.step()
    for each in optimizers:
        each.zero_grad()


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_torchs_muon_trains_like_the_unsharded_model(reshard_after_forward: bool | None, world_size: int) -> None:
    """Without a reshard the next forward must gather what was stepped."""
    model, plain = sharded(USED_NET, reshard_after_forward=reshard_after_forward), USED_NET.build()
    optimizers, others = optimizers_of(model), optimizers_of(plain)
    for step in range(3):
        train(model, optimizers, step, world_size=world_size, rank=dist.get_rank())
        train(plain, others, step, world_size=world_size, rank=None)
        assert_sharded_same("parameters", parameters_of(model), parameters_of(plain), tolerance=BF16)
    muon = optimizers[0]
    assert muon.param_groups[0]["params"] == split(model)[0], "the sharded parameters are back"
    for parameter, state in muon.state.items():
        assert isinstance(state["momentum_buffer"], DTensor)
        assert state["momentum_buffer"].placements == parameter.placements


@pytest.mark.full
@multi_rank(2)
def test_a_step_on_owners_communicates_nothing_and_keeps_what_others_hold() -> None:
    model = sharded(USED_NET)
    muon = optimizers_of(model)[0]
    scheduler = torch.optim.lr_scheduler.StepLR(muon, 1, 0.5)
    loss_on(USED_NET, model, 0, dist.get_rank()).backward()
    with Collectives() as seen:
        step_on_owners(muon)
    scheduler.step()
    assert not seen.counts and muon.param_groups[0]["lr"] == 0.01


@multi_rank(2)
def test_a_checkpoint_of_its_state() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = sharded(USED_NET)
    muon = optimizers_of(model)[0]
    loss_on(USED_NET, model, 0, dist.get_rank()).backward()
    step_on_owners(muon)
    before = copy.deepcopy(get_optimizer_state_dict(model, muon))
    dcp.save(before, checkpoint_id=folder[0])
    loss_on(USED_NET, model, 1, dist.get_rank()).backward()
    step_on_owners(muon)
    muon.zero_grad()
    state = get_optimizer_state_dict(model, muon)
    dcp.load(state, checkpoint_id=folder[0])
    set_optimizer_state_dict(model, muon, state)
    found = get_optimizer_state_dict(model, muon)["state"]
    for name, expected in before["state"].items():
        whole = found[name]["momentum_buffer"].full_tensor()
        assert torch.equal(whole, expected["momentum_buffer"].full_tensor())


@multi_rank(2)
def test_a_step_that_fails_leaves_the_optimizer_as_it_was() -> None:
    model = sharded(USED_NET)
    muon = optimizers_of(model)[0]
    loss_on(USED_NET, model, 0, dist.get_rank()).backward()
    step_on_owners(muon)
    muon.param_groups[0]["ns_steps"] = 1000
    with pytest.raises(ValueError, match="Number of steps"):
        step_on_owners(muon)
    assert muon.param_groups[0]["params"] == split(model)[0]
    assert all(isinstance(state["momentum_buffer"], DTensor) for state in muon.state.values())
    assert set(muon.state) <= set(split(model)[0])


@pytest.mark.full
@multi_rank(2)
def test_torchs_muon_alone_says_what_to_do() -> None:
    model = sharded(USED_NET)
    muon = optimizers_of(model)[0]
    loss_on(USED_NET, model, 0, dist.get_rank()).backward()
    with pytest.raises(FSDPNotImplementedError, match="to_local"):
        muon.step()


class Factored(torch.optim.Optimizer):
    """Keeps a vector for each matrix."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = p.detach().square().sum(0)


@multi_rank(2)
def test_mistakes_are_refused() -> None:
    model = sharded(USED_NET)
    with pytest.raises(FSDPTypeError, match="takes an Optimizer as 'optimizer', got a FSDPNet"):
        step_on_owners(model)  # type: ignore[arg-type]
    plain = NET.build()
    for unit in NET.units(plain):
        fully_shard(unit)
    with pytest.raises(FSDPValueError, match="without owned parameters"):
        step_on_owners(adamw(list(plain.parameters())))
    muon = torch.optim.Muon(split(model)[0])
    offload_optimizer_state(muon)
    with pytest.raises(FSDPNotImplementedError, match="whose state is offloaded"):
        step_on_owners(muon)
    with pytest.raises(FSDPNotImplementedError, match="state 'rows' of parameter"):
        step_on_owners(Factored(split(model)[0]))


@multi_rank(2)
def test_between_a_forward_and_its_backward_it_is_noticed() -> None:
    model = sharded(USED_NET, reshard_after_forward=True)
    muon = optimizers_of(model)[0]
    loss_on(USED_NET, model, 0, dist.get_rank()).backward()
    loss = loss_on(USED_NET, model, 1, dist.get_rank())
    step_on_owners(muon)
    with pytest.raises(FSDPRuntimeError, match="were changed between a forward and its backward"):
        loss.backward()
