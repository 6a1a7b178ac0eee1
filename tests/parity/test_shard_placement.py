"""`shard_placement_fn`: another dim, or another mesh, for single parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from tests.harness import Reference, assert_same, full_parameters, multi_rank
from tests.harness.models import MLP, UNEVEN_MLP
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter
from tests.harness.parity.implementation import API, beyond_torch
from tests.harness.parity.programs import TOWER, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import GATHER, REDUCE, SCATTER, traced
from tests.parity.helpers.experts import EXPERTS, place_experts


def last_dim(parameter: nn.Parameter) -> Shard | None:
    """Of matrices, where it divides evenly."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def negative_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def any_last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def largest_dim(parameter: nn.Parameter) -> Shard:
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


# ---- another dim ---------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("place", [last_dim, negative_dim, largest_dim], ids=lambda each: each.__name__)
def test_another_dim_trains_like_the_unsharded_model(
    place: Callable[[nn.Parameter], Shard | None], world_size: int
) -> None:
    train(MLP, shard(MLP, shard_placement_fn=place))


@multi_rank(2)
@pytest.mark.parametrize("place", [last_dim, negative_dim], ids=lambda each: each.__name__)
def test_local_shards_are_cut_along_the_dim(place: Callable[[nn.Parameter], Shard | None]) -> None:
    model, plain = shard(MLP, shard_placement_fn=place), MLP.build()
    for (name, parameter), original in zip(model.named_parameters(), plain.parameters(), strict=True):
        dim = 1 if original.ndim == 2 else 0
        assert parameter.placements == (Shard(dim),), name
        assert torch.equal(parameter.to_local(), original.chunk(2, dim)[dist.get_rank()])
        assert parameter.to_local().is_contiguous()
    assert_same("parameters", full_parameters(model), {n: p.detach() for n, p in plain.named_parameters()})
    before = list(model.parameters())
    loss_on(MLP, model).backward()
    for parameter, same in zip(model.parameters(), before, strict=True):
        assert parameter is same and parameter.grad.placements == parameter.placements
        assert parameter.grad.to_local().shape == parameter.to_local().shape


@multi_rank(2)
def test_the_function_is_asked_about_each_original_parameter() -> None:
    """By identity: a table from parameters to placements works."""
    model = MLP.build()
    table = {model[0].weight: Shard(1), model[2].weight: None}
    asked: list[nn.Parameter] = []

    def place(parameter: nn.Parameter) -> Shard | None:
        asked.append(parameter)
        return table.get(parameter)

    originals = list(model.parameters())
    API.fully_shard(model, shard_placement_fn=place)
    assert {id(each) for each in asked} == {id(each) for each in originals}
    assert model[0].weight.placements == (Shard(1),)
    assert model[2].weight.placements == (Shard(0),)


@pytest.mark.full
@multi_rank(4)
@beyond_torch("int reshard of a Shard(1) parameter is an IndexError")
def test_another_dim_with_an_int_reshard() -> None:
    train(MLP, shard(MLP, shard_placement_fn=last_dim, reshard_after_forward=2))


@multi_rank(2, 4)
@beyond_torch("NotImplementedError")
def test_uneven_sizes_on_another_dim(world_size: int) -> None:
    train(UNEVEN_MLP, shard(UNEVEN_MLP, shard_placement_fn=any_last_dim))


# ---- another mesh --------------------------------------------------------------------------------


def shard_experts(mesh: DeviceMesh, mesh_info: Any, placement: Shard | None = None, **options: Any) -> Any:
    model = EXPERTS.build()
    place = place_experts(model, mesh_info, placement)
    return shard(EXPERTS, model, mesh=mesh, shard_placement_fn=place, **options)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_some_parameters_use_a_hybrid_mesh(reshard_after_forward: bool | None) -> None:
    """Dense parameters are sharded over four ranks, expert ones over two and replicated."""
    hybrid = mesh_of(2, 2)
    info = API.HSDPMeshInfo(mesh=hybrid, shard_mesh_dim=1, replicate_mesh_dim=0)
    model = shard_experts(mesh_of(4), info, reshard_after_forward=reshard_after_forward)
    for block in model.blocks:
        assert block.dense.weight.placements == (Shard(0),) and block.dense.weight.device_mesh.ndim == 1
        assert block.expert.weight.placements == (Replicate(), Shard(0))
        assert block.expert.weight.device_mesh == hybrid
    train(EXPERTS, model)
    with traced() as trace:
        loss_on(EXPERTS, model).backward()
    pair, replicas = (tuple(dist.get_process_group_ranks(hybrid[axis].get_group())) for axis in ("shard", "replicate"))
    assert {each.ranks for each in trace.of(GATHER)} == {pair, (0, 1, 2, 3)}
    assert {each.ranks for each in trace.of(SCATTER)} == {pair, (0, 1, 2, 3)}
    assert {each.ranks for each in trace.of(REDUCE)} == {replicas}


