"""`dp_mesh_dims`: parameters that are DTensors on the full SPMD mesh, of which some axes are data parallel.

As documented: parameters are `Replicate()` on every data parallel axis when `fully_shard` is called; `shard` names the
axes to shard on and `replicate` those to replicate on, several of either are flattened into one.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.harness import assert_same, full_parameters, multi_rank
from tests.harness.models import ModelCase
from tests.harness.parity.implementation import API, IS_TORCH
from tests.harness.parity.spmd import (
    EVEN,
    UNEVEN,
    TwoLayers,
    distribute,
    sharded,
    spmd_loss,
    spmd_mesh,
    train_spmd,
)
from tests.harness.parity.trace import GATHER, REDUCE, SCATTER, traced

CASES = pytest.mark.parametrize("case", [EVEN, UNEVEN], ids=str)


# ---- one shard axis ------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@CASES
def test_one_axis_that_is_the_whole_mesh(case: ModelCase, world_size: int) -> None:
    mesh = spmd_mesh(dp=world_size)
    model = sharded(case, mesh, dims={"shard": "dp"})
    assert model.up.weight.placements == (Shard(0),)
    train_spmd(case, model, mesh)


@pytest.mark.full
@multi_rank(4)
@CASES
def test_a_shard_axis_beside_tensor_parallelism(case: ModelCase) -> None:
    mesh = spmd_mesh(dp=2, tp=2)
    model = sharded(case, mesh, dims={"shard": "dp"})
    assert model.up.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert model.down.weight.placements == (Shard(0), Shard(1))
    assert model.up.weight.device_mesh == mesh
    assert_same("parameters", full_parameters(model), {n: p.detach() for n, p in case.build().named_parameters()})
    train_spmd(case, model, mesh)


@multi_rank(4)
def test_names_may_come_as_a_tuple_of_one() -> None:
    mesh = spmd_mesh(dp=2, tp=2)
    model = sharded(EVEN, mesh, dims={"shard": ("dp",)})
    assert model.down.weight.placements == (Shard(0), Shard(1))
    train_spmd(EVEN, model, mesh, steps=2)


@multi_rank(4)
def test_unsharded_parameters_are_dtensors_of_the_whole_mesh() -> None:
    mesh = spmd_mesh(dp=2, tp=2)
    model = sharded(EVEN, mesh, dims={"shard": "dp"})
    model.up.unshard()
    weight = model.up.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(), Shard(0)) and weight.device_mesh == mesh
    model.up.reshard()
    assert model.up.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))


@multi_rank(4)
def test_gradients_are_reduced_once_along_the_data_axis() -> None:
    """Gradients stay partial on it until the reduce-scatter: DTensor does not all-reduce them first."""
    mesh = spmd_mesh(dp=2, tp=2)
    model = sharded(EVEN, mesh, dims={"shard": "dp"})
    batch = EVEN.batch(0, 0, dist.get_rank() // 2)
    spmd_loss(mesh, model, batch).backward()
    with traced() as trace:
        spmd_loss(mesh, model, batch).backward()
    peers = tuple(dist.get_process_group_ranks(mesh["dp"].get_group()))
    assert {each.ranks for kind in (GATHER, SCATTER) for each in trace.of(kind)} == {peers}
    assert len(trace.of(SCATTER)) == 2 and trace.of(REDUCE) == []
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements


# ---- replicate axes ------------------------------------------------------------------------------


@multi_rank(4)
@CASES
def test_hsdp(case: ModelCase) -> None:
    mesh = spmd_mesh(rep=2, dp=2)
    model = sharded(case, mesh, dims={"shard": "dp", "replicate": "rep"})
    assert model.up.weight.placements == (Replicate(), Shard(0))
    assert model.up.weight.device_mesh == mesh
    train_spmd(case, model, mesh)
    with traced() as trace:
        spmd_loss(mesh, model, case.batch(0, 0, dist.get_rank())).backward()
    replicas = tuple(dist.get_process_group_ranks(mesh["rep"].get_group()))
    assert {each.ranks for each in trace.of(REDUCE)} == {replicas} and len(trace.of(REDUCE)) == 2


@pytest.mark.full  # 9 s
@multi_rank(4)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_hsdp_beside_tensor_parallelism(shape: tuple[int, int, int]) -> None:
    mesh = spmd_mesh(rep=shape[0], dp=shape[1], tp=shape[2])
    model = sharded(EVEN, mesh, dims={"shard": "dp", "replicate": "rep"})
    assert model.down.weight.placements == (Replicate(), Shard(0), Shard(1))
    train_spmd(EVEN, model, mesh, steps=2)


@pytest.mark.full
@multi_rank(2, 4)
@CASES
def test_replicate_alone_is_ddp(case: ModelCase, world_size: int) -> None:
    """Nothing is sharded or gathered; gradients are all-reduced."""
    mesh = spmd_mesh(rep=world_size)
    model = sharded(case, mesh, dims={"replicate": "rep"})
    weight = model.up.weight
    assert weight.placements == (Replicate(),) and weight.to_local().shape == weight.shape
    train_spmd(case, model, mesh)
    with traced() as trace:
        spmd_loss(mesh, model, case.batch(0, 0, dist.get_rank())).backward()
    assert trace.of(GATHER) == [] and trace.of(SCATTER) == []
    assert len(trace.of(REDUCE)) == 2
    assert {each.ranks for each in trace.of(REDUCE)} == {tuple(range(world_size))}


@pytest.mark.full
@multi_rank(4)
def test_ddp_beside_tensor_parallelism() -> None:
    mesh = spmd_mesh(rep=2, tp=2)
    model = sharded(EVEN, mesh, dims={"replicate": "rep"})
    assert model.up.weight.placements == (Replicate(), Shard(0))
    train_spmd(EVEN, model, mesh)


# ---- several axes flattened ----------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
@CASES
def test_several_shard_axes_are_flattened_into_one(case: ModelCase) -> None:
    mesh = spmd_mesh(dp=2, cp=2)
    model = sharded(case, mesh, dims={"shard": ("dp", "cp")})
    weight = model.up.weight
    assert weight.placements == (Shard(0),) and weight.device_mesh.shape == (4,)
    chunks = case.build().up.weight.detach().chunk(4)
    rank = dist.get_rank()
    assert torch.equal(weight.to_local(), chunks[rank] if rank < len(chunks) else weight.to_local()[:0])
    train_spmd(case, model, mesh)
    with traced() as trace:
        spmd_loss(mesh, model, case.batch(0, 0, rank)).backward()
    assert {each.ranks for each in trace.of(GATHER)} == {(0, 1, 2, 3)} and trace.of(REDUCE) == []


@multi_rank(4)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_flattened_shard_axes_beside_tensor_parallelism(shape: tuple[int, int, int]) -> None:
    mesh = spmd_mesh(dp=shape[0], cp=shape[1], tp=shape[2])
    model = sharded(EVEN, mesh, dims={"shard": ("dp", "cp")})
    assert model.down.weight.placements == (Shard(0), Shard(1))
    assert model.up.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert model.up.weight.device_mesh.ndim == 2
    train_spmd(EVEN, model, mesh, steps=2)


@pytest.mark.full
@multi_rank(4)
def test_several_replicate_axes_are_flattened_into_one() -> None:
    mesh = spmd_mesh(pods=2, rep=2)
    model = sharded(EVEN, mesh, dims={"replicate": ("pods", "rep")})
    train_spmd(EVEN, model, mesh)
    with traced() as trace:
        spmd_loss(mesh, model, EVEN.batch(0, 0, dist.get_rank())).backward()
    assert {each.ranks for each in trace.of(REDUCE)} == {(0, 1, 2, 3)} and len(trace.of(REDUCE)) == 2


@pytest.mark.full
@multi_rank(4)
def test_flattened_shard_axes_under_replication() -> None:
    mesh = spmd_mesh(rep=2, dp=1, cp=2)
    model = sharded(UNEVEN, mesh, dims={"shard": ("dp", "cp"), "replicate": "rep"})
    assert model.up.weight.placements == (Replicate(), Shard(0))
    train_spmd(UNEVEN, model, mesh)


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
def test_an_int_reshard_is_not_implemented() -> None:
    """By torch's; ours: tests/multi_rank/resharding/test_fewer_ranks_beside_tensor_parallelism.py."""
    with pytest.raises(NotImplementedError, match="reshard_after_forward") if IS_TORCH else nullcontext():
        sharded(EVEN, spmd_mesh(dp=4), dims={"shard": "dp"}, reshard_after_forward=2)


