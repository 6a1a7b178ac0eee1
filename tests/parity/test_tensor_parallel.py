"""Tensor parallelism first, then `fully_shard` over the data parallel axis: 2D and 3D sharding of one parameter."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    loss_parallel,
)
from torch.distributed.tensor.placement_types import _StridedShard

from tests.harness import assert_same, full_parameters, multi_rank
from tests.harness.models import Batch, ModelCase
from tests.harness.parity.implementation import IS_TORCH
from tests.harness.parity.language import EVEN, UNEVEN, WIDTH, parallelized, token_loss, train_2d, world
from tests.harness.parity.trace import GATHER, REDUCE, SCATTER, traced

CASES = pytest.mark.parametrize("case", [EVEN, UNEVEN], ids=str)


# ---- placements ----------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
def test_placements_are_those_of_fsdp_and_tensor_parallelism_side_by_side() -> None:
    mesh = world(2, 2)
    parameters = dict(parallelized(EVEN, mesh).named_parameters())
    colwise, rowwise = parameters["blocks.0.feed_forward.up.weight"], parameters["blocks.0.feed_forward.down.weight"]
    assert colwise.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert rowwise.placements == (Shard(0), Shard(1))
    assert parameters["blocks.0.feed_forward.down.bias"].placements == (Shard(0), Replicate())
    assert parameters["blocks.0.norm.weight"].placements == (Shard(0), Replicate())
    assert parameters["embedding.weight"].placements == (_StridedShard(0, split_factor=2), Shard(0))
    for parameter in parameters.values():
        assert parameter.device_mesh.mesh_dim_names == ("dp", "tp")
        assert torch.equal(parameter.device_mesh.mesh, mesh.mesh)
    assert rowwise.to_local().shape == (WIDTH // 2, 16 // 2)
    assert colwise.to_local().shape == (16 // 4, WIDTH)


@pytest.mark.full
@multi_rank(4)
def test_what_tensor_parallelism_leaves_alone_is_sharded_over_the_data_axis_only() -> None:
    mesh = world(2, 2)
    model = parallelized(EVEN, mesh, sequence=False)
    assert model.norm.weight.placements == (Shard(0),)
    assert model.norm.weight.device_mesh == mesh["dp"]
    assert model.head.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))


@pytest.mark.full
@multi_rank(4)
@CASES
def test_full_tensor_gives_back_the_original(case: ModelCase) -> None:
    model = parallelized(case, world(2, 2))
    originals = {name: parameter.detach() for name, parameter in case.build().named_parameters()}
    assert_same("parameters", full_parameters(model), originals)


@pytest.mark.full
@multi_rank(4)
def test_local_shards_of_a_strided_parameter_interleave() -> None:
    """Tensor parallelism cuts first: rows 0-7 and 8-15; FSDP halves each."""
    model = parallelized(EVEN, world(2, 2))
    data, tensor = divmod(dist.get_rank(), 2)
    original = EVEN.build().blocks[0].feed_forward.up.weight
    expected = original.chunk(2)[tensor].chunk(2)[data]
    assert torch.equal(model.blocks[0].feed_forward.up.weight.to_local(), expected)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_hsdp_and_tensor_parallelism_make_three_axes(shape: tuple[int, int, int]) -> None:
    mesh = world(*shape)
    model = parallelized(EVEN, mesh)
    up = model.blocks[0].feed_forward.up.weight
    assert up.device_mesh.mesh_dim_names == ("replicate", "shard", "tp")
    middle = _StridedShard(0, split_factor=2) if shape[2] == 2 else Shard(0)
    assert up.placements == (Replicate(), middle, Shard(0))
    assert model.blocks[0].feed_forward.down.weight.placements == (Replicate(), Shard(0), Shard(1))
    train_2d(EVEN, model, mesh, steps=2)


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
@CASES
@pytest.mark.parametrize("sequence", [False, True], ids=["colwise_rowwise", "sequence_parallel"])
def test_tensor_parallelism_trains_like_the_unsharded_model(case: ModelCase, sequence: bool) -> None:
    mesh = world(2, 2)
    train_2d(case, parallelized(case, mesh, sequence=sequence), mesh)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("shape", [(1, 4), (4, 1)], ids=["all_tensor", "all_data"])
def test_an_axis_of_size_one_is_allowed(shape: tuple[int, int]) -> None:
    mesh = world(*shape)
    train_2d(EVEN, parallelized(EVEN, mesh), mesh, steps=2)


@pytest.mark.full
@multi_rank(4)
def test_loss_parallel() -> None:
    """Logits stay split over the vocabulary, up to the loss."""
    mesh = world(2, 2)
    model = parallelized(EVEN, mesh, local_logits=False)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return token_loss(model(batch.inputs), batch.targets)

    with loss_parallel():
        train_2d(EVEN, model, mesh, loss=loss, steps=2)


@pytest.mark.full
@multi_rank(4)
def test_unsharded_parameters_are_dtensors_of_the_tensor_parallel_mesh() -> None:
    mesh = world(2, 2)
    model = parallelized(EVEN, mesh)
    seen: list[Tensor] = []
    up = model.blocks[0].feed_forward.up
    up.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    model(EVEN.batch(0, 0, dist.get_rank() // 2).inputs)
    (weight,) = seen
    assert isinstance(weight, nn.Parameter) and isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),) and weight.device_mesh == mesh["tp"]
    assert weight.shape == (16, WIDTH)


@pytest.mark.full
@multi_rank(4)
def test_fsdp_communicates_along_the_data_axis_only() -> None:
    mesh = world(2, 2)
    model = parallelized(EVEN, mesh)
    batch = EVEN.batch(0, 0, dist.get_rank() // 2)
    EVEN.loss(model, batch).backward()
    with traced() as trace:
        EVEN.loss(model, batch).backward()
    peers = tuple(dist.get_process_group_ranks(mesh["dp"].get_group()))
    # Tensor parallelism's own collectives are functional ones, which are not recorded.
    for kind in (GATHER, SCATTER):
        assert trace.of(kind) and {each.ranks for each in trace.of(kind)} == {peers}
    assert trace.of(REDUCE) == []
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.device_mesh == parameter.device_mesh


@multi_rank(4)
def test_an_int_reshard_is_not_implemented() -> None:
    """By torch's, in the first forward; ours: multi_rank/resharding/test_fewer_ranks_beside_tensor_parallelism.py."""
    mesh = world(4, 1)
    with pytest.raises(NotImplementedError) if IS_TORCH else nullcontext():
        EVEN.loss(parallelized(EVEN, mesh, reshard_after_forward=2), EVEN.batch(0, 0, dist.get_rank()))


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
@CASES
def test_full_state_dict_goes_out_and_comes_back(case: ModelCase) -> None:
    mesh = world(2, 2)
    model = parallelized(case, mesh)
    train_2d(case, model, mesh, steps=1)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_same("state", full, full_parameters(model))
    if case.name == UNEVEN.name:
        return  # `distribute_tensor`, which takes it back, knows no uneven strided shards (2.11 to 2.15)
    other = parallelized(case, mesh, seed=1)
    set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
    assert_same("parameters", full_parameters(other), full)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (2, 1, 2)], ids=str)
def test_a_checkpoint_loads_onto_another_mesh(shape: tuple[int, ...], tmp_path: Path) -> None:
    case, mesh = UNEVEN, world(2, 2)
    model = parallelized(case, mesh)
    train_2d(case, model, mesh, steps=1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    other = parallelized(case, world(*shape), seed=1)
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path)
    assert_same("parameters", full_parameters(other), full_parameters(model))
