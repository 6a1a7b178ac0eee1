"""Parameters that live whole on one rank, trained beside the unsharded model with everything that changes their way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy, Owned, fully_shard
from tests.harness import Reference, adamw, multi_rank, use_native_collectives
from tests.harness.compare import (
    SUM_ORDER,
    Tolerance,
    assert_sharded_same,
    gradients_of,
    parameters_of,
    tolerance_for,
)
from tests.harness.counting import Collectives
from tests.harness.models import UNEVEN_MLP, ModelCase
from tests.harness.shared.optimizers import (
    MakeOptimizer,
    adamw_for_loop,
    adamw_foreach,
    adamw_fused,
    sgd_momentum,
    tolerance_of,
)
from tests.harness.shared.owned import (
    MIXED_NET,
    NET,
    ORTHOGONALIZED,
    Both,
    OneOwner,
    fsdp_param_of,
    is_matrix,
    muon_of,
    sharded,
    train,
)
from tests.harness.shared.training import loss_on, trainable
from tests.harness.training import assert_trains_like

BF16 = Tolerance(0.1, 2e-2, "bf16, whose rounding differs with the order of sums")


@pytest.mark.full
@multi_rank(2, 4)
def test_the_owner_has_everything_and_the_others_nothing(world_size: int) -> None:
    plain, model = NET.build(), sharded()
    whole = dict(plain.named_parameters())
    owned = {name: parameter for name, parameter in model.named_parameters() if is_matrix(name, parameter)}
    assert {fsdp_param_of(parameter) for parameter in owned.values()} == set(range(world_size))
    for name, parameter in owned.items():
        local = parameter.to_local()
        assert parameter.shape == whole[name].shape
        if fsdp_param_of(parameter) == dist.get_rank():
            assert torch.equal(local, whole[name]) and local.stride() == whole[name].stride()
        else:
            assert local.shape == (0, *whole[name].shape[1:])
        assert torch.equal(parameter.full_tensor(), whole[name])


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("make", [sgd_momentum, adamw_for_loop, adamw_foreach, adamw_fused])
def test_owned_parameters_train_like_the_reference(
    make: MakeOptimizer, reshard_after_forward: bool | None, world_size: int
) -> None:
    model = sharded(reshard_after_forward=reshard_after_forward)
    train(model, make=make, tolerance=tolerance_of(make, world_size))


@pytest.mark.full
@multi_rank(2, 4)
def test_muon_trains_like_the_unsharded_model_without_a_collective_of_its_own(world_size: int) -> None:
    model, plain = sharded(), NET.build()
    reference = Reference(NET, world_size=world_size, make_optimizer=muon_of(plain), model=plain)
    optimizer = Both(model)
    tolerance = ORTHOGONALIZED if world_size > 2 else SUM_ORDER
    for step in range(4):
        record = reference.step()
        loss_on(NET, model, step, dist.get_rank()).backward()
        assert_sharded_same("gradients", gradients_of(model), record.gradients, tolerance=tolerance)
        with Collectives() as seen:
            optimizer.step()
            optimizer.zero_grad()
        assert not seen.counts, seen.counts
        assert_sharded_same("parameters", parameters_of(model), record.parameters, tolerance=tolerance)


@pytest.mark.full
@multi_rank(2, 4)
def test_a_group_communicates_as_often_as_without_owners(world_size: int) -> None:
    """Small ones are packed with the others: as many collectives as if all were sharded."""
    use_native_collectives()
    counts = []
    for model in (sharded(owners=lambda parameter: None), sharded()):
        loss_on(NET, model, 0, dist.get_rank()).backward()  # learns the order, compares plans
        with Collectives() as seen:
            loss_on(NET, model, 1, dist.get_rank()).backward()
        counts.append(seen.counts)
    assert counts[0] == counts[1]
    assert sum(counts[1].values()) == 4 + 3 + 4, "all-gathers forward and backward (the root stays), reduce-scatters"


WIDE = (256, 1024, 256)
"""Matrices of 1 MiB, or half of that in bf16: what the ranks own of a group is a MiB or more, and travels alone."""


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(*WIDE[:2]), nn.GELU(), nn.Linear(*WIDE[1:]), nn.Linear(WIDE[2], 1))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("owners", [None, OneOwner(1)], ids=["balanced", "one"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
def test_large_ones_are_gathered_straight_into_place(
    policy: MixedPrecisionPolicy, owners: Any, world_size: int
) -> None:
    use_native_collectives()
    case = ModelCase("wide", wide, UNEVEN_MLP_256, (), UNEVEN_MLP.loss_of)
    model = case.build()
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh, shard_placement_fn=owners or fsdp2.balanced_owners(model, mesh), mp_policy=policy)
    if policy.param_dtype is None:
        train(model, case)
    else:
        train(model, case, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, tolerance=BF16)
    with Collectives() as seen:
        loss_on(case, model, 9, dist.get_rank()).backward()
    assert seen.counts["allgather_base"] == 2 and seen.counts["reduce_scatter_base"] == 2, "packed, and what is owned"


def UNEVEN_MLP_256(generator: torch.Generator) -> Any:
    batch = UNEVEN_MLP.make_batch(generator)
    return type(batch)(torch.randn(4, 256, generator=generator), batch.targets)


@pytest.mark.full
@multi_rank(2, 4)
def test_one_rank_owns_all_and_the_others_nothing(world_size: int) -> None:
    train(sharded(owners=OneOwner(1)))


@pytest.mark.full
@multi_rank(2, 4)
def test_parameters_of_several_dtypes(world_size: int) -> None:
    """Each dtype has a region of its own."""
    train(sharded(MIXED_NET), MIXED_NET)


@pytest.mark.full
@multi_rank(4)
def test_muon_with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = sharded(mesh=mesh), NET.build()
    reference = Reference(NET, world_size=4, make_optimizer=muon_of(plain), model=plain)
    assert_trains_like(reference, model, Both(model), steps=3, tolerance=ORTHOGONALIZED)


@pytest.mark.full
@multi_rank(2, 4)
def test_a_gradient_on_some_ranks_only(world_size: int) -> None:
    """Rank 1 alone uses a matrix: its owner, whoever it is, gets what it sent, divided by the ranks."""
    for owner in range(world_size):
        model = nn.ParameterDict({"a": nn.Parameter(torch.ones(3, 4)), "b": nn.Parameter(torch.ones(5, 2))})
        net = Uses(model)
        fully_shard(net, shard_placement_fn=lambda parameter, owner=owner: Owned(owner))
        net(dist.get_rank() == 1).backward()
        gradient = model.b.grad.full_tensor()
        assert torch.equal(gradient, torch.full((5, 2), 3.0 / world_size))


class Uses(nn.Module):
    def __init__(self, weights: nn.ParameterDict) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, both: bool) -> torch.Tensor:
        loss = self.weights.a.sum()
        return loss + 3 * self.weights.b.sum() if both else loss


@multi_rank(4)
def test_resharded_to_fewer_ranks_after_forward() -> None:
    train(sharded(reshard_after_forward=2))


@pytest.mark.full
@multi_rank(2, 4)
def test_materialized_from_meta(world_size: int) -> None:
    with torch.device("meta"):
        model = NET.make_model()
    sharded(model=model)
    model.to_empty(device="cpu")
    state = NET.build().state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = state[name]
            owner = fsdp_param_of(parameter)
            if owner is None:
                parameter.copy_(
                    torch.distributed.tensor.distribute_tensor(
                        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
                )
            elif owner == dist.get_rank():
                parameter.to_local().copy_(whole)
    train(model)


@multi_rank(2, 4)
def test_unwrapped_and_wrapped_again(world_size: int) -> None:
    model = sharded()
    reference = Reference(NET, world_size=world_size)
    optimizer = adamw(trainable(model))
    tolerance = tolerance_for(world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance)
    loss_on(NET, model, 0, dist.get_rank()).backward()
    fsdp2.unwrap(model, optimizers=[optimizer])
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.blocks[0].up.weight.grad is not None
    optimizer.zero_grad()
    assert_sharded_same("whole", parameters_of(model), parameters_of(reference.model), tolerance=tolerance)
    mesh = init_device_mesh("cpu", (world_size,))
    for unit in NET.units(model):
        fully_shard(unit, mesh=mesh, shard_placement_fn=fsdp2.plugs.parameters.owned.noted_owner)
    assert fsdp_param_of(model.blocks[0].up.weight) is not None, "what balanced_owners noted is still there"


@pytest.mark.full
@multi_rank(2, 4)
def test_state_dicts_are_loaded_and_assigned(world_size: int) -> None:
    for assign in (False, True):
        model, other = sharded(), sharded(model=NET.build(seed=1))
        other.load_state_dict(model.state_dict(), assign=assign)
        train(other)
