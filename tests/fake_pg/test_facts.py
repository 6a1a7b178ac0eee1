"""`fsdp2.tools.facts`: numbers against hand computation, and against the collectives that steps are seen to issue."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
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
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter
from tests.harness.parity.extensions import OneArgument
from tests.harness.shared.language_model import LM, sharded, step, two_axes

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


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


def merged(parameter: nn.Parameter) -> fsdp2.BlockShard | None:
    return fsdp2.BlockShard.split_leading(parameter.shape, 2) if parameter.dim() == 2 else None


MODELS: dict[str, Callable[[], nn.Module]] = {
    "1D": lambda: sharded(LM()),
    "1D, direct": lambda: sharded(LM(width=512)),
    "one group": lambda: fully_shard(LM()),
    "HSDP": lambda: sharded(LM(width=256), mesh=two_axes()),
    "HSDP, strategies": lambda: sharded(LM(), mesh=two_axes(), strategy="zero2"),
    "zero1": lambda: sharded(LM(), strategy="zero1"),
    "replicated": lambda: sharded(LM(), mesh=two_axes(), strategy="replicate"),
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
    "merged rows": lambda: sharded(LM(width=256), shard_placement_fn=merged),
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
        for param in found.params:
            assert param.local_bytes == param.rests.itemsize * torch.Size(param.local_shape).numel()
        gradients = [p.sharded.grad.to_local().untyped_storage() for p in group.params if p.sharded.grad is not None]
        storages = {storage._cdata: storage.nbytes() for storage in gradients}
        assert found.gradient_bytes == sum(storages.values())
        if found.rests is not None:
            rests: Any = group.storage.post_forward
            assert found.rests.nbytes == sum(part.nbytes for part in rests._parts)


# ---- by hand --------------------------------------------------------------------------------------------


def test_numbers_by_hand(simulate: FakeWorlds) -> None:
    """One matrix of 1024 x 512 (2 MiB, direct), and a bias of 10 elements (packed), on 4 ranks, in bf16."""
    simulate(4, rank=3)
    model = nn.Module()
    model.weight, model.bias = nn.Parameter(torch.ones(1024, 1024)), nn.Parameter(torch.ones(10))
    fully_shard(model, mp_policy=MIXED)
    facts = facts_of(model)
    (group,) = facts.groups
    weight, bias = group.params
    assert (weight.name, weight.shape, weight.local_shape, weight.local_bytes) == (
        "weight",
        (1024, 1024),
        (256, 1024),
        256 * 1024 * 4,
    )
    # ceil(10 / 4) = 3 rows per rank: the last has one.
    assert (bias.local_shape, bias.local_bytes) == ((1,), 4)
    assert bias.dealt_out == "3 rows per rank"
    assert bias.unsharded_bytes == 20
    assert (weight.gather, bias.gather, weight.reduce, bias.reduce) == ("direct", "packed", "direct", "packed")
    assert (weight.rests, weight.computes, weight.reduces) == (torch.float32, torch.bfloat16, torch.float32)
    assert weight.placements == ("Shard(0)",) and [axis.size for axis in weight.mesh] == [4]
    # The packed row: 3 elements, padded to 16 bytes in bf16: 8 elements. The matrix starts at 128 bytes.
    (buffer,) = group.buffers
    assert buffer.shard_bytes == 2**20 + 64 * 4
    assert group.local_bytes == 2**20 + 4
    forward, reduction = facts.exchanges  # the root is not gathered again in backward
    assert (forward.during, forward.kind, forward.members, forward.times) == ("forward", "all-gather", (16, 2**19), 1)
    # Reduced in fp32: 3 elements of the bias, presence of two parameters, together 20 bytes, padded to 32.
    assert (reduction.kind, reduction.members) == ("reduce-scatter", (32, 2**19)), "the matrix is sent in bf16"
    assert reduction.sent_bytes == 3 * (32 + 2**19)
    assert facts.nbytes == 4 * (1024 * 1024 + 10) and facts.numel == 1024 * 1024 + 10


def test_bytes_are_told_apart_by_links(simulate: FakeWorlds) -> None:
    """8 ranks on 2 nodes. In a ring of 8 edges two lead to the other node; replicas are 4 apart, on the other node."""
    simulate(8, rank=1)
    model = fully_shard(nn.Linear(64, 64, bias=False))
    (gather, _) = facts_of(model, ranks_per_node=4).exchanges
    nbytes = 8 * 64 * 4  # 8 rows of 64
    assert (gather.inside_bytes, gather.between_bytes) == (7 * nbytes * 6 // 8, 7 * nbytes * 2 // 8)
    (gather, _) = facts_of(model).exchanges
    assert (gather.inside_bytes, gather.between_bytes) == (7 * nbytes, 0)
    hybrid = fully_shard(nn.Linear(64, 64, bias=False), mesh=two_axes())
    gather, scatter, reduction = facts_of(hybrid, ranks_per_node=4).exchanges
    assert gather.ranks == scatter.ranks == (0, 1, 2, 3) and reduction.ranks == (1, 5)
    assert (gather.inside_bytes, gather.between_bytes) == (3 * 16 * 64 * 4, 0)
    # Two ranks: each sends half to be summed, and half of the sums: 16 rows and one presence, padded to 128 bytes.
    assert (reduction.inside_bytes, reduction.between_bytes) == (0, 16 * 64 * 4 + 128)


def test_what_is_said_of_parameters(simulate: FakeWorlds) -> None:
    simulate(8, rank=5)
    model = LM(width=256, tied=True)
    model.blocks[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    sharded(model, ignored_params=[model.blocks[1].down.weight], mesh=two_axes())  # type: ignore[union-attr]
    facts = facts_of(model)
    assert [group.name for group in facts.groups] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert [each.name for each in facts.ignored] == ["blocks.1.down.weight"] and facts.unsharded == ()
    params = {param.name: param for group in facts.groups for param in group.params}
    assert params["embed.weight"].other_names == ("head.weight",) and params["embed.weight"].is_tied
    assert not params["blocks.0.up.weight"].is_trainable and params["blocks.0.up.weight"].reduces is None
    assert params["blocks.0.up.weight"].reduce == "stays"
    assert params["scale"].gather_reason == "no dims"
    assert params["scale"].placements == ("Replicate()", "Replicate()")
    assert params["blocks.0.norm.bias"].placements == ("Replicate()", "Shard(0)")
    assert [str(axis) for axis in params["scale"].mesh] == ["replicate=2", "shard=4"]
    group = facts.groups[1]
    assert group.shard_ranks == (4, 5, 6, 7) and group.replicate_ranks == (1, 5)
    assert (group.backend, group.is_root, group.strategy) == ("fake", False, "zero3")


def test_settings_and_orders(simulate: FakeWorlds) -> None:
    simulate(8)
    model = LM()
    sharded(model, offload_policy=CPUOffloadPolicy())
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])  # type: ignore[union-attr]
    model.blocks[1].set_reshard_after_backward(False)  # type: ignore[union-attr]
    model.set_gradient_divide_factor(2.0)  # type: ignore[operator]
    model.set_prefetch_budget(10**6)  # type: ignore[operator]
    facts = facts_of(model)
    root, first, second, _ = facts.groups
    assert first.prefetches == ("blocks.1", "blocks.2") and second.prefetches is None
    assert second.reshard_after_backward is False and root.settings == (("divide_factor", "2.0"),)
    assert root.offloads == ("parameters", "gradients", "optimizer_state") and facts.order.prefetch_bytes == 10**6
    assert facts.order.forward == (0, 1, 2, 3) and facts.order.backward == (0, 3, 2, 1)
    step(model)
    assert facts_of(model).order.forward == (0, 1, 2, 3) and facts_of(model).order.backward == (0, 3, 2, 1)


def test_custom_collectives_take_everything_packed(simulate: FakeWorlds) -> None:
    simulate(8)
    model: Any = fully_shard(LM(width=512))
    assert {param.gather for param in facts_of(model).groups[0].params} == {"packed", "direct"}
    model.set_custom_all_gather(custom_all_gather([]))
    model.set_custom_reduce_scatter(custom_reduce_scatter([]))
    before = facts_of(model)
    assert {(param.gather, param.reduce) for param in before.groups[0].params} == {("packed", "packed")}
    step(model)
    with Traffic() as traffic:
        step(model)
    assert traffic.counts == expected_traffic(before) == expected_traffic(facts_of(model))
    assert [len(each.members) for each in before.exchanges] == [1, 1]


def test_tensors_that_gather_themselves(simulate: FakeWorlds) -> None:
    simulate(8)
    model = LM(width=64)
    for block in model.blocks:
        block.up.weight = nn.Parameter(OneArgument(block.up.weight.detach()))
    sharded(model)
    planned = facts_of(model)
    param = next(param for param in planned.groups[1].params if param.name == "blocks.0.up.weight")
    assert (param.gather, param.buffer, param.local_bytes) == ("by itself", None, 256 * 64 * 4 // 8)
    assert not planned.groups[1].is_exact and planned.groups[0].is_exact
    step(model)
    with Traffic() as traffic:
        step(model)
    assert traffic.counts == expected_traffic(planned) == expected_traffic(facts_of(model))


# ---- at any time, of anything ------------------------------------------------------------------------------


def test_on_meta_as_afterwards(simulate: FakeWorlds) -> None:
    simulate(8, rank=2)
    with torch.device("meta"):
        model = LM(width=256)
    sharded(model, mp_policy=MIXED)
    on_meta = facts_of(model)
    model.to_empty(device="cpu")
    assert on_meta.is_meta
    there = facts_of(model)
    assert (there.groups, there.exchanges) == (on_meta.groups, on_meta.exchanges)


def test_nothing_changes(simulate: FakeWorlds) -> None:
    simulate(8)
    model = sharded(LM())
    before = [(id(p), p._version) for p in model.parameters()]
    facts_of(model)
    assert all(state.root is None for state in states_below(model))
    assert [(id(p), p._version) for p in model.parameters()] == before
    assert not any(group.is_prepared for group in groups_of(model))


def test_a_model_that_is_not_sharded() -> None:
    facts = facts_of(LM())
    assert (facts.groups, facts.roots, facts.exchanges, facts.world_size) == ((), (), (), 1)
    assert len(facts.unsharded) == 17 and facts.nbytes == sum(each.nbytes for each in facts.unsharded)


def test_only_parts_are_sharded(simulate: FakeWorlds) -> None:
    simulate(8)
    model = LM()
    for block in model.blocks:
        fully_shard(block)
    facts = facts_of(model)
    assert facts.roots == ("blocks.0", "blocks.1", "blocks.2")
    assert {each.name for each in facts.unsharded} == {"embed.weight", "head.weight"}
    assert all(group.is_root and group.reshard_after_forward is False for group in facts.groups)
    step(model)
    with Traffic() as traffic:
        step(model)
    assert traffic.counts == expected_traffic(facts_of(model))


def test_a_list_of_modules(simulate: FakeWorlds) -> None:
    simulate(8)
    model = LM()
    fully_shard([model.embed, model.head])
    sharded(model)
    facts = facts_of(model)
    group = next(group for group in facts.groups if group.name == "embed")
    assert group.modules == ("embed", "head") and facts.roots == ("",)
    step(model)
    with Traffic() as traffic:
        step(model)
    assert traffic.counts == expected_traffic(facts)


def test_wrong_arguments(simulate: FakeWorlds) -> None:
    simulate(8)
    model = sharded(LM())
    with pytest.raises(FSDPTypeError, match=r"facts_of\(\) takes an nn.Module as 'model', got int"):
        facts_of(3)  # type: ignore[arg-type]
    with pytest.raises(FSDPValueError, match="ranks_per_node must be at least 1, got 0"):
        facts_of(model, ranks_per_node=0)
    with pytest.raises(FSDPTypeError, match="ranks_per_node must be an int"):
        facts_of(model, ranks_per_node=True)


def test_after_the_process_groups_are_gone() -> None:
    with fake_world(4):
        model = sharded(LM())
    with pytest.raises(FSDPRuntimeError, match=r"the process groups that .* was sharded over have been destroyed"):
        facts_of(model)
