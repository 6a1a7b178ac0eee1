"""`set_full_precision`: a model that is trained in one dtype and evaluated in the dtype of its parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import FSDPModule, FSDPRuntimeError, MixedPrecisionPolicy, fully_shard
from tests.harness import FakeWorlds, multi_rank

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Seen(nn.Linear):
    """Notes the dtypes that it computes with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, self.weight.dtype)
        return super().forward(x)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Seen(5, 7), nn.Tanh(), Seen(7, 3))


def sharded(policy: MixedPrecisionPolicy = BF16, **arguments: Any) -> Any:
    model = build()
    fully_shard(model[0], mp_policy=policy, **arguments)
    return fully_shard(model, mp_policy=policy, **arguments)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, seed: int) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * seed + rank))
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_evaluation_equals_the_plain_models(hybrid: bool, world_size: int) -> None:
    """Beside a twin that is never evaluated: training is the same to the bit, and evaluation is in fp32."""
    arguments = {}
    if hybrid:
        shape = (2, world_size // 2)
        arguments["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, twin = sharded(**arguments), sharded(**arguments)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, twin)]
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(5))
    for seed in range(3):
        losses = [step(each, its, dist.get_rank(), seed) for each, its in zip((model, twin), optimizers, strict=True)]
        assert torch.equal(*losses)
        assert model[0].seen == (torch.bfloat16, torch.bfloat16)
        model.set_full_precision(True)
        with torch.no_grad():
            found = model(x)
        assert model[0].seen == model[2].seen == (torch.float32, torch.float32) and found.dtype == torch.float32
        plain = build()
        plain.load_state_dict({name: each.full_tensor() for name, each in model.state_dict().items()})
        torch.testing.assert_close(found, plain(x).detach(), rtol=1e-6, atol=1e-6)
        model.set_full_precision(False)
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.to_local(), expected.to_local())


@multi_rank(2)
def test_gradients_in_full_precision(world_size: int) -> None:
    model = sharded(MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.set_full_precision(True)
    plain = build()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad, rtol=1e-6, atol=1e-6)


def test_one_unit_alone(simulate: FakeWorlds) -> None:
    simulate(2)
    model = sharded(MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    model.set_full_precision(True, recurse=False)
    model(torch.ones(1, 5))
    assert model[2].seen[1] == torch.float32 and model[0].seen == (torch.bfloat16, torch.bfloat16)


def test_copies_are_as_the_original(simulate: FakeWorlds) -> None:
    simulate(2)
    model = sharded()
    model.set_full_precision(True)
    made = copy.deepcopy(model)
    made(torch.ones(1, 5))
    assert made[0].seen == (torch.float32, torch.float32)
    made.set_full_precision(False)
    made(torch.ones(1, 5))
    assert made[0].seen == (torch.bfloat16, torch.bfloat16)


def test_what_would_lose_gradients_is_refused(simulate: FakeWorlds) -> None:
    simulate(2)
    model = sharded()
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(FSDPRuntimeError, match="gradients wait for their reduction: call it after"):
        model.set_full_precision(True)
    model.zero_grad()
    model.set_full_precision(True)
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 5)).sum().backward()
    handle = model[0].register_forward_hook(lambda *_: model.set_full_precision(False))
    with pytest.raises(FSDPRuntimeError, match="outside of forward and backward"):
        model(torch.ones(1, 5))
    handle.remove()
    with fsdp2.full_parameters(model, writeback=False), pytest.raises(FSDPRuntimeError, match="full_parameters"):
        model.set_full_precision(False)
    assert isinstance(model, FSDPModule)