@pytest.mark.full
@multi_rank(4)
def test_some_parameters_use_a_smaller_mesh() -> None:
    """As expert parallelism does: their gradients are averaged over that mesh alone."""
    mesh = mesh_of(2, 2, names=("outer", "inner"))
    info = API.FSDPMeshInfo(mesh=mesh["inner"], shard_mesh_dim=0)
    model = shard_experts(mesh_of(4), info)
    assert model.blocks[0].expert.weight.to_local().shape[0] == 8
    # Both inner groups see the same data: the average over two ranks is the average over all.
    train(EXPERTS, model, reference=Reference(EXPERTS, world_size=2), rank=dist.get_rank() % 2, world_size=4)


@pytest.mark.full
@multi_rank(4)
def test_a_placement_and_a_mesh_at_once() -> None:
    hybrid = mesh_of(2, 2)
    info = API.HSDPMeshInfo(mesh=hybrid, shard_mesh_dim=1, replicate_mesh_dim=0)
    model = EXPERTS.build()
    experts = {parameter for name, parameter in model.named_parameters() if "expert" in name}

    def place(parameter: nn.Parameter) -> Any:
        if parameter in experts and parameter.ndim == 2:
            return API.ShardPlacementResult(placement=Shard(1), mesh_info=info)
        return None

    shard(EXPERTS, model, mesh=mesh_of(4), shard_placement_fn=place)
    assert model.blocks[0].expert.weight.placements == (Replicate(), Shard(1))
    assert model.blocks[0].expert.bias.placements == (Shard(0),)
    train(EXPERTS, model)


@pytest.mark.full
@multi_rank(4)
def test_a_result_with_the_given_mesh_is_as_none() -> None:
    info = API.FSDPMeshInfo(mesh=mesh_of(4), shard_mesh_dim=0)
    model = TOWER.build()
    result = API.ShardPlacementResult(placement=None, mesh_info=info)
    for unit in TOWER.units(model):
        API.fully_shard(unit, mesh=info.mesh, shard_placement_fn=lambda parameter: result)
    assert all(parameter.placements == (Shard(0),) for parameter in model.parameters())
    train(TOWER, model)


@multi_rank(4)
@pytest.mark.parametrize("method", ["set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"])
def test_what_is_ambiguous_over_several_meshes_is_refused(method: str) -> None:
    info = API.HSDPMeshInfo(mesh=mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    model = shard_experts(mesh_of(4), info)
    values = {
        "set_custom_all_gather": custom_all_gather([]),
        "set_custom_reduce_scatter": custom_reduce_scatter([]),
        "set_all_reduce_hook": lambda output: None,
    }
    with pytest.raises(ValueError, match=method):
        getattr(model.blocks[0], method)(values[method])


@pytest.mark.full
@multi_rank(4)
def test_mesh_infos_tell_sizes_and_groups() -> None:
    mesh = mesh_of(2, 2)
    info = API.HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    assert isinstance(info, API.FSDPMeshInfo) and isinstance(info, API.DDPMeshInfo)
    assert (info.shard_mesh_size, info.replicate_mesh_size) == (2, 2)
    assert (info.shard_mesh_rank, info.replicate_mesh_rank) == (dist.get_rank() % 2, dist.get_rank() // 2)
    assert info.shard_process_group == mesh["shard"].get_group()
    assert info.replicate_process_group == mesh["replicate"].get_group()
    flat = API.FSDPMeshInfo(mesh=mesh_of(4), shard_mesh_dim=0)
    assert (flat.shard_mesh_size, flat.shard_mesh_rank) == (4, dist.get_rank())
    assert not isinstance(flat, API.DDPMeshInfo)


# ---- mistakes ------------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize("result", [0, "Shard(0)", Replicate()], ids=["int", "str", "replicate"])
def test_anything_else_as_a_result_is_refused(result: Any) -> None:
    with pytest.raises(ValueError, match="shard_placement_fn"):
        API.fully_shard(MLP.build(), shard_placement_fn=lambda parameter: result)


@multi_rank(2)
def test_a_dim_that_the_parameter_does_not_have_is_refused() -> None:
    with pytest.raises((ValueError, AssertionError, IndexError), match="dim"):
        API.fully_shard(MLP.build(), shard_placement_fn=lambda parameter: Shard(2))
