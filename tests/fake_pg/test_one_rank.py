"""Where one rank has all of a parameter, it computes with it where it lies: no gather, no copy, no memory."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, MixedPrecisionPolicy, _torch, fully_shard
from tests.harness import FakeWorlds
from tests.harness.internals import groups_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [each.data_ptr() for each in self.parameters()]
        return self.last(torch.tanh(self.first(x)))


def sharded(**options: Any) -> Any:
    net = Net()
    fully_shard(net.first, **options)
    return fully_shard(net, **options)


def lie(net: nn.Module) -> list[int]:
    return [each.to_local().data_ptr() for each in net.parameters()]  # type: ignore[operator]


X = torch.linspace(-1, 1, 24).view(4, 6)


class Copies(TorchDispatchMode):
    """Counts operators that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "copy" in name or name in ("clone", "_chunk_cat", "cat", "_to_copy"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.full
@pytest.mark.parametrize("strategy", [None, "replicate", "zero2"])
def test_it_trains_as_the_plain_model_bit_by_bit(strategy: str | None, simulate: FakeWorlds) -> None:
    simulate(1)
    net, plain = sharded(strategy=strategy), Net()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (net, plain)]
    for _ in range(4):
        losses = []
        for each, optimizer in zip((net, plain), optimizers, strict=True):
            loss = each(X).square().sum()
            loss.backward()
            losses.append(loss)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    for ours, its in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.to_local(), its)


def test_parameters_are_read_where_the_shards_lie(simulate: FakeWorlds) -> None:
    simulate(1)
    net = sharded()
    for _ in range(2):
        net(X).sum().backward()
        assert net.seen[2:] == lie(net)[2:], "those of the root, while its forward ran"
    assert sum(group.storage.unsharded_bytes for group in groups_of(net)) == 0
    with Copies() as copies:
        loss = net(X)
    assert copies.names == []
    with Copies() as copies:
        loss.sum().backward()
    assert len(copies.names) <= 2 * 2, "gradients are packed, and delivered as their own"
    (place, *_) = lie(net)
    net.first.unshard()
    unsharded = net.first.weight
    assert unsharded.data_ptr() == place
    net.first.reshard()
    assert torch.equal(unsharded, net.first.weight.to_local()), "it survives a reshard"


@pytest.mark.full
def test_what_is_written_is_seen(simulate: FakeWorlds) -> None:
    simulate(1)
    net, plain = sharded(), Net()
    net(X)
    other = {name: each + 1 for name, each in Net().state_dict().items()}
    for write in (
        lambda model: model.load_state_dict(other),
        lambda model: [each.mul_(0.5) for each in model.parameters()],
        lambda model: model.double(),
        lambda model: model.float(),
        lambda model: model.requires_grad_(False),
    ):
        with torch.no_grad():
            for each in (net, plain):
                write(each)
            x = X.to(plain.last.weight.dtype)
            assert torch.equal(net(x), plain(x))
    assert net.seen[2:] == lie(net)[2:]


def test_what_several_ranks_refuse_is_refused(simulate: FakeWorlds) -> None:
    """A program that runs on one rank runs on more."""
    simulate(1)
    net = sharded()
    loss = net(X).sum()
    with torch.no_grad():
        for each in net.first.parameters():
            each.mul_(2)
    with pytest.raises(FSDPRuntimeError, match="were changed between a forward and its backward"):
        loss.backward()
    net.zero_grad()

    def write(module: Any, _: Any) -> None:
        module.weight.detach().mul_(2)

    handle = net.first.register_forward_pre_hook(write)
    with pytest.raises(FSDPRuntimeError, match=r"'first.weight' was replaced, converted or written while"):
        net(X).sum().backward()
    handle.remove()


def test_copies_and_unwrapped_models_have_memory_of_their_own(simulate: FakeWorlds) -> None:
    simulate(1)
    net = sharded()
    net(X)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    assert not other(X).any() and net(X).any()
    whole = fsdp2.unwrap(net)
    assert torch.equal(whole(X), Net()(X))


@pytest.mark.parametrize(
    "options", [{"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, {"offload_policy": CPUOffloadPolicy()}]
)
def test_what_is_cast_or_offloaded_is_copied(options: dict[str, Any], simulate: FakeWorlds) -> None:
    simulate(1)
    net = sharded(**options)
    net(X).float().sum().backward()
    assert sum(group.storage.unsharded_bytes for group in groups_of(net)) > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of what it looks at
def test_graphs_read_the_same_memory(simulate: FakeWorlds) -> None:
    simulate(1)
    net, plain = sharded(), Net()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(X).sum().backward()
        plain(X).sum().backward()
    for ours, its in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_local(), its.grad)


# ---- beside other features -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, strategy", [(1, None), (4, "replicate")])
@pytest.mark.parametrize("feature", ["pool", "storage", "inference", "no backward unshard", "second root"])
def test_beside_what_keeps_or_frees_memory(feature: str, ranks: int, strategy: Any, simulate: FakeWorlds) -> None:
    simulate(ranks)
    net, plain = sharded(strategy=strategy), Net()
    if feature == "pool":
        if not _torch.can_swap_memory:
            pytest.skip("the pool needs torch 2.13")
        net.set_communication_memory_pool(True)
    elif feature == "storage":
        net.set_keep_unsharded_storage(True)
    elif feature == "no backward unshard":
        net.set_unshard_in_backward(False)
    elif feature == "second root":
        net.first(X)
    for _ in range(2):
        if feature == "inference":
            with fsdp2.inference(net), torch.no_grad():
                assert torch.equal(net(X), plain(X))
        found = net(X)
        assert torch.equal(found, plain(X))
        found.sum().backward()
        net.zero_grad()
        assert all(buffers.lies_in_place for group in groups_of(net) for buffers in group.storage.buffers)
        with torch.no_grad():
            for each in (net, plain):
                each.first.bias.add_(1)


def test_whole_parameters_are_written_where_they_lie(simulate: FakeWorlds) -> None:
    simulate(1)
    net, plain = sharded(), Net()
    net(X).sum().backward()
    for model in (net, plain):
        with torch.no_grad(), fsdp2.full_parameters(model, writeback=True) if model is net else nullcontext():
            model.first.weight.mul_(3)
    assert torch.equal(net(X), plain(X))
    optimizer = fsdp2.optim.local(torch.optim.SGD, net.parameters(), lr=0.1, flat=True)
    net.zero_grad()
    net(X).sum().backward()
    plain(X).sum().backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(net(X), plain(X))
