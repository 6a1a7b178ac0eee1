"""`fully_shard`: which parameters a call takes, how it groups them, what it moves, and when a call is a repetition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPMeshInfo,
    FSDPModule,
    FSDPValueError,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
)
from fsdp2.core.state import state_of
from tests.harness import fake_world
from tests.harness.internals import groups_of


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_world(4, rank=1):
        yield


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU()), nn.Linear(6, 4))


def names_of(model: nn.Module) -> list[list[str]]:
    """The parameters of each group, as messages call them."""
    return [[param.fqn for param in group.params] for group in groups_of(model)]


def test_a_call_takes_what_the_calls_before_have_left() -> None:
    model = build()
    fully_shard(model[1])
    fully_shard(model)
    assert names_of(model) == [["0.weight", "0.bias", "2.weight", "2.bias"], ["0.weight"]]
    assert [type(each).__name__ for each in (model, model[0], model[1])] == [
        "FSDPSequential",
        "Linear",
        "FSDPSequential",
    ]
    assert all(isinstance(each, DTensor) and each.placements == (Shard(0),) for each in model.parameters())


def test_the_modules_of_a_list_are_one_group_and_those_inside_others_are_left_to_them() -> None:
    model = build()
    fully_shard([model[0], model[1], model[1][0]])
    assert isinstance(model[0], FSDPModule) and isinstance(model[1], FSDPModule)
    assert not isinstance(model[1][0], FSDPModule) and not isinstance(model[2], FSDPModule)
    assert names_of(model) == [["weight", "bias", "0.weight"]]
    assert not isinstance(model[2].weight, DTensor)


def test_a_weight_in_two_places_is_one_parameter_with_two_uses() -> None:
    model = build()
    model[1][0].weight = model[2].weight = nn.Parameter(torch.randn(6, 6))
    fully_shard(model)
    (group,) = groups_of(model)
    assert [param.fqn for param in group.params] == ["0.weight", "0.bias", "1.0.weight", "2.bias"]
    assert model[1][0].weight is model[2].weight and isinstance(model[2].weight, DTensor)
    assert [*group.params[2].uses] == [(model[1][0], "weight"), (model[2], "weight")]


def test_ignored_parameters_stay_as_they_are_and_where_they_are() -> None:
    model = build()
    ignored = model[0].weight
    fully_shard(model, ignored_params={ignored})
    assert model[0].weight is ignored and names_of(model) == [["0.bias", "1.0.weight", "2.weight", "2.bias"]]


def test_parameters_are_grouped_by_mesh_and_by_place() -> None:
    model, inner = build(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), FSDPMeshInfo(inner, 0)) if parameter.shape == (6, 6) else None

    fully_shard(model, shard_placement_fn=place)
    assert names_of(model) == [["0.weight", "0.bias", "2.weight", "2.bias"], ["1.0.weight"]]
    assert [group.mesh.shard_size for group in groups_of(model)] == [4, 2]
    resharded = fully_shard(build(), shard_placement_fn=place, reshard_after_forward=2)
    rests = [group.storage.post_forward for group in groups_of(resharded)]
    assert rests[0] is not None and rests[1] is None, "to two of four; to two of two is all"
    other = build()
    fully_shard(other, offload_policy={"0.weight": CPUOffloadPolicy()})
    assert names_of(other) == [["0.weight"], ["0.bias", "1.0.weight", "2.weight", "2.bias"]]


def test_strategies_and_ints_say_where_parameters_rest() -> None:
    replicated, neighbours, whole = (build() for _ in range(3))
    fully_shard(replicated, strategy="replicate")
    assert {each.placements for each in replicated.parameters()} == {(Replicate(),)}
    fully_shard(neighbours, reshard_after_forward=2)
    (group,) = groups_of(neighbours)
    assert group.storage.post_forward is not None and group.storage.post_forward.mesh.shard_size == 2
    fully_shard(whole, reshard_after_forward=4)
    assert groups_of(whole)[0].storage.post_forward is None, "as True"
    for wrong in (3, 0, 8):
        with pytest.raises(FSDPValueError, match="reshard_after_forward"):
            fully_shard(build(), reshard_after_forward=wrong)


def test_buffers_are_cast_as_the_policy_says_and_parameters_keep_their_dtype() -> None:
    model = nn.BatchNorm1d(4)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, buffer_dtype=torch.float64))
    assert model.running_mean.dtype == torch.float64 and model.num_batches_tracked.dtype == torch.int64
    assert model.weight.dtype == torch.float32


def test_a_repetition_changes_nothing_and_another_argument_is_named() -> None:
    model = build()
    fully_shard(model, reshard_after_forward=False)
    state, parameters = state_of(model), [*model.parameters()]
    assert fully_shard(model, reshard_after_forward=False) is model
    assert state_of(model) is state and all(map(lambda one, other: one is other, model.parameters(), parameters))
    with pytest.raises(FSDPValueError, match="another argument 'reshard_after_forward': False before, True now"):
        fully_shard(model, reshard_after_forward=True)
    with pytest.raises(FSDPValueError, match=r"another argument 'module': on \(Sequential\)"):
        fully_shard([model, build()])


def test_what_is_refused_has_changed_nothing() -> None:
    model = build()
    model[2] = nn.LazyLinear(4)
    before = [*model.parameters()]
    with pytest.raises(FSDPValueError, match=r"parameter '2\.weight' of Sequential is not initialized"):
        fully_shard(model)
    assert type(model) is nn.Sequential and state_of(model) is None
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
