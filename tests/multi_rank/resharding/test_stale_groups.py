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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2 import CPUOffloadPolicy, FSDPMeshInfo, FSDPModule, ShardPlacementResult, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_same, full_parameters

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


def to_the_parameter(parameter: Tensor) -> None:
    parameter.add_(1)


def to_a_detached_view(parameter: Tensor) -> None:
    parameter.detach().mul_(2)


def to_the_local_tensor(parameter: Tensor) -> None:
    parameter.to_local().add_(1)  # type: ignore[attr-defined]


def through_data_to_the_local_tensor(parameter: Tensor) -> None:
    parameter.data.to_local().mul_(2)  # type: ignore[attr-defined]


def to_local_tensors_together(parameter: Tensor) -> None:
    torch._foreach_add_([parameter.to_local()], 1.0)  # type: ignore[attr-defined]


WRITES = pytest.mark.parametrize(
    "write",
    [
        to_the_parameter,
        to_a_detached_view,
        to_the_local_tensor,
        through_data_to_the_local_tensor,
        to_local_tensors_together,
    ],
)


def assert_evaluates_what_was_written(write: Callable[[Tensor], None], **options: Any) -> None:
    """Two evaluations, of which the second is of other weights: a program has kept the sharded parameters."""
    model = build()
    for unit in (model[0], model[2], model):
        fully_shard(unit, **options)
    kept = list(model.parameters())
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with torch.no_grad():
            model(x)
            for parameter in kept:
                write(parameter)
            plain = build()
            for parameter, other in zip(kept, plain.parameters(), strict=True):
                other.copy_(parameter.full_tensor())  # type: ignore[attr-defined]
            assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": False}, {"strategy": "zero1"}, {"strategy": "zero2"}, {}], ids=str
)
@WRITES
@multi_rank(2, 4)
def test_weights_written_between_two_evaluations(write: Callable[[Tensor], None], options: dict[str, Any]) -> None:
    assert_evaluates_what_was_written(write, **options)


@WRITES
@multi_rank(2)
def test_the_same_of_offloaded_ones(write: Callable[[Tensor], None]) -> None:
    options = {"offload_policy": CPUOffloadPolicy(), "reshard_after_forward": False}
    assert_evaluates_what_was_written(write, **options)


@WRITES
@multi_rank(4)
def test_the_same_over_replicas_of_shards(write: Callable[[Tensor], None]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert_evaluates_what_was_written(write, mesh=mesh, reshard_after_forward=False)


@WRITES
@multi_rank(2)
def test_a_write_between_a_forward_and_its_backward_is_an_error(write: Callable[[Tensor], None]) -> None:
    model = build()
    for unit in (model[0], model):
        fully_shard(unit)
    kept = list(model.parameters())
    loss = model(torch.randn(2, 8)).square().mean()
    with torch.no_grad():
        for parameter in kept:
            write(parameter)
    with pytest.raises(RuntimeError, match="between a forward and its backward"):
        loss.backward()
