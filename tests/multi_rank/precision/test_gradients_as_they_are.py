"""Large gradients travel in their own dtype where ranks exchange messages; each is cast where it is added.

The reference is made by hand: what each rank's plain bfloat16 model finds, cast to fp32 and added in the order of the
ranks, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, Owned, fully_shard
from fsdp2.plugs.transports import gloo_p2p
from tests.harness import multi_rank

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = HIDDEN = 512  # a matrix of 1 MiB in fp32 travels alone; the odd one is packed
ODD = 131


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.odd = nn.Linear(HIDDEN, ODD)
        self.last = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.skipped = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor, uses_skipped: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if uses_skipped:
            hidden = hidden + self.skipped(x)
        return self.odd(hidden).float().square().mean() + self.last(hidden).float().square().mean()


def batch(rank: int, microbatch: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * microbatch + rank)).bfloat16()


def gradients_of(rank: int, microbatches: int, uses_skipped: bool) -> dict[str, Tensor]:
    """In fp32, the sum over ``microbatches`` of what the plain bf16 model of one rank finds."""
    net = Net().bfloat16()
    sums: dict[str, Tensor] = {}
    for microbatch in range(microbatches):
        net.zero_grad()
        net(batch(rank, microbatch), uses_skipped).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                found = parameter.grad.float()
                sums[name] = sums[name] + found if name in sums else found
    return sums


def expected(world_size: int, microbatches: int, skips: Callable[[int], bool]) -> dict[str, Tensor]:
    """The mean of all ranks, added in their order; a rank that has no gradient adds zeros."""
    found = [gradients_of(rank, microbatches, not skips(rank)) for rank in range(world_size)]
    mean = {}
    for name, parameter in Net().named_parameters():
        if any(name in each for each in found):
            total, *others = [each.get(name, torch.zeros(parameter.shape)) for each in found]
            for other in others:
                total = total + other
            mean[name] = total / world_size
    return mean


@contextmanager
def bytes_sent() -> Iterator[dict[str, int]]:
    """What this rank sends in reductions, while inside."""
    sent = {"bytes": 0}
    launch = gloo_p2p.Exchange.launch

    def counted(self: gloo_p2p.Exchange, arriving: Any, leaving: Any) -> None:
        if "reduction" in self.label.text:
            own = self.group.rank()
            sent["bytes"] += sum(each.nbytes for rank, each in enumerate(leaving) if rank != own)
        launch(self, arriving, leaving)

    with mock.patch.object(gloo_p2p.Exchange, "launch", counted):
        yield sent


def sharded(**options: Any) -> Any:
    return fully_shard(Net(), mp_policy=BF16, **options)


def assert_equal(net: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in net.named_parameters():
        if name in expected:
            assert torch.equal(parameter.grad.full_tensor(), expected[name]), name
        else:
            assert parameter.grad is None, name


@multi_rank(2, 4)
@pytest.mark.parametrize("missing", ["on none", "on one", "everywhere"])
@pytest.mark.parametrize("placed", ["here", "offloaded"])
def test_bits_and_bytes(missing: str, placed: str, world_size: int) -> None:
    net = sharded(**({"offload_policy": CPUOffloadPolicy()} if placed == "offloaded" else {}))
    skips = {"on none": lambda rank: False, "on one": lambda rank: rank == 1, "everywhere": lambda rank: True}[missing]
    for _ in range(2):  # the second into the buffer of the first
        net.zero_grad()
        with bytes_sent() as sent:
            net(batch(dist.get_rank(), 0), not skips(dist.get_rank())).backward()
        assert_equal(net, expected(world_size, 1, skips))
    matrices = 3 * WIDTH * HIDDEN * 2  # in bf16
    packed = 4 * (HIDDEN + (-(-ODD // world_size) * world_size) * (HIDDEN + 1))
    most = (matrices + packed) * (world_size - 1) // world_size
    assert most <= sent["bytes"] <= most + 1024 * world_size, "the rest is presence and padding"


@multi_rank(2, 4)
@pytest.mark.parametrize("how", ["by settings", "by accumulate"])
def test_what_has_added_up_travels_in_the_dtype_of_the_sum(how: str, world_size: int) -> None:
    """Also the gradient that one rank has in the last microbatch only, and in the next step all is as before."""
    net, rank = sharded(), dist.get_rank()
    for microbatch in range(3):
        if how == "by settings":
            net.set_requires_gradient_sync(microbatch == 2)
            net(batch(rank, microbatch), False).backward()
        else:
            with fsdp2.accumulate(net, last=microbatch == 2):
                net(batch(rank, microbatch), False).backward()
    assert_equal(net, expected(world_size, 3, lambda _: True))
    net.zero_grad()
    with fsdp2.accumulate(net, last=False):
        net(batch(rank, 0), False).backward()
    with fsdp2.accumulate(net, last=True):
        net(batch(rank, 1), rank == 1).backward()
    found = net.skipped.weight.grad.full_tensor()
    last = Net().bfloat16()
    last(batch(1, 1), True).backward()
    assert last.skipped.weight.grad is not None
    assert torch.equal(found, last.skipped.weight.grad.float() / world_size)
    net.zero_grad()
    with bytes_sent() as sent:
        net(batch(rank, 0), False).backward()
    assert_equal(net, expected(world_size, 1, lambda _: True))
    assert sent["bytes"] < 4 * 3 * WIDTH * HIDDEN * (world_size - 1) / world_size, "narrow again"


class _WideGradient(torch.autograd.Function):
    """x @ weight.T, whose gradient of the weight is in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, gradient.float().T @ x.float()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _WideGradient.apply(x, self.weight).float().square().mean()


