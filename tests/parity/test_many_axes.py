"""Several kinds of parallelism at once, beyond plain training: meta, offload, frozen parts, optimizer state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness import Reference, adamw, assert_same, full_parameters, multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance
from tests.harness.models import UNEVEN_MLP, ModelCase
from tests.harness.parity.extensions import FiveArguments, Halves, Wrapped, parallelized_with_extension
from tests.harness.parity.implementation import API, beyond_torch, installed_from
from tests.harness.parity.language import (
    EVEN,
    PARTIAL_SUMS,
    UNEVEN,
    data_axes,
    parallelized,
    tensor_parallel,
    train_2d,
    world,
)
from tests.harness.parity.programs import TOWER, mesh_of, shard, train, trainable
from tests.harness.parity.spmd import EVEN as SPMD_EVEN
from tests.harness.parity.spmd import UNEVEN as SPMD_UNEVEN
from tests.harness.parity.spmd import distribute, sharded, spmd_loss, spmd_mesh, train_spmd


@multi_rank(4)
@pytest.mark.parametrize("case", [EVEN, UNEVEN], ids=str)
def test_tensor_parallel_models_on_meta(case: ModelCase) -> None:
    mesh = world(2, 2)
    with torch.device("meta"):
        model = case.make_model()
    tensor_parallel(model, mesh["tp"], sequence=True)
    for unit in case.units(model):
        API.fully_shard(unit, mesh=data_axes(mesh))
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(parallelized(case, mesh).state_dict())
    train_2d(case, model, mesh, steps=2)


@multi_rank(4)
def test_tensor_parallelism_with_offload() -> None:
    mesh = world(2, 2)
    model = parallelized(UNEVEN, mesh, offload_policy=API.CPUOffloadPolicy(pin_memory=False))
    train_2d(UNEVEN, model, mesh, steps=2)


@multi_rank(4)
def test_tensor_parallelism_with_frozen_parameters() -> None:
    def freeze(model: nn.Module) -> nn.Module:
        model.blocks[0].requires_grad_(False)
        model.blocks[1].feed_forward.up.weight.requires_grad_(False)
        return model

    mesh = world(2, 2)
    case = ModelCase("frozen", lambda: freeze(EVEN.make_model()), EVEN.make_batch, EVEN.unit_names, EVEN.loss_of)
    model = freeze(parallelized(EVEN, mesh))  # SequenceParallel makes new parameters, all trained
    train_2d(case, model, mesh, steps=2)
    assert model.blocks[0].norm.weight.grad is None


@multi_rank(4)
def test_unshard_and_reshard_of_tensor_parallel_parameters() -> None:
    mesh = world(2, 2)
    model = parallelized(UNEVEN, mesh)
    before = list(model.blocks[0].parameters())
    model.blocks[0].unshard()
    for parameter, original in zip(model.blocks[0].parameters(), UNEVEN.build().blocks[0].parameters(), strict=True):
        assert parameter.device_mesh == mesh["tp"] and torch.equal(parameter.full_tensor(), original)
    model.blocks[0].reshard()
    assert all(mine is yours for mine, yours in zip(model.blocks[0].parameters(), before, strict=True))


@multi_rank(4)
def test_prefetching_and_separate_groups_with_tensor_parallelism() -> None:
    mesh = world(2, 2)
    model = parallelized(EVEN, mesh)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.set_modules_to_backward_prefetch(list(model.blocks)[::-1])
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(3)
    train_2d(EVEN, model, mesh, steps=2)


@multi_rank(4)
def test_hsdp_with_tensor_parallelism_and_partial_reduction() -> None:
    mesh = world(2, 1, 2)
    model = parallelized(UNEVEN, mesh)
    train_2d(
        UNEVEN,
        model,
        mesh,
        steps=2,
        reference=Reference(UNEVEN, world_size=2, microbatches=3),
        before_forward=lambda micro: model.set_requires_all_reduce(micro == 2),
    )


# ---- two axes of model parallelism ---------------------------------------------------------------


class Expert(nn.Module):
    """One weight; two axes of a mesh may cut it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            # Like a layer written for it: whole again for the computation, its gradient split over the axes.
            mesh = weight.device_mesh
            weight = weight.redistribute(placements=[Replicate()] * mesh.ndim).to_local(
                grad_placements=[Replicate()] * mesh.ndim
            )
        return torch.tanh(x @ weight) @ weight.T


