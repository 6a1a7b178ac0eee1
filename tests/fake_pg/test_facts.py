"""`fsdp2.tools.facts`: numbers against hand computation, and against the collectives that steps are seen to issue."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, FSDPTypeError, FSDPValueError, MixedPrecisionPolicy, fully_shard
from fsdp2.core.state import states_below
from fsdp2.tools.facts import ModelFacts, facts_of
from tests.harness import fake_world
from tests.harness.counting import Traffic
from tests.harness.fake import FakeWorlds
from tests.harness.internals import groups_of, shard_buffers, unsharded_bytes

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    """Two matrices, the first of 1 MiB in fp32 where ``width`` is 256, and what is small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class LM(nn.Module):
    """An embedding, blocks, a head; ``tied``: of one weight."""

    def __init__(self, *, width: int = 16, blocks: int = 3, words: int = 50, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step(model: nn.Module) -> None:
    model(torch.zeros(2, 3, dtype=torch.long)).float().sum().backward()


def sharded(model: nn.Module, *, root: dict[str, Any] | None = None, **arguments: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **arguments)
    return fully_shard(model, **{**arguments, **(root or {})})


def two_axes() -> Any:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))


def with_tensor_parallelism() -> nn.Module:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = LM(width=256)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})  # type: ignore[arg-type]
    return sharded(model, mesh=mesh["dp"])


def tied_apart() -> nn.Module:
    """The embedding is a group of its own, and the head another one, which uses its weight."""
    model = LM(tied=True)
    fully_shard(model.embed)
    fully_shard(model.head)
    return sharded(model)


def with_frozen(**arguments: Any) -> nn.Module:
    model = LM(width=256)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].norm.requires_grad_(False)  # type: ignore[union-attr]
    return sharded(model, **arguments)


def with_ignored() -> nn.Module:
    model = LM()
    return sharded(model, ignored_params=[model.head.weight])


def two_dtypes() -> nn.Module:
    model = LM(width=256)
    for block in model.blocks:
        block.norm.double()
        block.forward = lambda x, block=block: x + block.down(block.up(block.norm(x.double()).float()))  # type: ignore[method-assign,assignment]
    return sharded(model)


def owned() -> nn.Module:
    model = LM(width=256)
    mesh = init_device_mesh("cpu", (8,))
    owners = fsdp2.balanced_owners(model.blocks, mesh, units=list(model.blocks))
    return sharded(model, mesh=mesh, shard_placement_fn=owners)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "1D": lambda: sharded(LM()),
    "1D, direct": lambda: sharded(LM(width=512)),
    "one group": lambda: fully_shard(LM()),
    "HSDP": lambda: sharded(LM(width=256), mesh=two_axes()),
    "HSDP, strategies": lambda: sharded(LM(), mesh=two_axes(), strategy="zero2"),
    "zero1": lambda: sharded(LM(), strategy="zero1"),
    "replicated": lambda: sharded(LM(), mesh=two_axes(), strategy="replicate"),
    "small replicated": lambda: sharded(LM(width=256), replicate_below=4096),
    "tensor parallelism": with_tensor_parallelism,
    "mixed precision": lambda: sharded(LM(width=512), mp_policy=MIXED),
    "fp16": lambda: sharded(LM(width=512), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16)),
    "tied inside": lambda: sharded(LM(tied=True)),
    "tied apart": tied_apart,
    "frozen": with_frozen,
    "frozen and mixed": lambda: with_frozen(mp_policy=MIXED),
    "kept after forward": lambda: sharded(LM(), reshard_after_forward=False),
    "all freed after forward": lambda: sharded(LM(), reshard_after_forward=True),
    "to fewer ranks": lambda: sharded(LM(width=512), reshard_after_forward=2),
    "to fewer ranks, mixed": lambda: sharded(LM(width=256), reshard_after_forward=4, mp_policy=MIXED),
    "another dim": lambda: sharded(
        LM(width=256), shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None, mp_policy=MIXED
    ),
    "uneven": lambda: sharded(LM(width=150, words=4099)),
    "ignored": with_ignored,
    "offloaded": lambda: sharded(LM(width=256), offload_policy=CPUOffloadPolicy()),
    "two dtypes": two_dtypes,
    "owned": owned,
    "row blocks": lambda: sharded(LM(width=256), shard_placement_fn=lambda p: fsdp2.RowBlocks(48)),
}


def expected_traffic(facts: ModelFacts) -> collections.Counter[tuple[str, int, int]]:
    """As `Traffic` counts it."""
    counts: collections.Counter[tuple[str, int, int]] = collections.Counter()
    for each in facts.exchanges:
        for nbytes in each.members:
            counts[each.kind, 0 if each.kind == "all-reduce" else len(each.ranks), nbytes] += each.times
    return counts


@pytest.mark.parametrize("name", list(MODELS))
def test_collectives_and_bytes_are_those_of_a_step(name: str, simulate: FakeWorlds) -> None:
    simulate(8, rank=5)
    model = MODELS[name]()
    planned = facts_of(model)
    step(model)  # the first also compares plans
    learned = facts_of(model)
    assert not planned.order.is_learned and learned.order.is_learned
    assert expected_traffic(planned) == expected_traffic(learned)
    with Traffic() as traffic:
        step(model)
    assert traffic.counts == expected_traffic(learned)
    for exchange in learned.exchanges:
        assert 5 in exchange.ranks


@pytest.mark.parametrize("name", list(MODELS))
def test_memory_is_what_the_engine_allocates(name: str, simulate: FakeWorlds) -> None:
    simulate(8, rank=5)
    model = MODELS[name]()
    facts = facts_of(model)
    for group, found in zip(dict.fromkeys(groups_of(model)), facts.groups, strict=True):
        assert found.shard_bytes == sum(shard.untyped_storage().nbytes() for shard in shard_buffers(group))
    step(model)
    after = facts_of(model)
    for group, found in zip(dict.fromkeys(groups_of(model)), after.groups, strict=True):
        assert found.unsharded_bytes == unsharded_bytes(group)
        gather = group.storage.gather
        assert gather is not None
        assert found.staging_bytes == gather._staging.nbytes
        assert found.send_bytes == gather._send.nbytes
        for param in found.params:
            assert param.local_bytes == param.rests.itemsize * torch.Size(param.local_shape).numel()
        delivered = [bucket._buffer.flat.nbytes for bucket in group.reducer.buckets if bucket._buffer is not None]
        assert found.gradient_bytes == sum(delivered)
        if found.rests is not None:
            rests: Any = group.storage.post_forward
            assert found.rests.nbytes == sum(part.nbytes for part in rests._parts)
            assert found.rests.staging_bytes == rests.gather._staging.nbytes
