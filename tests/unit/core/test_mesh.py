"""From meshes to process groups: what a mesh is taken for on every rank, and which meshes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import DDPMeshInfo, FSDPMeshInfo, FSDPTypeError, FSDPValueError, HSDPMeshInfo
from fsdp2.core.mesh import DataParallelMesh, DataParallelMeshInfo, mesh_info
from fsdp2.core.options import DataParallelMeshDims
from fsdp2.plugs.memory.reshard_to_fewer import smaller_mesh
from tests.harness import fake_world
from tests.unit.helpers import for_each


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def ranks_of(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def data_parallel(mesh: DeviceMesh, **dims: Any) -> DataParallelMesh:
    return DataParallelMesh.from_info(mesh_info(mesh, DataParallelMeshDims(**dims) if dims else None))


# ---- what a mesh is taken for ---------------------------------------------------------------------------------------


@for_each("rank", range(8))
def test_one_dim_shards_and_two_replicate_and_shard(rank: int) -> None:
    with fake_world(8, rank):
        flat = data_parallel(mesh_of(shard=8))
        assert (ranks_of(flat.shard_group), flat.shard_size, flat.shard_rank) == (list(range(8)), 8, rank)
        assert (flat.replicate_group, flat.replicate_size) == (None, 1)
        both = data_parallel(mesh_of(replicate=2, shard=4))
        first = rank - rank % 4
        assert (ranks_of(both.shard_group), both.shard_size, both.shard_rank) == (
            [first + each for each in range(4)],
            4,
            rank % 4,
        )
        assert (ranks_of(both.replicate_group), both.replicate_size) == ([rank % 4, rank % 4 + 4], 2)
        assert both.shard_mesh.mesh.tolist() == ranks_of(both.shard_group)


@for_each("rank", range(8))
def test_named_dims_are_found_wherever_they_are(rank: int) -> None:
    with fake_world(8, rank):
        mesh = mesh_of(a=2, tp=2, b=2)
        a, tp, b = (mesh.get_local_rank(name) for name in ("a", "tp", "b"))
        sharded = data_parallel(mesh, shard="b")
        assert (sharded.shard_size, sharded.shard_rank, sharded.replicate_group) == (2, b, None)
        replicated = data_parallel(mesh, replicate="a")
        assert (replicated.shard_group, replicated.shard_size, replicated.shard_rank, replicated.replicate_size) == (
            None,
            1,
            0,
            2,
        )
        both = data_parallel(mesh, shard="b", replicate="a")
        assert (both.shard_rank, both.shard_size, both.replicate_size) == (b, 2, 2)
        assert ranks_of(both.replicate_group) == [2 * tp + b, 4 + 2 * tp + b]
        flattened = data_parallel(mesh, shard=("a", "b"))
        assert (flattened.shard_size, flattened.shard_rank, flattened.replicate_group) == (4, 2 * a + b, None)
        assert ranks_of(flattened.shard_group) == [4 * i + 2 * tp + j for i in range(2) for j in range(2)]
        for found in (sharded, replicated, both, flattened):
            assert found.spmd_mesh is mesh and found.dims is not None


def test_meshes_with_the_same_ranks_communicate_together() -> None:
    with fake_world(4, 1):
        mesh = mesh_of(replicate=2, shard=2)
        assert data_parallel(mesh).key == data_parallel(mesh).key
        assert data_parallel(mesh).key != data_parallel(mesh["shard"]).key


@for_each("rank", range(8))
def test_neighbours_lie_within_the_ranks_that_shard(rank: int) -> None:
    with fake_world(8, rank):
        for mesh in (data_parallel(mesh_of(shard=8)), data_parallel(mesh_of(replicate=2, shard=4))):
            pairs = smaller_mesh(mesh, 2)
            assert (ranks_of(pairs.shard_group), pairs.shard_size, pairs.shard_rank) == (
                [rank - rank % 2, rank - rank % 2 + 1],
                2,
                rank % 2,
            )
            assert pairs.shard_rank == mesh.shard_rank % 2, "a neighbour holds the part next to this one's"
            assert smaller_mesh(mesh, 2).device_mesh is pairs.device_mesh, "process groups are made once"


# ---- what is refused ------------------------------------------------------------------------------------------------


@for_each("mesh", [None, "cpu", 4, [0, 1]])
def test_something_else_than_a_mesh(mesh: Any) -> None:
    with pytest.raises(FSDPTypeError, match=r"mesh must be a DeviceMesh, got .*init_device_mesh"):
        mesh_info(mesh)


def test_two_dims_without_names() -> None:
    with fake_world(4), pytest.raises(FSDPValueError, match=r"\(replicate, shard\) needs names: init_device_mesh"):
        mesh_info(init_device_mesh("cpu", (2, 2)))


@pytest.mark.parametrize("dims", [{}, {"shard": "a"}], ids=["whole", "named"])
def test_a_rank_that_is_no_part_of_the_mesh(dims: dict[str, str]) -> None:
    with fake_world(4, 3):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",))
        with pytest.raises(FSDPValueError, match=r"rank 3 is not part of.*only on the ranks of its mesh"):
            data_parallel(mesh, **dims)


@for_each(
    ("dims", "message"),
    [
        ({"shard": "c"}, r"names 'c', but the mesh has the dims \('a', 'b'\)"),
        ({"replicate": ("a", "c")}, r"names 'c', but the mesh has the dims \('a', 'b'\)"),
        ({"shard": "a", "replicate": "a"}, "names a dim twice.*either shards or replicates"),
        ({"shard": ("a", "a")}, "names a dim twice"),
    ],
)
def test_names_that_do_not_fit(dims: dict[str, Any], message: str) -> None:
    with fake_world(4):
        mesh = mesh_of(a=2, b=2)
        with pytest.raises(FSDPValueError, match=message):
            data_parallel(mesh, **dims)


def test_named_dims_of_a_mesh_without_names() -> None:
    with fake_world(4), pytest.raises(FSDPValueError, match="has no mesh_dim_names"):
        data_parallel(init_device_mesh("cpu", (4,)), shard="a")


@for_each("dims", ["a", ("a",), {"shard": "a"}])
def test_named_dims_of_another_type(dims: Any) -> None:
    with fake_world(4):
        mesh = mesh_of(a=4)
        with pytest.raises(FSDPTypeError, match="dp_mesh_dims must be a DataParallelMeshDims"):
            mesh_info(mesh, dims)


def test_mesh_infos_say_what_they_need() -> None:
    with fake_world(4):
        mesh = mesh_of(a=2, b=2)
        with pytest.raises(FSDPValueError, match="DataParallelMeshInfo needs at least one of"):
            DataParallelMeshInfo(mesh)
        with pytest.raises(FSDPValueError, match="FSDPMeshInfo needs shard_mesh_dim"):
            FSDPMeshInfo(mesh["a"], replicate_mesh_dim=0)
        with pytest.raises(FSDPValueError, match="DDPMeshInfo needs replicate_mesh_dim"):
            DDPMeshInfo(mesh["a"], shard_mesh_dim=0)
        for dims in ({"shard_mesh_dim": 1}, {"replicate_mesh_dim": 0}):
            with pytest.raises(FSDPValueError, match=r"needs (shard|replicate)_mesh_dim"):
                HSDPMeshInfo(mesh, **dims)
        with pytest.raises(FSDPValueError, match="HSDPMeshInfo needs at least one of"):
            HSDPMeshInfo(mesh)


def test_a_mesh_info_of_other_dims_is_refused() -> None:
    """DTensors are placed as (replicate, shard): for another order they would say something else than what is held."""
    with fake_world(4):
        mesh = mesh_of(a=2, b=2)
        for info in (
            HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1),
            FSDPMeshInfo(mesh, shard_mesh_dim=0),
            FSDPMeshInfo(mesh, shard_mesh_dim=1),
            DDPMeshInfo(mesh, replicate_mesh_dim=0),
        ):
            with pytest.raises(FSDPValueError):
                DataParallelMesh.from_info(info)
