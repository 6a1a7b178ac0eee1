"""`CPUOffloadPolicy`: parameters, gradients and optimizer states at rest on the host.

On a CPU mesh host and device are the same, so that what can be seen is where tensors are, what is pinned, and training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import Accumulation, Reference, adamw, assert_same, full_parameters, multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.models import FROZEN, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
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


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TRANSFORMER, TIED, FROZEN], ids=str)
def test_offloading_trains_like_the_unsharded_model(case: ModelCase, world_size: int) -> None:
    train(case, shard(case, offload_policy=offload()))


@multi_rank(2)
def test_none_offloads_nothing() -> None:
    train(UNEVEN_MLP, shard(UNEVEN_MLP, offload_policy=None))


@multi_rank(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_offloading_trains_whether_or_not_it_reshards_after_forward(reshard_after_forward: bool) -> None:
    train(ROOTED, shard(ROOTED, offload_policy=offload(), reshard_after_forward=reshard_after_forward))


@multi_rank(4)
def test_offloading_trains_under_hsdp_with_accumulation() -> None:
    model = shard(UNEVEN_MLP, mesh=mesh_of(2, 2), offload_policy=offload())
    reference = Reference(UNEVEN_MLP, world_size=4, microbatches=3)
    train(UNEVEN_MLP, model, reference=reference, before_forward=lambda m: model.set_requires_all_reduce(m == 2))


@multi_rank(4)
def test_offloading_trains_with_an_int_reshard() -> None:
    train(UNEVEN_MLP, shard(UNEVEN_MLP, offload_policy=offload(), reshard_after_forward=2))


@multi_rank(2)
@pytest.mark.parametrize("accumulation", list(Accumulation), ids=lambda each: each.name)
def test_offloaded_gradients_accumulate(accumulation: Accumulation) -> None:
    model = shard(UNEVEN_MLP, offload_policy=offload())
    last = accumulation is Accumulation.REDUCE_LAST
    train(
        UNEVEN_MLP,
        model,
        reference=Reference(UNEVEN_MLP, world_size=2, microbatches=3, accumulation=accumulation),
        before_forward=lambda micro: model.set_requires_gradient_sync(micro == 2 or not last),
    )


@multi_rank(2)
def test_offloading_trains_in_mixed_precision() -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = shard(UNEVEN_MLP, offload_policy=offload(), mp_policy=API.MixedPrecisionPolicy(**precision))
    train(UNEVEN_MLP, model, reference=Reference(UNEVEN_MLP, world_size=2, **precision))


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


@multi_rank(2)
def test_units_with_and_without_offload_live_in_one_model() -> None:
    model = UNEVEN_MLP.build()
    API.fully_shard(model[0], offload_policy=offload())
    API.fully_shard(model[2])
    API.fully_shard(model, offload_policy=offload())
    train(UNEVEN_MLP, model)


@multi_rank(2)
def test_meta_parameters_are_materialized_on_the_host() -> None:
    with torch.device("meta"):
        model = UNEVEN_MLP.make_model()
    for unit in UNEVEN_MLP.units(model):
        API.fully_shard(unit, offload_policy=offload())
    model.to_empty(device="cpu")
    state = {name: p.detach() for name, p in UNEVEN_MLP.build().named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = torch.distributed.tensor.distribute_tensor(state[name], parameter.device_mesh, parameter.placements)
            parameter.copy_(full)
    assert_same("parameters", full_parameters(model), state)
    train(UNEVEN_MLP, model)


@multi_rank(2)
def test_clipping() -> None:
    model = shard(UNEVEN_MLP, offload_policy=offload())
    train(UNEVEN_MLP, model, reference=Reference(UNEVEN_MLP, world_size=2, max_norm=0.1), tolerance=SUM_ORDER)


@multi_rank(2)
def test_state_dicts() -> None:
    model = shard(UNEVEN_MLP, offload_policy=offload())
    train(UNEVEN_MLP, model, steps=1)
    for assign in (False, True):
        other = shard(UNEVEN_MLP, UNEVEN_MLP.build(seed=1), offload_policy=offload())
        other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=assign)
        assert_same("parameters", full_parameters(other), full_parameters(model))


@multi_rank(2)
def test_the_base_policy_offloads_nothing() -> None:
    train(TOWER, shard(TOWER, offload_policy=API.OffloadPolicy()), steps=2)


@multi_rank(2)
def test_the_optimizer_steps_in_backward() -> None:
    """The hook sees the whole gradient, on the host, and may step at once."""
    model = shard(UNEVEN_MLP, offload_policy=offload())
    plain = UNEVEN_MLP.build()
    seen: list[torch.device] = []

    def step(parameter: nn.Parameter) -> None:
        seen.append(parameter.grad.device)
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    loss_on(UNEVEN_MLP, model).backward()
    for rank in range(2):
        loss_on(UNEVEN_MLP, plain, 0, rank).backward()
    expected = {name: (p - 0.1 * (p.grad / 2)).detach() for name, p in plain.named_parameters()}
    assert_same("parameters", full_parameters(model), expected)
    assert seen == [CPU] * 6
