"""A model of DTensors on the whole SPMD mesh, how `dp_mesh_dims` shards it, and its training beside the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor

from tests.harness.compare import Tolerance
from tests.harness.models import Batch, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.programs import train

PARTIAL_SUMS = Tolerance(rtol=1e-4, atol=1e-6, reason="tensor parallelism splits sums of the matrix products")


class TwoLayers(nn.Module):
    """Two linears without biases; tensor parallelism would cut the first by rows, the second by columns."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden, bias=False)
        self.down = nn.Linear(hidden, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def _vectors(generator: torch.Generator) -> Batch:
    return Batch(torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator))


EVEN = ModelCase("even", TwoLayers, _vectors, ("up",), F.mse_loss)

UNEVEN = ModelCase("uneven", partial(TwoLayers, 6), _vectors, ("up",), F.mse_loss)


def spmd_mesh(**axes: int) -> DeviceMesh:
    """A mesh with these axes, in this order."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parameters become DTensors on the whole mesh: replicated on all axes but ``tp``."""

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            dim = 0 if name == "up" else 1
            placements = [Shard(dim) if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names or ()]
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))

    return distribute_module(model, mesh, partition_fn=partition)


def sharded(case: ModelCase, mesh: DeviceMesh, *, seed: int = 0, dims: dict[str, Any], **options: Any) -> Any:
    """``case``'s model on ``mesh``, sharded as ``dims`` say."""
    model = distribute(case.build(seed), mesh)
    for unit in case.units(model):
        API.fully_shard(unit, mesh=mesh, dp_mesh_dims=API.DataParallelMeshDims(**dims), **options)
    return model


def data_placements(mesh: DeviceMesh) -> list[Placement]:
    """The batch is cut over every data parallel axis."""
    return [Replicate() if axis == "tp" else Shard(0) for axis in mesh.mesh_dim_names or ()]


def spmd_loss(mesh: DeviceMesh, model: nn.Module, batch: Batch) -> Tensor:
    """This rank's loss, of its own part of the batch."""
    inputs = DTensor.from_local(batch.inputs, mesh, data_placements(mesh), run_check=False)
    output = model(inputs).redistribute(placements=data_placements(mesh)).to_local()
    return F.mse_loss(output, batch.targets)


def train_spmd(case: ModelCase, model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Beside the reference, over as many data parallel ranks as the mesh has."""
    tensor_parallel_size = mesh["tp"].size() if "tp" in (mesh.mesh_dim_names or ()) else 1
    rank = dist.get_rank() // tensor_parallel_size if (mesh.mesh_dim_names or ())[-1] == "tp" else dist.get_rank()
    train(
        case,
        model,
        world_size=dist.get_world_size() // tensor_parallel_size,
        rank=rank,
        loss=partial(spmd_loss, mesh),
        **{"tolerance": PARTIAL_SUMS, **options},
    )
