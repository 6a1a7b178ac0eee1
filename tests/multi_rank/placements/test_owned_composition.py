"""Owned parameters beside other features: ties, meshes of several dims, own collectives; and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    FSDPNotImplementedError,
    FSDPValueError,
    Owned,
    ShardPlacementResult,
    fully_shard,
)
from tests.harness import Reference, multi_rank
from tests.harness.compare import tolerance_for
from tests.harness.parity.implementation import installed_from
from tests.harness.reference import adamw
from tests.harness.shared.optimizers import local_like
from tests.harness.shared.owned import NET, OneOwner, fsdp_param_of, sharded, train
from tests.harness.shared.training import loss_on, trainable
from tests.harness.training import assert_trains_like


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


@multi_rank(2)
def test_tied_with_another_owner_is_refused() -> None:
    model = tied_model()
    fully_shard(model[0], shard_placement_fn=OneOwner(1))
    with pytest.raises(FSDPValueError, match="'shard_placement_fn'"):
        fully_shard(model[2], shard_placement_fn=OneOwner(0))


@multi_rank(2)
def test_other_ranks_disagreeing_on_the_owner_find_out() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, shard_placement_fn=OneOwner(dist.get_rank()))
    with pytest.raises(fsdp2.FSDPError, match="rank"):
        model(torch.ones(1, 4))


@multi_rank(2)
def test_mistakes_are_refused() -> None:
    with pytest.raises(FSDPValueError, match=r"'weight'.*Owned\(rank=2\).*2 ranks"):
        fully_shard(nn.Linear(3, 3), shard_placement_fn=lambda parameter: Owned(2))
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(FSDPValueError, match="'scale' has no dims"):
        fully_shard(module, shard_placement_fn=lambda parameter: Owned(0))


@multi_rank(4)
def test_beside_tensor_parallelism_it_is_refused() -> None:

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises((FSDPValueError, FSDPNotImplementedError), match=r"'0\.weight'"):
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=OneOwner(0))


@multi_rank(4)
@installed_from((2, 13), "earlier DTensors sum gradients over ranks before they arrive, as a warning of ours says")
def test_replicated_in_the_other_dim_of_the_mesh() -> None:
    """A whole mesh, of which one dim is data parallel: matrices that the other replicates can be owned."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = distribute_module(NET.build(), mesh)
    plain, optimizer = NET.build(), None
    for unit in NET.units(model):
        fully_shard(unit, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), shard_placement_fn=OneOwner(1))
    optimizers = [adamw(trainable(model)), adamw(trainable(plain))]
    weight = model.blocks[0].up.weight
    assert (fsdp_param_of(weight), weight.placements[1]) == (1, Replicate())
    for step in range(2):
        batch = NET.batch(0, step, mesh.get_local_rank("dp"))
        tokens = DTensor.from_local(batch.inputs, mesh, [Shard(0), Replicate()])
        logits = model(tokens)
        loss = NET.loss_of(logits.to_local(), batch.targets)
        loss.backward()
        (sum(loss_on(NET, plain, step, rank) for rank in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.full
@multi_rank(4)
def test_another_mesh_for_what_is_owned() -> None:
    """The rank counts in the mesh that goes with it: the experts' own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    info = FSDPMeshInfo(init_device_mesh("cpu", (4,)), shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        if parameter.dim() == 3:
            return ShardPlacementResult(Owned(3), info)
        return Owned(1) if parameter.dim() == 2 else None

    model = sharded(mesh=mesh, owners=place)
    assert (fsdp_param_of(model.blocks[0].experts), fsdp_param_of(model.blocks[0].up.weight)) == (3, 1)
    train(model, tolerance=tolerance_for(4))


@multi_rank(2)
def test_where_nothing_is_sharded_there_is_no_owner() -> None:
    with pytest.raises(FSDPValueError, match="replicate"):
        fully_shard(NET.build(), strategy="replicate", shard_placement_fn=OneOwner(0))


@multi_rank(4)
def test_on_one_rank() -> None:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    train(sharded(mesh=mesh))


class SendsItself(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


@multi_rank(2)
def test_an_owned_parameter_with_an_extension_is_refused() -> None:
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(SendsItself))
    with pytest.raises(FSDPNotImplementedError, match=r"'weight'.*one rank is to own it"):
        fully_shard(module, shard_placement_fn=OneOwner(0))


def in_blocks(parameter: nn.Parameter) -> fsdp2.RowBlocks:
    return fsdp2.RowBlocks(3)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("owners", [None, OneOwner(1), in_blocks], ids=["balanced", "owned", "row_blocks"])
def test_the_state_of_a_local_optimizer_lies_like_the_parameters(owners: Any, flat: bool) -> None:
    """Its tensors are of the parameters' class, and a flat step is on what this rank owns, not on others' places."""
    model = sharded(owners=owners)
    reference = Reference(NET, world_size=2)
    optimizer = local_like(adamw(trainable(model)), flat=flat)
    assert_trains_like(reference, model, optimizer, steps=2)
    weight = model.blocks[0].up.weight
    assert isinstance(weight, fsdp2.RaggedDTensor)
    assert type(optimizer.state[weight]["exp_avg"]) is type(optimizer.state[weight]["exp_avg"].mul(1)) is type(weight)
    model, optimizer = copy.deepcopy((model, optimizer))
    assert_trains_like(reference, model, optimizer, steps=2)


@pytest.mark.full
@multi_rank(2, 4)
def test_writing_between_forward_and_backward_is_noticed(world_size: int) -> None:
    """On every rank, also those where the written parameter has no rows."""
    model = sharded(reshard_after_forward=True)
    loss = loss_on(NET, model, 0, dist.get_rank())
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    with pytest.raises(fsdp2.FSDPRuntimeError, match="were changed between a forward and its backward"):
        loss.backward()
