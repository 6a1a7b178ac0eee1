"""Parameters that stay unsharded are gathered again after a step, group by group, where no version counts the writes.

Foreach, fused and flat steps leave the version counters of DTensors as they are, so it is the groups' `WriteCounter`
that tells. A gather of one group says nothing of another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2 import CPUOffloadPolicy, FSDPMeshInfo, FSDPModule, ShardPlacementResult, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_same, full_parameters
from tests.harness.shared.ways import hybrid

STEPS = 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def stepped(model: nn.Module, parts: list[list[nn.Parameter]], rank: int | None) -> None:
    """``rank``: whose batch; None: all ranks', as one."""
    optimizers = [torch.optim.SGD(part, lr=0.1, foreach=True) for part in parts]
    for step in range(STEPS):
        batch = torch.randn(dist.get_world_size(), 8, generator=torch.Generator().manual_seed(step))
        model(batch if rank is None else batch[rank : rank + 1]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_trained(model: nn.Module, plain: nn.Module) -> None:
    stepped(plain, [list(plain.parameters())], None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert_same("parameters", full_parameters(model), expected, tolerance=SUM_ORDER)


@pytest.mark.full
@multi_rank(4)
def test_groups_of_one_call_on_two_meshes() -> None:
    whole = FSDPMeshInfo(init_device_mesh("cpu", (4,)), shard_mesh_dim=0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build()
    last = set(model[2].parameters())
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=False,
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), whole) if p in last else None,
    )
    model.set_reshard_after_backward(False)
    stepped(model, [list(model[0].parameters()), list(model[2].parameters())], dist.get_rank())
    assert_trained(model, build())


@pytest.mark.full
@multi_rank(2)
def test_a_copy_of_weights_tied_across_calls() -> None:
    model, plain = build(), build()
    for each in (model, plain):
        each[2].weight = each[0].weight
    for module in (model[0], model[2], model):
        fully_shard(module, reshard_after_forward=False)
    model = copy.deepcopy(model)
    model.set_reshard_after_backward(False)
    stepped(model, [list(model.parameters())], dist.get_rank())
    assert_trained(model, plain)


# ---- what programs write -------------------------------------------------------------------------


WRITES: dict[str, Callable[[Any], object]] = {
    "itself": lambda parameter: parameter.add_(1),
    "detached": lambda parameter: parameter.detach().mul_(2),
    "its local tensor": lambda parameter: parameter.to_local().add_(1),
    "by data its local tensor": lambda parameter: parameter.data.to_local().mul_(2),
    "local tensors together": lambda parameter: torch._foreach_add_([parameter.to_local()], 1.0),
}

OPTIONS = [
    {"reshard_after_forward": False}, {"strategy": "zero1"}, {"strategy": "zero2"}, {},
    {"offload_policy": CPUOffloadPolicy(), "reshard_after_forward": False},
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("write", WRITES)
@multi_rank(2, 4)
def test_weights_written_between_two_evaluations(write: str, replicas: bool, options: dict[str, Any]) -> None:
    """A program has kept the sharded parameters."""
    model = build()
    for unit in (model[0], model[2], model):
        fully_shard(unit, **options, **(hybrid() if replicas else {}))
    kept = list(model.parameters())
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with torch.no_grad():
            model(x)
            for parameter in kept:
                WRITES[write](parameter)
            plain = build()
            for parameter, other in zip(kept, plain.parameters(), strict=True):
                other.copy_(parameter.full_tensor())  # type: ignore[attr-defined]
            assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("write", WRITES)
@multi_rank(2)
def test_a_write_between_a_forward_and_its_backward_is_an_error(write: str) -> None:
    model = build()
    for unit in (model[0], model):
        fully_shard(unit)
    kept = list(model.parameters())
    loss = model(torch.randn(2, 8)).square().mean()
    with torch.no_grad():
        for parameter in kept:
            WRITES[write](parameter)
    with pytest.raises(RuntimeError, match="between a forward and its backward"):
        loss.backward()
