"""`CPUOffloadPolicy`: parameters, gradients and optimizer states at rest on the host.

On a CPU mesh host and device are the same, so that what can be seen is where tensors are, what is pinned, and training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import Reference, adamw, multi_rank
from tests.harness.models import FROZEN, TIED, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.programs import ROOTED, TOWER, loss_on, mesh_of, shard, train, trainable

CPU = torch.device("cpu")


def offload(*, pin_memory: bool = False) -> Any:
    return API.CPUOffloadPolicy(pin_memory=pin_memory)


def test_the_policies_are_dataclasses_with_documented_defaults() -> None:
    assert API.CPUOffloadPolicy().pin_memory is True
    assert API.CPUOffloadPolicy(False) == API.CPUOffloadPolicy(pin_memory=False)
    assert isinstance(API.CPUOffloadPolicy(), API.OffloadPolicy)
    assert API.OffloadPolicy() == API.OffloadPolicy()
    assert API.OffloadPolicy() != API.CPUOffloadPolicy()


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TIED, FROZEN], ids=str)
def test_offloading_trains_like_the_unsharded_model(case: ModelCase, world_size: int) -> None:
    train(case, shard(case, offload_policy=offload()))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("policy", [None, API.OffloadPolicy()])
def test_the_base_policy_and_none_offload_nothing(policy: Any) -> None:
    train(TOWER, shard(TOWER, offload_policy=policy), steps=2)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("reshard_after_forward", [True, False, 2])
def test_offloading_trains_whether_or_not_it_reshards_after_forward(reshard_after_forward: bool | int) -> None:
    train(ROOTED, shard(ROOTED, offload_policy=offload(), reshard_after_forward=reshard_after_forward))


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("setter", [None, "set_requires_gradient_sync", "set_requires_all_reduce"])
def test_offloaded_gradients_accumulate(setter: str | None) -> None:
    model = shard(UNEVEN_MLP, mesh=mesh_of(2, 2), offload_policy=offload())
    train(
        UNEVEN_MLP,
        model,
        reference=Reference(UNEVEN_MLP, world_size=4, microbatches=3),
        before_forward=lambda micro: setter and getattr(model, setter)(micro == 2),
    )


@pytest.mark.full
@multi_rank(2)
def test_parameters_gradients_and_optimizer_states_are_on_the_host() -> None:
    model = shard(ROOTED, offload_policy=offload())
    optimizer = adamw(trainable(model))
    loss_on(ROOTED, model).backward()
    optimizer.step()
    for parameter in model.parameters():
        assert parameter.device == parameter.to_local().device == CPU
        assert parameter.grad.device == CPU and parameter.grad.to_local().device == CPU
        assert optimizer.state[parameter]["exp_avg"].device == CPU


@pytest.mark.full
@multi_rank(2)
def test_units_with_and_without_offload_live_in_one_model() -> None:
    model = UNEVEN_MLP.build()
    API.fully_shard(model[0], offload_policy=offload())
    API.fully_shard(model[2])
    API.fully_shard(model, offload_policy=offload())
    train(UNEVEN_MLP, model)
