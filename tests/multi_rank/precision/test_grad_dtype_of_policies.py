"""`MixedPrecisionPolicy(grad_dtype=)`: gradients in a dtype of their own, parameters and gathers in theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import FSDPValueError, MixedPrecisionPolicy, fully_shard
from tests.harness import FakeWorlds, multi_rank

HALF, FULL = torch.bfloat16, torch.float32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7, dtype=HALF)
        self.last = nn.Linear(7, 5, dtype=HALF)
        self.counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def batch(rank: int, microbatch: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * microbatch + rank)).to(HALF)


def sharded(policy: MixedPrecisionPolicy) -> Any:
    net = Net()
    fully_shard(net.first, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


def mean(world_size: int, microbatches: int = 1) -> dict[str, Tensor]:
    """Each rank's bf16 gradients, cast to fp32 and added there."""
    total: dict[str, Tensor] = {}
    for rank in range(world_size):
        for microbatch in range(microbatches):
            net = Net()
            net(batch(rank, microbatch)).float().square().sum().backward()
            for name, each in net.named_parameters():
                if each.grad is not None:
                    total[name] = total.get(name, torch.zeros(each.shape)) + each.grad.float()
    return {name: each / world_size for name, each in total.items()}


@multi_rank(2, 4)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_add_up_in_it(microbatches: int, world_size: int) -> None:
    """Over ranks and microbatches, though parameters rest, travel and compute in bf16."""
    net = sharded(MixedPrecisionPolicy(grad_dtype=FULL))
    for microbatch in range(microbatches):
        net.set_requires_gradient_sync(microbatch == microbatches - 1)
        net(batch(dist.get_rank(), microbatch)).float().square().sum().backward()
    expected = mean(world_size, microbatches)
    for name, each in net.named_parameters():
        if name in expected:
            assert each.dtype == HALF and each.grad.dtype == FULL, name
            torch.testing.assert_close(each.grad.full_tensor(), expected[name], rtol=1e-6, atol=1e-6)
    assert net.counts.grad is None


@multi_rank(2)
def test_what_else_says_a_dtype_counts(world_size: int) -> None:
    """``reduce_dtype`` for the collective, and a parameter's own ``grad_dtype``."""
    net = Net()
    net.first.bias.grad_dtype = None
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64, grad_dtype=FULL)
    fully_shard(net, mp_policy=policy)
    net(batch(dist.get_rank())).float().square().sum().backward()
    assert net.first.weight.grad.dtype == FULL  # type: ignore[union-attr]
    assert net.first.bias.grad.dtype == torch.float64, "as it was reduced"  # type: ignore[union-attr]


@multi_rank(2)
def test_it_survives_conversions_and_steps(world_size: int) -> None:
    net = sharded(MixedPrecisionPolicy(grad_dtype=FULL))
    for convert in (lambda: net.double(), lambda: net.to(HALF), lambda: net.cpu()):
        convert()
        net(batch(dist.get_rank()).to(net.last.weight.dtype)).float().square().sum().backward()
        assert {each.grad.dtype for each in net.parameters() if each.grad is not None} == {FULL}
        net.zero_grad()
    net(batch(dist.get_rank())).float().square().sum().backward()
    fsdp2.clip_grad_norm_(net, 1.0)
    before = net.first.weight.full_tensor()
    torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.5, foreach=False).step()
    assert not torch.equal(before, net.first.weight.full_tensor())


def test_complex_parameters_keep_their_own(simulate: FakeWorlds) -> None:
    """A real dtype would drop half of each number; one that the user has set stays through conversions."""
    simulate(2)
    layer = nn.Linear(4, 4, bias=False, dtype=torch.complex64)
    layer.weight.grad_dtype = torch.complex128
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(grad_dtype=torch.float64))
    for _ in range(2):
        layer(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
        assert layer.weight.grad.dtype == torch.complex128  # type: ignore[union-attr]
        layer.zero_grad()
        layer.cpu()
    other = fully_shard(
        nn.Linear(4, 4, dtype=torch.complex64), mp_policy=MixedPrecisionPolicy(grad_dtype=torch.float64)
    )
    other(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
    assert other.weight.grad.dtype == torch.complex64


def test_dtypes_that_are_none_are_refused(simulate: FakeWorlds) -> None:
    simulate(2)
    with pytest.raises(FSDPValueError, match=r"MixedPrecisionPolicy\.grad_dtype must be a floating-point dtype"):
        MixedPrecisionPolicy(grad_dtype=torch.int32)
    tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    fully_shard(tied[0], mp_policy=MixedPrecisionPolicy(grad_dtype=torch.float64))
    with pytest.raises(FSDPValueError, match="'mp_policy'"):
        fully_shard(tied[1])
