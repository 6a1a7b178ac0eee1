"""Beside torch's two `replicate`s, which know other composable functions by a registry on the modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate import replicate as replicate_with_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, FSDPValueError, auto_shard, fully_shard, unwrap
from tests.harness import FakeWorlds, Reference, assert_trains_like, multi_rank, tolerance_for
from tests.harness.models import MLP

REPLICATES: dict[str, Callable[..., Any]] = {"ddp": replicate_with_ddp, "fsdp": replicate_with_fsdp}
# Its first iteration records what is used; from the second on it rebuilds its buckets.
STEPS = 3


def replicate(kind: str, module: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
    REPLICATES[kind](module, **({"mesh": mesh} if kind == "fsdp" else {"device_id": torch.device("cpu")}))


def applied(module: nn.Module) -> list[str]:
    return list(_get_registry(module) or ())


def test_a_sharded_module_is_registered_as_torchs_is_until_unwrapped(simulate: FakeWorlds) -> None:
    simulate(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    assert applied(model[0]) == ["fully_shard"] and applied(model) == applied(model[1]) == []
    fully_shard(model)
    for each in (model, copy.deepcopy(model)):
        assert applied(each) == applied(each[0]) == ["fully_shard"] and applied(each[1]) == []
    unwrap(model)
    assert applied(model) == applied(model[0]) == []


@pytest.mark.parametrize("kind", list(REPLICATES))
def test_one_on_the_other_is_refused(simulate: FakeWorlds, kind: str) -> None:
    simulate(2)
    sharded = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(kind, sharded)
    replicated = nn.Linear(4, 4)
    replicate(kind, replicated)
    with pytest.raises(FSDPValueError, match=r"replicate was called on this .*strategy='replicate'"):
        fully_shard(replicated)
    assert not isinstance(replicated, FSDPModule)


@pytest.mark.parametrize("below", [False, True])
def test_what_torchs_own_fully_shard_has_sharded_is_refused(simulate: FakeWorlds, below: bool) -> None:
    simulate(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.distributed.fsdp.fully_shard(model[0])
    where = "'0', a" if below else "this"
    with pytest.raises(FSDPValueError, match=rf"torch's own fully_shard .*{where} FSDPLinear.*import fully"):
        fully_shard(model if below else model[0])
    assert not isinstance(model, FSDPModule)
    fully_shard(model[1])


def test_wrappers_have_no_names_of_what_they_wrap(simulate: FakeWorlds) -> None:
    simulate(2)
    model = nn.Sequential(checkpoint_wrapper(fully_shard(nn.Linear(4, 4))), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    replicated = nn.Linear(4, 4)
    replicate("ddp", replicated)
    fully_shard(nn.Sequential(checkpoint_wrapper(replicated), nn.Linear(4, 4)))
    assert not isinstance(replicated.weight, DTensor)


@multi_rank(2)
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("kind", list(REPLICATES))
def test_replicated_and_sharded_modules_leave_one_another_alone(kind: str, below: bool, world_size: int) -> None:
    model = MLP.build()
    if below:
        replicate(kind, model[0])
    fully_shard(model[2])
    if below:
        fully_shard(model)
    else:
        replicate(kind, model)
    own = {name for name, parameter in model.named_parameters() if hasattr(parameter, "_fsdp_param")}
    assert own == {"2.weight", "2.bias", *(["4.weight", "4.bias"] if below else [])}
    reference = Reference(MLP, world_size=world_size)
    # DTensors of two meshes do not meet in one foreach call.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    assert_trains_like(reference, model, optimizer, steps=STEPS, tolerance=tolerance_for(world_size))


def test_groups_are_not_chosen_in_replicated_submodules(simulate: FakeWorlds) -> None:
    simulate(2)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    replicate("ddp", model[1])
    auto_shard(model, min_bytes=1)
    assert not isinstance(model[1], FSDPModule) and isinstance(model[2], FSDPModule)