EXPERT = ModelCase("expert", Expert, TOWER.make_batch, (), F.mse_loss)


def expert_on(mesh: DeviceMesh, placements: list[Any], data_mesh: DeviceMesh) -> Any:
    model = EXPERT.build()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
    return API.fully_shard(model, mesh=data_mesh)


@multi_rank(4)
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1), (1, 2, 2)], ids=str)
def test_parameters_on_two_axes_of_model_parallelism(shape: tuple[int, int, int]) -> None:
    """Expert and tensor parallelism under FSDP."""
    mesh = mesh_of(*shape, names=("dp", "ep", "tp"))
    model = expert_on(mesh["ep", "tp"], [Shard(0), Shard(1)], mesh["dp"])
    assert model.weight.device_mesh.mesh_dim_names == ("dp", "ep", "tp")
    assert model.weight.placements[1:] == (Shard(0), Shard(1))
    assert_same("weight", full_parameters(model), {"weight": EXPERT.build().weight.detach()})
    train(
        EXPERT,
        model,
        world_size=shape[0],
        rank=dist.get_rank() // (4 // shape[0]),
        tolerance=PARTIAL_SUMS,
        steps=2,
    )


@multi_rank(4)
@beyond_torch("more than two such axes are NotImplementedError")
def test_parameters_on_three_axes_of_model_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2, 1), mesh_dim_names=("dp", "ep", "tp", "cp"))
    model = expert_on(mesh["ep", "tp", "cp"], [Shard(0), Shard(1), Replicate()], mesh["dp"])
    assert model.weight.device_mesh.mesh_dim_names == ("dp", "ep", "tp", "cp")
    train(EXPERT, model, world_size=2, rank=dist.get_rank() // 2, tolerance=PARTIAL_SUMS, steps=2)


# ---- axes in other orders, and data parallelism without shards -----------------------------------


@multi_rank(4)
@pytest.mark.parametrize("case", [SPMD_EVEN, SPMD_UNEVEN], ids=str)
def test_the_data_axis_may_come_last(case: ModelCase) -> None:
    """FSDP then cuts what tensor parallelism has cut, in the order of the mesh: nothing is strided."""
    mesh = spmd_mesh(tp=2, dp=2)
    model = sharded(case, mesh, dims={"shard": "dp"})
    assert model.up.weight.placements == (Shard(0), Shard(0))
    assert model.down.weight.placements == (Shard(1), Shard(0))
    assert_same("parameters", full_parameters(model), {n: p.detach() for n, p in case.build().named_parameters()})
    train(case, model, world_size=2, rank=dist.get_rank() % 2, loss=partial(spmd_loss, mesh), tolerance=PARTIAL_SUMS)


@multi_rank(4)
@installed_from((2, 13), "2.11's DTensor takes the linear layer's gradient for float32")
def test_mixed_precision_on_an_spmd_mesh() -> None:
    mesh = spmd_mesh(dp=2, tp=2)
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy = API.MixedPrecisionPolicy(**precision)
    model = sharded(SPMD_EVEN, mesh, dims={"shard": "dp"}, mp_policy=policy)
    rounding = Tolerance(rtol=5e-2, atol=5e-3, reason="bfloat16 partial sums")
    reference = Reference(SPMD_EVEN, world_size=2, **precision)
    train_spmd(SPMD_EVEN, model, mesh, steps=2, reference=reference, tolerance=rounding)


@multi_rank(4)
def test_spmd_models_on_meta_and_their_state_dicts() -> None:
    mesh = spmd_mesh(dp=2, tp=2)
    state = sharded(SPMD_UNEVEN, mesh, dims={"shard": "dp"}).state_dict()
    with torch.device("meta"):
        model = SPMD_UNEVEN.make_model()
    distribute(model, mesh)
    for unit in SPMD_UNEVEN.units(model):
        API.fully_shard(unit, mesh=mesh, dp_mesh_dims=API.DataParallelMeshDims(shard="dp"))
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    train_spmd(SPMD_UNEVEN, model, mesh, steps=2)


@multi_rank(4)
def test_replicated_parameters_unshard_reshard_and_load() -> None:
    mesh = spmd_mesh(rep=4)
    model = sharded(SPMD_UNEVEN, mesh, dims={"replicate": "rep"}, seed=1)
    model.load_state_dict(sharded(SPMD_UNEVEN, mesh, dims={"replicate": "rep"}).state_dict())
    model.up.unshard()
    assert torch.equal(model.up.weight.full_tensor(), SPMD_UNEVEN.build().up.weight)
    model.up.reshard()
    assert model.up.weight.placements == (Replicate(),)
    train_spmd(SPMD_UNEVEN, model, mesh)


@multi_rank(4)
def test_replicated_parameters_accumulate_in_both_ways() -> None:
    mesh = spmd_mesh(rep=4)
    for setter in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model = sharded(SPMD_UNEVEN, mesh, dims={"replicate": "rep"})
        train_spmd(
            SPMD_UNEVEN,
            model,
            mesh,
            steps=2,
            reference=Reference(SPMD_UNEVEN, world_size=4, microbatches=3),
            before_forward=lambda micro, model=model, setter=setter: getattr(model, setter)(micro == 2),
        )


# ---- extensions under tensor parallelism ---------------------------------------------------------


@multi_rank(4)
@pytest.mark.parametrize("kind", [FiveArguments, Halves], ids=lambda each: each.__name__)
def test_an_extension_within_a_tensor_parallel_parameter(kind: type[Wrapped]) -> None:
    """The local tensor of the DTensor is the subclass; it is gathered along the data axis."""
    mesh = world(2, 2)
    model = parallelized_with_extension(kind, mesh)
    batch = EVEN.batch(0, 0, dist.get_rank() // 2)
    EVEN.loss(model, batch).backward()
    record = Reference(EVEN, world_size=2).step()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()
        assert torch.allclose(gradient, record.gradients[name], rtol=1e-3, atol=1e-5), name


# ---- optimizer state -----------------------------------------------------------------------------


def trained(model: Any, case: ModelCase, rank: int, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        case.loss(model, case.batch(0, step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_resumes(make: Any, case: ModelCase, rank: int, folder: Path) -> None:
    """Two steps, a checkpoint, two more: as a fresh model that goes on from the checkpoint."""
    model = make(0)
    optimizer = adamw(trainable(model))
    trained(model, case, rank, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    trained(model, case, rank, optimizer, range(2, 4))
    other = make(1)
    fresh = adamw(trainable(other))
    model_state, optimizer_state = get_state_dict(other, fresh)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(other, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    trained(other, case, rank, fresh, range(2, 4))
    assert_same("parameters", full_parameters(other), full_parameters(model), tolerance=SUM_ORDER)


@multi_rank(4)
def test_training_resumes_under_hsdp(tmp_path: Path) -> None:
    mesh = mesh_of(2, 2)
    assert_resumes(
        lambda seed: shard(UNEVEN_MLP, UNEVEN_MLP.build(seed), mesh=mesh), UNEVEN_MLP, dist.get_rank(), tmp_path
    )


@multi_rank(4)
@pytest.mark.parametrize("case", [EVEN, UNEVEN], ids=str)
def test_training_resumes_under_tensor_parallelism(case: ModelCase, tmp_path: Path) -> None:
    mesh = world(2, 2)
    assert_resumes(lambda seed: parallelized(case, mesh, seed=seed), case, dist.get_rank() // 2, tmp_path)
