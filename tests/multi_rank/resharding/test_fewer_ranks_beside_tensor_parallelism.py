"""`reshard_after_forward` as an int where the data-parallel mesh is a slice of a larger one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import DataParallelMeshDims, FSDPNotImplementedError, fully_shard
from tests.harness import fake_world, multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of, parameters_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(3)))


def parallelized(model: Any, mesh: DeviceMesh) -> Any:
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def shard(model: Any, **options: Any) -> Any:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Any, *, rank: int) -> None:
    """On four data-parallel ranks."""
    plain = build()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step in range(3):
        model(data(step, rank)).square().mean().backward()
        for each in range(4):
            (plain(data(step, each)).square().mean() / 4).backward()
        assert_sharded_same(f"gradients in step {step}", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_sharded_same("parameters", parameters_of(model), parameters_of(plain), tolerance=SUM_ORDER)


@pytest.mark.full  # 8 ranks, 20 s
@multi_rank(8, timeout=180)
@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallelism_over_two_and_neighbours_of_four(dim: int) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(build(), mesh["tp"])
    place = lambda parameter: Shard(dim if parameter.dim() > dim else 0)  # noqa: E731
    shard(model, mesh=mesh["dp"], reshard_after_forward=2, shard_placement_fn=place)
    rank = mesh.get_local_rank("dp")
    loss = model(data(0, rank)).square().mean()
    for block, plain in zip(model, build(), strict=True):
        for name, parameter in plain.named_parameters():
            rests: Any = block.get_parameter(name)
            assert isinstance(rests, DTensor) and rests.placements[0] == Replicate()
            assert torch.equal(rests.full_tensor(), parameter.detach())
    loss.backward()
    model.zero_grad()
    train(model, rank=rank)


def compare_on_an_spmd_mesh(model: Any, mesh: DeviceMesh, own: list[Placement], rank: int) -> None:
    """Gradients; ``own``: how the batches of four data-parallel ranks lie."""
    plain = build()
    x = DTensor.from_local(data(0, rank), mesh, own, run_check=False)
    model(x).redistribute(placements=own).to_local().square().mean().backward()
    for each in range(4):
        (plain(data(0, each)).square().mean() / 4).backward()
    assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)


@pytest.mark.full  # 8 ranks, 15 s
@multi_rank(8, timeout=180)
def test_on_a_named_dim_of_an_spmd_mesh() -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = distribute_module(build(), mesh)
    for block in model:
        up = distribute_tensor(block.up.weight.detach().full_tensor(), mesh, [Replicate(), Shard(0)])
        block.up.weight = nn.Parameter(up)
    shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), reshard_after_forward=2)
    compare_on_an_spmd_mesh(model, mesh, [Shard(0), Replicate()], mesh.get_local_rank("dp"))


def test_neighbours_in_every_slice() -> None:
    for rank in range(8):
        with fake_world(8, rank):
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            model = shard(build(), mesh=mesh["dp"], reshard_after_forward=2)
            model(data(0, 0))
            rests: Any = model[0].up.weight
            ranks = rests.device_mesh.mesh.tolist()
            assert ranks == [[rank % 2, 2 + rank % 2], [4 + rank % 2, 6 + rank % 2]]
            assert rests.placements == (Replicate(), Shard(0)) and rests.to_local().shape == (6, WIDTH)


def test_flattened_dims_are_refused() -> None:
    with fake_world(8, 3):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "tp"))
        flattened = mesh["a", "b"]._flatten("dp")
        with pytest.raises(FSDPNotImplementedError, match=r"flattened.*pass True or False"):
            fully_shard(build(), mesh=flattened, reshard_after_forward=2)


@multi_rank(4)
def test_a_dim_flattened_from_the_whole_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = distribute_module(build(), mesh)
    shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("a", "b")), reshard_after_forward=2)
    compare_on_an_spmd_mesh(model, mesh, [Shard(0), Shard(0)], dist.get_rank())
