"""Clipping: over which process groups data is spread, and what is dispatched and sent, counted on simulated ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import FSDPValueError, clip_grad_norm_, fully_shard, get_total_norm
from fsdp2.core.sharding import reduction_groups_of
from tests.harness import FakeWorlds, fake_world

AXES = {"replicate": (1, 5), "shard": (1, 3), "tp": (0, 1)}
"""Of a mesh (2, 2, 2): the ranks that rank 1 meets in each dim."""


@pytest.mark.parametrize(
    ("placements", "axes"),
    [
        ((Replicate(), Replicate(), Replicate()), []),
        ((Replicate(), Shard(0), Replicate()), ["shard"]),
        ((Replicate(), _StridedShard(0, split_factor=2), Shard(0)), ["shard", "tp"]),
        ((Shard(0), Shard(1), Shard(0)), ["replicate", "shard", "tp"]),
        ((Replicate(), Replicate(), Shard(1)), ["tp"]),
    ],
    ids=str,
)
@fake_world(8, rank=1)
def test_what_is_cut_is_spread(placements: tuple[Placement, ...], axes: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=tuple(AXES))
    assert [group.ranks for group in reduction_groups_of(mesh, placements, "it")] == [AXES[name] for name in axes]


@fake_world(8, rank=1)
def test_unknown_placements_are_spread_and_axes_of_one_rank_are_not() -> None:
    class OnOneRank(Placement):
        """As of a parameter that lies whole on one rank, its owner."""

    mesh = init_device_mesh("cpu", (8, 1))
    (group,) = reduction_groups_of(mesh, (OnOneRank(), Shard(0)), "it")
    assert group.ranks == tuple(range(8)) and group.device == torch.device("cpu")


@fake_world(8)
def test_partial_values_have_no_norm() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    gradient = DTensor.from_local(torch.ones(3), mesh, [Replicate(), Partial()], run_check=False)
    with pytest.raises(
        FSDPValueError, match=r"parameter number 1 of those passed, of shape \(3,\) has placement Parti"
    ):
        get_total_norm([torch.ones(2), gradient])


def test_a_mesh_without_this_rank(simulate: FakeWorlds) -> None:
    simulate(4, rank=3)
    mesh = init_device_mesh("cpu", (4,))
    elsewhere = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    parameter = DTensor.from_local(torch.ones(3), elsewhere, [Shard(0)], run_check=False, shape=(6,), stride=(1,))
    with pytest.raises(FSDPValueError, match=r"rank 3 is not part of\. Pass the parameters of this rank only"):
        clip_grad_norm_([parameter], 1.0, mesh=mesh)
    with pytest.raises(FSDPValueError, match="rank 3 is not on"):
        clip_grad_norm_([], 1.0, mesh=elsewhere)


class Dispatched(TorchDispatchMode):
    """Counts operations by name, and those whose tensors are DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.on_dtensors = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations[str(func)] += 1
        self.on_dtensors += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def model_with_gradients(layers: int) -> nn.Module:
    """Of two linears for each of ``layers``, sharded over all ranks."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 * layers)))
    fully_shard(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@fake_world(4)
def test_operations_do_not_grow_with_the_number_of_parameters(norm_type: float) -> None:
    counts = []
    for layers in (1, 16):
        model = model_with_gradients(layers)
        with Dispatched() as dispatched:
            clip_grad_norm_(model.parameters(), 1.0, norm_type)
        assert dispatched.on_dtensors == 0
        assert dispatched.operations["aten._foreach_norm.Scalar"] == 1
        assert dispatched.operations["aten._foreach_mul_.Tensor"] == 1
        counts.append(dispatched.operations)
    assert counts[0] == counts[1] and counts[0].total() < 30, counts[0]


@fake_world(4)
def test_communication_does_not_grow_either() -> None:
    for layers in (1, 16):
        model = model_with_gradients(layers)
        with CommDebugMode() as seen:
            clip_grad_norm_(model.parameters(), 1.0)
        assert seen.get_total_counts() == 1


@fake_world(8)
def test_a_replicated_mesh_communicates_nothing() -> None:
    mesh = init_device_mesh("cpu", (8,))
    parameter = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False).requires_grad_()
    parameter.grad = torch.ones_like(parameter)
    with CommDebugMode() as seen:
        norm: Tensor = clip_grad_norm_([parameter, nn.Parameter(torch.ones(2))], 1.0)
    assert seen.get_total_counts() == 0 and torch.allclose(norm, torch.tensor(3.0).sqrt())