@multi_rank(2)
@pytest.mark.parametrize("asks", [False, True])
def test_a_gradient_that_arrives_in_a_wider_dtype(asks: bool, world_size: int) -> None:
    """It is rounded as autograd rounds it by default; the parameter's ``grad_dtype`` keeps it."""
    net = Wide()
    if asks:
        net.weight.grad_dtype = None
    sharded: FSDPModule = fully_shard(net, mp_policy=BF16)
    sharded(batch(dist.get_rank(), 0)).backward()
    terms = []
    for rank in range(world_size):
        plain = Wide().bfloat16()
        plain.weight.grad_dtype = None
        plain(batch(rank, 0)).backward()
        assert plain.weight.grad is not None and plain.weight.grad.dtype == torch.float32
        terms.append(plain.weight.grad if asks else plain.weight.grad.bfloat16().float())
    assert torch.equal(net.weight.grad.full_tensor(), (terms[0] + terms[1]) / 2)  # type: ignore[union-attr,operator]


class Scaled(nn.Module):
    """Layers in bf16 and, as a norm written by hand is, a scale that is multiplied in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 7), nn.Linear(7, 16)
        self.scale = nn.Parameter(torch.randn(5, 7))
        self.scale.grad_dtype = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Scale.apply(self.first(x), self.scale)).float().square().mean()


class _Scale(torch.autograd.Function):
    """x times the sum of rows of the scale, whose gradient is in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale.sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale.sum(0), (gradient.float() * x.float()).sum(0).expand(scale.shape)


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("owned", [False, True])
def test_a_gradient_in_fp32_among_others(owned: bool, world_size: int) -> None:
    """All have the bits that autograd gave them, and the sum is in fp32."""
    net = Scaled()
    fully_shard(net, mp_policy=BF16, shard_placement_fn=(lambda _: Owned(1)) if owned else None)
    for _ in range(2):
        net.zero_grad()
        net(batch(dist.get_rank(), 0)[:, :16]).backward()
    found: dict[str, list[Tensor]] = {}
    for rank in range(world_size):
        plain = Scaled().bfloat16()
        plain.scale.grad_dtype = None
        plain(batch(rank, 0)[:, :16]).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == (torch.float32 if name == "scale" else torch.bfloat16)
            found.setdefault(name, []).append(parameter.grad.float())
    for name, parameter in net.named_parameters():
        total, *others = found[name]
        for other in others:
            total = total + other
        assert torch.equal(parameter.grad.full_tensor(), total / world_size), name


@multi_rank(2)
def test_collectives_of_the_backend_send_what_they_sum(world_size: int) -> None:
    """gloo's own sum in the dtype that travels."""
    with mock.patch.dict("os.environ", FSDP2_COMM="native"):
        net = sharded()
        net(batch(dist.get_rank(), 0)).backward()
    assert_equal(net, expected(world_size, 1, lambda _: True))
