"""Graphs over replicas and beside tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard, set_graph_capture
from tests.compiled.helpers.models import (
    WIDTH,
    batch_of,
    build,
    build_parallel,
    by_blocks,
    loss_of,
    multi_rank,
    parallelized,
    shard,
    whole,
)
from tests.compiled.helpers.twins import assert_trains_alike, compiling, one_backward
from tests.harness.parity.implementation import installed_from
from tests.harness.parity.spmd import TwoLayers, data_placements, distribute, spmd_mesh


def step_of(mesh: DeviceMesh) -> Any:
    """Ranks of one tensor-parallel group have the same batch."""
    replicas = mesh.size() // mesh["tp"].size()

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        loss = loss_of(model(batch_of(number, rank * replicas // mesh.size())))
        loss.backward()
        return [loss.detach()]

    return step


# Full: DTensor makes a trace several times as long, 20 s each.
@multi_rank(4)
@pytest.mark.full
@pytest.mark.parametrize("compile", [whole, by_blocks])
@pytest.mark.parametrize("hidden", [12, 10])
def test_beside_tensor_parallelism(compile: Any, hidden: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def shard_parallel(model: nn.Module) -> None:
        parallelized(model, mesh["tp"])
        shard(model, mesh=mesh["dp"])

    with compiling() as graphs:
        assert_trains_alike(graphs, lambda: build_parallel(hidden), shard_parallel, step_of(mesh), compile=compile)
        if compile is whole:
            assert len(graphs.forward) == len(graphs.backward) == 1


@multi_rank(4)
@pytest.mark.full  # 10 s each
@pytest.mark.parametrize("mp_policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
def test_hooks_outside_of_graphs_beside_tensor_parallelism(mp_policy: MixedPrecisionPolicy) -> None:
    """Graphs take unsharded DTensors, which lie at offsets in one buffer; the modules have their own after it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def shard_parallel(model: nn.Module) -> None:
        parallelized(model, mesh["tp"])
        shard(model, mesh=mesh["dp"], mp_policy=mp_policy)
        set_graph_capture(model, False)

    with compiling() as graphs:
        model = assert_trains_alike(
            graphs, lambda: build_parallel(12), shard_parallel, step_of(mesh), compile=by_blocks
        )
        assert set(graphs.collectives()) == {(0, 0)}
        made = len(graphs.forward)
        model.unshard()
        held = {name: parameter for name, parameter in model.named_parameters()}
        model(batch_of(0, 0))
        model.unshard()
        assert all(held[name] is parameter for name, parameter in model.named_parameters())
        assert len(graphs.forward) == made, "compiled again"


@multi_rank(4)
@pytest.mark.full  # 8 s each
@pytest.mark.parametrize("compile", [whole, by_blocks])
@pytest.mark.parametrize("reshard", [True, False])
def test_over_replicas_in_mixed_precision(compile: Any, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with compiling() as graphs:
        assert_trains_alike(
            graphs,
            build,
            lambda model: shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard),
            one_backward(lambda generator: torch.randn(4, WIDTH, generator=generator)),
            compile=compile,
        )


@multi_rank(2)
@pytest.mark.full  # 6 s each
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_replicas_or_shards_of_one(sizes: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    with compiling() as graphs:
        assert_trains_alike(
            graphs,
            build,
            lambda model: shard(model, mesh=mesh),
            one_backward(lambda generator: torch.randn(4, WIDTH, generator=generator)),
        )
        assert graphs.collectives() == ([(4, 0), (3, 4)] if sizes[1] > 1 else [(0, 0), (0, 0)])


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_a_group_of_one_rank() -> None:
    """Nothing travels, and gradients arrive all the same."""
    import torch.distributed as dist

    mine = [DeviceMesh("cpu", [rank]) for rank in range(2)][dist.get_rank()]
    with compiling() as graphs:
        assert_trains_alike(
            graphs,
            build,
            lambda model: [fully_shard(block, mesh=mine) for block in model.blocks] and fully_shard(model, mesh=mine),
            one_backward(lambda generator: torch.randn(4, WIDTH, generator=generator)),
        )
        assert graphs.collectives() == [(0, 0), (0, 0)]


# Full: DTensor makes a trace several times as long.
@multi_rank(4)
@pytest.mark.full
@installed_from((2, 13), "its DTensor cannot be traced over a mesh of named dims")
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 4}])
def test_on_a_mesh_of_named_dims_hooks_stay_outside(axes: dict[str, int]) -> None:
    """Of a gradient's data-parallel dims a graph does not know whether they are summed already."""
    mesh = spmd_mesh(**axes)

    def build_named() -> nn.Module:
        torch.manual_seed(0)
        return distribute(TwoLayers(), mesh)

    def shard_named(model: nn.Module) -> None:
        for unit in (model.up, model):
            fully_shard(unit, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))

    def inputs(number: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(number * 10 + rank // axes.get("tp", 1))
        return DTensor.from_local(torch.randn(4, 8, generator=generator), mesh, data_placements(mesh), run_check=False)

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        output: Any = model(inputs(number, rank))
        loss = loss_of(output.redistribute(placements=data_placements(mesh)).to_local())
        loss.backward()
        return [loss.detach()]

    def by_layer(model: nn.Module, backend: Any) -> nn.Module:
        model.up.compile(backend=backend, fullgraph=True)
        return model

    with compiling() as graphs:
        model = assert_trains_alike(graphs, build_named, shard_named, step, compile=by_layer)
        assert set(graphs.collectives()) == {(0, 0)}
        with pytest.raises(Exception, match="dp_mesh_dims"):
            whole(model, graphs.backend())(inputs(0, 0))
