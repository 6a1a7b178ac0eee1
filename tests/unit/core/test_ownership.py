"""Parameters that one rank has whole: the region that they share, by arithmetic and through gathers and packing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from fsdp2.core.gather import Gather
from fsdp2.core.layout import DIRECT_ALIGNMENT_BYTES, BufferLayout, GradientLayout, Region, padded_row
from fsdp2.core.plan import GatherPlan, GroupPlan, ParamPlan
from fsdp2.core.sharding import Partition
from fsdp2.plugs.memory.reshard_to_fewer import layout_over
from tests.unit.core.helpers import CPU, FULL, HALF, FreshMemory, exchange, sources_of
from tests.unit.helpers import for_each


def owned(shape: Sequence[int], owner: int, order: tuple[int, ...] = ()) -> Partition:
    return Partition(tuple(shape), 0, order, owner=owner)


def drawn_cuts(generator: random.Random, world_size: int) -> list[Partition]:
    """Owned and others, of any sizes, among them none, in any order in memory."""
    cuts = []
    for _ in range(generator.randint(1, 9)):
        shape = tuple(generator.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(generator.randint(1, 3)))
        order = tuple(generator.sample(range(len(shape)), len(shape))) if generator.random() < 0.3 else ()
        if generator.random() < 0.7:
            cuts.append(owned(shape, generator.randrange(world_size), order))
        else:
            cuts.append(Partition(shape, generator.randrange(len(shape)), order))
    return cuts


def test_the_worked_example() -> None:
    region = Region.build([0, None, 2, 0], [2, 9, 2, 1], world_size=3, alignment=1)
    assert region.capacity == 3
    assert region.offsets == (0, None, 6, 2)
    assert region.filling == ((0, 2), (3, 1), (None, 3), (2, 2), (None, 1))


@for_each("seed", range(20))
def test_the_region_is_filled_without_gaps_or_overlaps(seed: int) -> None:
    generator = random.Random(seed)
    world_size, alignment = generator.choice([1, 2, 4, 64]), generator.choice([1, 4, 32])
    owners = [generator.choice([None, *range(world_size)]) for _ in range(generator.randint(1, 12))]
    numels = [generator.choice([0, 1, 7, 64, 100]) for _ in owners]
    region = Region.build(owners, numels, world_size=world_size, alignment=alignment)
    position, seen = 0, []
    for index, numel in region.filling:
        assert numel > 0
        if index is not None:
            assert (region.offsets[index], numels[index]) == (position, numel)
            assert position % alignment == 0 and position // region.capacity == owners[index]
            assert (position + numel - 1) // region.capacity == owners[index]
            seen.append(index)
        position += numel
    assert position == world_size * region.capacity
    assert sorted(seen) == [index for index, owner in enumerate(owners) if owner is not None and numels[index]]
    loads = [
        sum(-(-n // alignment) * alignment for o, n in zip(owners, numels, strict=True) if o == rank)
        for rank in range(world_size)
    ]
    assert region.capacity == max(loads), "no more than the rank that owns most needs"


@for_each("threshold", [0, 1 << 30])
@for_each("custom", [False, True])
@for_each("seed", range(8))
def test_gathering_brings_every_parameter_to_its_place(seed: int, custom: bool, threshold: float) -> None:
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 3, 4])
    cuts = drawn_cuts(generator, world_size)
    dtypes = generator.choice([(FULL, FULL), (FULL, HALF)])
    params = [torch.empty_strided(cut.shape, cut.stride(cut.shape)).copy_(torch.randn(cut.shape)) for cut in cuts]
    ranks = sources_of([params], [cuts], [dtypes], world_size=world_size, threshold=threshold)
    layout = ranks[0][0].layout
    if custom:
        ranks = [[type(s)(s.buffers, s.shard, s.layout.all_packed()) for s in sources] for sources in ranks]
    gathers = [
        Gather(sources, world_size, rank, CPU, FreshMemory().allocate if custom else None)
        for rank, sources in enumerate(ranks)
    ]
    for gather in gathers:
        gather.allocate()
        gather.copy_in()
    exchange(gathers)
    for gather, (source,) in zip(gathers, ranks, strict=True):
        gather.copy_out()
        for param, slot in zip(params, layout.slots, strict=True):
            found = source.unsharded[slot.unsharded_offset :].as_strided(
                param.shape, slot.partition.stride(param.shape)
            )
            assert torch.equal(found, param.to(found.dtype))


def test_one_member_carries_all_that_is_owned_and_copies_nothing() -> None:
    cuts = [owned((64, 8), 0), owned((64, 8), 1), owned((32, 8), 1), owned((64, 8), 3)]
    params = [torch.randn(cut.shape) for cut in cuts]
    (source,) = sources_of([params], [cuts], [(FULL, FULL)], world_size=4, threshold=0)[0]
    gather = Gather([source], 4, 0, CPU, None)
    ((output, input),) = gather.members
    assert output.data_ptr() == source.unsharded.data_ptr() and input.data_ptr() == source.shard.data_ptr()
    assert (output.numel(), input.numel()) == (4 * 96 * 8, 96 * 8)
    assert gather.allocated_bytes == 0, "neither sent from a copy nor staged"


@for_each("seed", range(20))
def test_on_fewer_ranks_a_neighbour_owns_what_several_did(seed: int) -> None:
    generator = random.Random(seed)
    world_size = generator.choice([2, 4, 8, 12])
    fewer = generator.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
    cuts, itemsize = drawn_cuts(generator, world_size), generator.choice([2, 4])
    layout = BufferLayout.build(cuts, world_size=world_size, itemsize=2, direct_threshold_bytes=256)
    parts = layout_over(layout, fewer, itemsize)
    assert (parts.world_size, parts.unsharded_numel) == (fewer, layout.unsharded_numel)
    assert (parts.region is None) == (layout.region is None)
    for slot, before in zip(parts.slots, layout.slots, strict=True):
        assert slot.unsharded_offset == before.unsharded_offset
        if parts.region is None or before.partition.owner is None:
            continue
        assert slot.partition.owner == before.partition.owner * fewer // world_size
        start = parts.region.unsharded_offset + slot.partition.owner * parts.region.shard_numel
        assert (
            slot.shard_offset - parts.region.shard_offset == slot.unsharded_offset - start or not slot.partition.numel
        )
        assert slot.shard_offset + slot.partition.numel <= parts.shard_numel
        numels = [math.prod(slot.local_shape(rank)) for rank in range(fewer)]
        assert numels == [slot.partition.numel if rank == slot.partition.owner else 0 for rank in range(fewer)]


@for_each("threshold", [0, math.inf])
@for_each("seed", range(12))
def test_gradient_slots_lie_apart(seed: int, threshold: float) -> None:
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 4, 64])
    cuts = drawn_cuts(generator, world_size)
    direct = [cut.outer == 1 and generator.random() < 0.5 for cut in cuts]
    layout = GradientLayout.build(cuts, direct, world_size=world_size, itemsize=4, region_threshold_bytes=threshold)
    assert layout.packed_numel == padded_row(layout.presence_offset + len(cuts), 4)
    for rank in range(world_size):
        end = 0
        mine = [slot for slot in layout.slots if slot.partition.owner in (None, rank)]
        places = [(s.offset, s.partition.numel if s.partition.owner == rank else s.shard_numel) for s in mine]
        for offset, numel in sorted([*places, (layout.presence_offset, len(cuts))]):
            assert offset >= end or not numel
            end = max(end, offset + numel)
        assert end <= layout.numel
    if layout.region is not None:
        assert layout.region.direct == (threshold == 0)
        assert sum(numel for _, numel in layout.filling) == layout.region.partition.numel
        if layout.region.direct:
            assert layout.region.offset * 4 % DIRECT_ALIGNMENT_BYTES == 0


def test_without_owners_nothing_changes() -> None:
    layout = BufferLayout.build([Partition((3, 2)), Partition((2,))], world_size=2, itemsize=4)
    assert layout.region is None and layout.carried is layout.slots
    gradients = GradientLayout.build([Partition((3, 2)), Partition((2,))], [False, False], world_size=2, itemsize=4)
    assert gradients.region is None and gradients.carried is gradients.slots and gradients.filling == ()


def test_a_plan_names_owners_and_what_their_balance_costs() -> None:
    layout = BufferLayout.build([owned((64, 8), 1), Partition((3, 2))], world_size=4, itemsize=4)
    params = tuple(ParamPlan(name, slot.partition.shape, True) for name, slot in zip("ab", layout.slots, strict=True))
    text = str(GroupPlan("mesh", params, (GatherPlan(FULL, FULL, (0, 1), layout),), ()))
    assert "owned: 512 elements in 2048, 512 for each rank" in text
    assert "a [64, 8]: the whole on rank 1, packed" in text
    assert "b [3, 2]: 1 rows per rank, packed" in text
