"""`fully_shard` called again: equal arguments change nothing, others are an error that names the one that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPValueError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from fsdp2.core.state import state_of
from tests.harness import multi_rank
from tests.harness.compare import tolerance_for
from tests.harness.models import TRANSFORMER, UNEVEN_MLP
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import shard
from tests.harness.training import assert_trains_like


def by_rows(parameter: nn.Parameter) -> Shard:
    return Shard(0)


def by_rows_too(parameter: nn.Parameter) -> Shard:
    return Shard(0)


def arguments(world_size: int) -> dict[str, tuple[Any, Any, Any]]:
    """Per argument: what is passed first, an equal value, and another."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "mesh": (None, init_device_mesh("cpu", (world_size,)), mesh),
        "reshard_after_forward": (True, world_size, False),
        "shard_placement_fn": (by_rows, by_rows, by_rows_too),
        "mp_policy": (policy, MixedPrecisionPolicy(param_dtype=torch.bfloat16), MixedPrecisionPolicy()),
        "offload_policy": (OffloadPolicy(), OffloadPolicy(), CPUOffloadPolicy()),
    }


@multi_rank(2, 4)
@pytest.mark.parametrize("name", ["mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy"])
def test_another_argument_is_named(name: str, world_size: int) -> None:
    first, equal, other = arguments(world_size)[name]
    model = UNEVEN_MLP.build()
    assert fully_shard(model, **{name: first}) is model
    state = state_of(model)
    assert fully_shard(model, **{name: first}) is model
    assert fully_shard(model, **{name: equal}) is model
    with pytest.raises(FSDPValueError, match=f"already called on this Sequential with another argument '{name}'"):
        fully_shard(model, **{name: other})
    assert state_of(model) is state


@multi_rank(4)
def test_other_dims_of_the_same_mesh() -> None:
    model = UNEVEN_MLP.build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    assert fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))) is model
    with pytest.raises(FSDPValueError, match="'dp_mesh_dims'"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shard", replicate="replicate"))


@multi_rank(2)
def test_ignored_parameters() -> None:
    model = UNEVEN_MLP.build()
    ignored = {model[0].bias}
    fully_shard(model, ignored_params=ignored)
    assert fully_shard(model, ignored_params=[model[0].bias]) is model
    with pytest.raises(FSDPValueError, match="'ignored_params': 1 parameters before, 0 parameters now"):
        fully_shard(model)


@multi_rank(2, 4)
def test_equal_arguments_change_nothing(world_size: int) -> None:
    """Before the first forward, and while training: the same parameters, state and hooks, and the same gradients."""
    model = shard(TRANSFORMER)
    parameters = list(model.parameters())
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    shard(TRANSFORMER, model)
    optimizer = adamw(parameters)
    reference = Reference(TRANSFORMER, world_size=world_size)
    tolerance = tolerance_for(world_size)
    again = lambda _: shard(TRANSFORMER, model)  # noqa: E731
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance, before_forward=again)
    assert all(before is now for before, now in zip(parameters, model.parameters(), strict=True))
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@multi_rank(2)
def test_lists() -> None:
    model = UNEVEN_MLP.build()
    modules = [model[0], model[2]]
    assert fully_shard(modules) is modules
    assert fully_shard(modules[::-1]) == modules[::-1]
    for others in (model[0], [model[0], model[4]], [model[0], model[2], model[4]]):
        with pytest.raises(FSDPValueError, match=r"another argument 'module': on \(Linear, Linear\)"):
            fully_shard(others)
    with pytest.raises(FSDPValueError, match="another argument 'reshard_after_forward'"):
        fully_shard(modules, reshard_after_forward=True)