@multi_rank(4)
def test_one_of_the_two_is_required() -> None:
    with pytest.raises(ValueError, match=r"shard.*replicate"):
        API.DataParallelMeshDims()


def test_names_are_given_back_as_tuples() -> None:
    dims = API.DataParallelMeshDims(shard=("dp", "cp"), replicate="rep")
    assert dims.shard == ("dp", "cp") and dims.replicate == "rep"
    assert dims.shard_names == ("dp", "cp") and dims.replicate_names == ("rep",)
    assert API.DataParallelMeshDims(shard="dp").replicate_names == ()
    assert dims == API.DataParallelMeshDims(shard=("dp", "cp"), replicate="rep")


@multi_rank(2)
def test_mistakes_about_the_mesh() -> None:
    mesh, model = spmd_mesh(dp=2), TwoLayers()
    dims = API.DataParallelMeshDims(shard="other")
    with pytest.raises(ValueError, match="other"):
        API.fully_shard(distribute(TwoLayers(), mesh), mesh=mesh, dp_mesh_dims=dims)
    nameless = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="mesh_dim_names"):
        API.fully_shard(model, mesh=nameless, dp_mesh_dims=API.DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match="DTensor"):  # plain parameters
        API.fully_shard(TwoLayers(), mesh=mesh, dp_mesh_dims=API.DataParallelMeshDims(shard="dp"))


@multi_rank(2)
@pytest.mark.parametrize("field", ["shard", "replicate"])
def test_a_parameter_that_is_cut_along_a_data_axis_already(field: str) -> None:
    mesh = spmd_mesh(dp=2)
    model = TwoLayers()
    cut = distribute_tensor(model.up.weight.detach(), mesh, [Shard(0)])
    model.up.weight = nn.Parameter(cut)
    with pytest.raises(ValueError, match="Replicate"):
        API.fully_shard(model.up, mesh=mesh, dp_mesh_dims=API.DataParallelMeshDims(**{field: "dp"}))


@multi_rank(4)
def test_a_parameter_on_another_mesh() -> None:
    model = distribute(TwoLayers(), spmd_mesh(dp=4))
    with pytest.raises(ValueError, match="mesh"):
        API.fully_shard(model, mesh=spmd_mesh(dp=2, tp=2), dp_mesh_dims=API.DataParallelMeshDims(shard="dp"))
