"""`pending_gradients` and `synchronize_gradients`: what waits for a reduction is seen, and reduced."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, fully_shard, pending_gradients
from fsdp2.core.reduce import GradientReducer
from tests.harness import FakeWorlds, multi_rank

MICROBATCHES = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.last = nn.Linear(7, 5)
        self.sometimes = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, sometimes: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) + (self.sometimes(hidden) if sometimes else 0)


def batch(rank: int, microbatch: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * microbatch + rank))


def local_sums(rank: int, microbatches: int = MICROBATCHES, sometimes: bool = False) -> dict[str, torch.Tensor]:
    """What a plain model of one rank has added up."""
    net = Net()
    for microbatch in range(microbatches):
        net(batch(rank, microbatch), sometimes).square().sum().backward()
    return {name: each.grad for name, each in net.named_parameters() if each.grad is not None}


def mean(world_size: int, **options: Any) -> dict[str, torch.Tensor]:
    sums = [local_sums(rank, **options) for rank in range(world_size)]
    return {name: torch.stack([each[name] for each in sums]).sum(0) / world_size for name in sums[0]}


def sharded(**options: Any) -> Any:
    net = Net()
    fully_shard(net.first, **options)
    return fully_shard(net, **options)


def accumulate(net: Any, microbatches: int = MICROBATCHES) -> None:
    for microbatch in range(microbatches):
        net(batch(dist.get_rank(), microbatch)).square().sum().backward()


def assert_gradients(net: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, each in net.named_parameters():
        if name in expected:
            torch.testing.assert_close(each.grad.full_tensor(), expected[name], rtol=1e-6, atol=1e-6)  # type: ignore[union-attr,operator]
        else:
            assert each.grad is None, name


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("reshards", [True, False])
def test_unreduced_gradients_are_seen_and_reduced(reshards: bool, world_size: int) -> None:
    net = sharded(reshard_after_forward=reshards)
    assert pending_gradients(net) == {}, "before the first forward"
    fsdp2.synchronize_gradients(net)
    net.set_requires_gradient_sync(False)
    accumulate(net)
    names = {each: name for name, each in net.named_parameters()}
    own = local_sums(dist.get_rank())
    found = pending_gradients(net)
    assert {names[each] for each in found} == own.keys()
    for parameter, pending in found.items():
        assert parameter.grad is None
        assert pending.over_shards is None and pending.on_host is None
        assert pending.unreduced is not None
        torch.testing.assert_close(pending.unreduced, own[names[parameter]], rtol=1e-6, atol=1e-6)
    assert list(pending_gradients(net.first)) == list(net.first.parameters()), "of a part of the model"
    for _ in range(2):  # a second call changes nothing
        fsdp2.synchronize_gradients(net)
        assert pending_gradients(net) == {}
        assert_gradients(net, mean(world_size))
    assert not net._get_fsdp_state().unit[0].settings.requires_gradient_sync, "settings stay as they are"
    accumulate(net, 1)  # adds to what is there
    fsdp2.synchronize_gradients(net)
    once, more = mean(world_size), mean(world_size, microbatches=1)
    assert_gradients(net, {name: once[name] + more[name] for name in once})


@multi_rank(2)
def test_a_rank_that_has_no_gradient_takes_part(world_size: int) -> None:
    net = sharded()
    net.set_requires_gradient_sync(False)
    net(batch(dist.get_rank(), 0), dist.get_rank() == 1).square().sum().backward()
    assert (net.sometimes.weight in pending_gradients(net)) == (dist.get_rank() == 1)
    fsdp2.synchronize_gradients(net)
    expected = local_sums(1, 1, sometimes=True)["sometimes.weight"] / world_size
    torch.testing.assert_close(net.sometimes.weight.grad.full_tensor(), expected)


@multi_rank(4)
def test_what_waits_for_the_all_reduce_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = sharded(mesh=mesh)
    net.set_requires_all_reduce(False)
    accumulate(net)
    rank = dist.get_rank()
    pair = [local_sums(each) for each in (rank - rank % 2, rank - rank % 2 + 1)]
    names = {each: name for name, each in net.named_parameters()}
    for parameter, pending in pending_gradients(net).items():
        assert pending.unreduced is None and pending.over_shards is not None
        if names[parameter] not in pair[0]:
            assert not pending.over_shards.any(), "nobody had a gradient"
            continue
        mean_of_pair = ((pair[0][names[parameter]] + pair[1][names[parameter]]) / 2).chunk(2)[rank % 2]
        torch.testing.assert_close(pending.over_shards, mean_of_pair, rtol=1e-5, atol=1e-6)
    fsdp2.synchronize_gradients(net)
    assert pending_gradients(net) == {}
    assert_gradients(net, mean(4))


@multi_rank(2)
def test_what_waits_in_host_memory(world_size: int) -> None:
    net = sharded(offload_policy=CPUOffloadPolicy(parameters=False, gradients=True))
    net.set_is_last_backward(False)
    accumulate(net)
    expected = mean(world_size)
    names = {each: name for name, each in net.named_parameters()}
    found = pending_gradients(net)
    assert {names[each] for each in found} >= expected.keys()
    for parameter, pending in found.items():
        if names[parameter] in expected:
            part = expected[names[parameter]].chunk(world_size)[dist.get_rank()]
            torch.testing.assert_close(pending.on_host, part, rtol=1e-6, atol=1e-6)
    fsdp2.synchronize_gradients(net)
    assert_gradients(net, expected)


@pytest.mark.full
@multi_rank(2)
def test_zero_grad_drops_what_waits_and_a_cast_keeps_it(world_size: int) -> None:
    net = sharded()
    net.set_requires_gradient_sync(False)
    accumulate(net)
    net.zero_grad()
    assert pending_gradients(net) == {}
    accumulate(net)
    net.double()
    fsdp2.synchronize_gradients(net)
    expected = mean(world_size)
    for name, each in net.named_parameters():
        if name in expected:
            assert each.grad.dtype == torch.float64
            torch.testing.assert_close(each.grad.full_tensor().float(), expected[name], rtol=1e-6, atol=1e-6)


def even() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


@pytest.mark.full
@multi_rank(4)
def test_beside_tensor_parallelism() -> None:
    """What waits is a DTensor on that mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net: Any = parallelize_module(even(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    net.set_requires_gradient_sync(False)
    own, sums = mesh["dp"].get_local_rank(), []
    for rank in range(2):
        plain = even()
        for microbatch in range(MICROBATCHES):
            plain(batch(rank, microbatch)).square().sum().backward()
            if rank == own:
                net(batch(rank, microbatch)).square().sum().backward()
        sums.append(plain[0].weight.grad)
    pending = pending_gradients(net)[net[0].weight].unreduced
    assert isinstance(pending, DTensor) and pending.device_mesh == mesh["tp"]
    torch.testing.assert_close(pending.full_tensor(), sums[own], rtol=1e-5, atol=1e-5)
    fsdp2.synchronize_gradients(net)
    torch.testing.assert_close(net[0].weight.grad.full_tensor(), sum(sums) / 2, rtol=1e-5, atol=1e-5)


@multi_rank(2)
def test_an_exception_in_between_leaves_the_settings(world_size: int) -> None:
    net = sharded()
    net.set_requires_gradient_sync(False)
    accumulate(net)
    with mock.patch.object(GradientReducer, "reduce", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        fsdp2.synchronize_gradients(net)
    assert not any(group.settings.requires_gradient_sync for group in net._get_fsdp_state().unit)
    assert pending_gradients(net), "nothing is lost"
    fsdp2.synchronize_gradients(net)
    assert_gradients(net, mean(world_size))


@multi_rank(2)
def test_while_something_runs_it_is_refused(world_size: int) -> None:
    net = sharded()
    for function in (pending_gradients, fsdp2.synchronize_gradients):
        handle = net.first.register_forward_hook(lambda *_, function=function: function(net))
        with pytest.raises(FSDPRuntimeError, match=rf"{function.__name__}\(\) was called while a forward or backward"):
            net(batch(0, 0))
        handle.remove()
    accumulate(net, 1)
    assert_gradients(net, mean(world_size, microbatches=1))


def test_what_is_not_sharded_is_refused(simulate: FakeWorlds) -> None:
    simulate(2)
    for function in (pending_gradients, fsdp2.synchronize_gradients):
        with pytest.raises(FSDPRuntimeError, match=rf"{function.__name__}\(\) .* contains no sharded module"):
            function(nn.Linear(2, 2))
