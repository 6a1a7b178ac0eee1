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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness import Reference, adamw, assert_same, full_parameters, multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.models import ModelCase
from tests.harness.parity.extensions import FiveArguments, Halves, Wrapped, parallelized_with_extension
from tests.harness.parity.implementation import API, beyond_torch
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
from tests.harness.parity.programs import TOWER, mesh_of, train, trainable
from tests.harness.parity.spmd import EVEN as SPMD_EVEN
from tests.harness.parity.spmd import UNEVEN as SPMD_UNEVEN
from tests.harness.parity.spmd import sharded, spmd_loss, spmd_mesh


@pytest.mark.full
@multi_rank(4)
def test_tensor_parallel_models_on_meta() -> None:
    case, mesh = UNEVEN, world(2, 2)
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
def test_prefetching_and_separate_groups_with_tensor_parallelism() -> None:
    mesh = world(2, 2)
    model = parallelized(EVEN, mesh)
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.set_modules_to_backward_prefetch(list(model.blocks)[::-1])
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(3)
    train_2d(EVEN, model, mesh, steps=2)


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


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 1, 2),
        (2, 2, 1),
        (1, 2, 2),
        pytest.param((2, 1, 2, 1), marks=beyond_torch("more than two such axes are NotImplementedError")),
    ],
    ids=str,
)
def test_parameters_on_several_axes_of_model_parallelism(shape: tuple[int, ...]) -> None:
    """Expert, tensor and context parallelism under FSDP."""
    names = ("dp", "ep", "tp", "cp")[: len(shape)]
    mesh = mesh_of(*shape, names=names)
    model = expert_on(mesh[names[1:]], [Shard(0), Shard(1), Replicate()][: len(shape) - 1], mesh["dp"])
    assert model.weight.device_mesh.mesh_dim_names == names
    assert model.weight.placements[1:3] == (Shard(0), Shard(1))
    assert_same("weight", full_parameters(model), {"weight": EXPERT.build().weight.detach()})
    train(
        EXPERT,
        model,
        world_size=shape[0],
        rank=dist.get_rank() // (4 // shape[0]),
        tolerance=PARTIAL_SUMS,
        steps=2,
    )


# ---- axes in other orders, and data parallelism without shards -----------------------------------


@pytest.mark.full
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


# ---- extensions under tensor parallelism ---------------------------------------------------------


@pytest.mark.full
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


@pytest.mark.full
@multi_rank(4)
def test_training_resumes_under_tensor_parallelism(tmp_path: Path) -> None:
    """Two steps, a checkpoint, two more: as a fresh model that goes on from the checkpoint."""
    mesh = world(2, 2)
    models = [parallelized(UNEVEN, mesh, seed=seed) for seed in range(2)]
    optimizers = [adamw(trainable(model)) for model in models]

    def steps(index: int, numbers: range) -> None:
        for step in numbers:
            UNEVEN.loss(models[index], UNEVEN.batch(0, step, dist.get_rank() // 2)).backward()
            optimizers[index].step()
            optimizers[index].zero_grad()

    steps(0, range(2))
    state, optimizer_state = get_state_dict(models[0], optimizers[0])
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    steps(0, range(2, 4))
    state, optimizer_state = get_state_dict(models[1], optimizers[1])
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    set_state_dict(models[1], optimizers[1], model_state_dict=state, optim_state_dict=optimizer_state)
    steps(1, range(2, 4))
    assert_same("parameters", full_parameters(models[1]), full_parameters(models[0]), tolerance=SUM_ORDER)
