"""Slot arithmetic: properties over random shapes, and the worked example of the docstring."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fsdp2.core.layout import (
    DIRECT_ALIGNMENT_BYTES,
    DIRECT_THRESHOLD_BYTES,
    PACKED_ALIGNMENT_BYTES,
    SMALLEST_ALIGNED_BYTES,
    BufferLayout,
    GradientLayout,
    align,
    padded_row,
)
from fsdp2.core.sharding import Partition, ceil_div, memory_order, scatter_rows
from fsdp2.plugs.memory.reshard_to_fewer import layout_over
from tests.unit.helpers import for_each


def random_cuts(generator: random.Random) -> list[Partition]:
    """Any sizes, any dim or none, dims in any order in memory, some in blocks of rows."""
    cuts = []
    for _ in range(generator.randint(1, 7)):
        shape = tuple(generator.choice([0, 1, 2, 3, 5, 8, 13, 64]) for _ in range(generator.randint(0, 4)))
        dim = generator.randrange(len(shape)) if shape and generator.random() < 0.9 else None
        order = tuple(generator.sample(range(len(shape)), len(shape))) if generator.random() < 0.3 else ()
        block_rows = generator.choice([1, 1, 1, 2, 3, 7, 100]) if dim is not None else 1
        cuts.append(Partition(shape, dim, order, block_rows))
    return cuts


def in_memory(tensor: torch.Tensor, cut: Partition) -> torch.Tensor:
    """Flat, as the elements follow each other in memory."""
    return tensor.permute(cut.order or tuple(range(tensor.dim()))).flatten()


def chunk_of(whole: torch.Tensor, cut: Partition, world_size: int, rank: int) -> torch.Tensor:
    """What torch says ``rank`` holds: its chunk, empty if there are fewer than ranks; all of it if nothing is cut.

    Of blocks of rows: the blocks of torch's chunk of their numbers.
    """
    if cut.dim is None:
        return whole
    chunks = whole.chunk(world_size, cut.dim) if whole.shape[cut.dim] else ()
    if cut.block_rows > 1:
        blocks = whole.split(cut.block_rows, cut.dim) if whole.shape[cut.dim] else ()
        numbers = torch.arange(len(blocks)).chunk(world_size) if blocks else ()
        chunks = tuple(torch.cat([blocks[number] for number in chunk], cut.dim) for chunk in numbers)
    return chunks[rank] if rank < len(chunks) else whole.narrow(cut.dim, 0, 0)


def gathered(layout: BufferLayout, shards: list[torch.Tensor]) -> torch.Tensor:
    """The unsharded buffer, from every rank's shard buffer: chunks of the ranks side by side in the dim."""
    unsharded = torch.full((layout.unsharded_numel,), float("nan"))
    for slot in layout.slots:
        cut, parts = slot.partition, []
        for rank, shard in enumerate(shards):
            shape = slot.local_shape(rank)
            flat = shard[slot.shard_offset : slot.shard_offset + math.prod(shape)]
            parts.append(flat.as_strided(shape, cut.stride(shape)))
        whole = parts[-1] if cut.dim is None else torch.cat(parts, cut.dim)
        assert tuple(whole.shape) == cut.shape
        unsharded[slot.unsharded_offset : slot.unsharded_offset + cut.numel] = in_memory(whole, cut)
    return unsharded


def scattered(layout: BufferLayout, params: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The shard buffer of ``rank``."""
    shard = torch.zeros(layout.shard_numel)
    for param, slot in zip(params, layout.slots, strict=True):
        chunk = chunk_of(param, slot.partition, layout.world_size, rank)
        assert tuple(chunk.shape) == slot.local_shape(rank)
        start, stop = slot.partition.part(slot.rows, rank)
        assert slot.partition.dim is None or torch.equal(param.narrow(slot.partition.dim, start, stop - start), chunk)
        assert chunk.numel() <= slot.shard_numel
        shard[slot.shard_offset : slot.shard_offset + chunk.numel()] = in_memory(chunk, slot.partition)
    return shard


def assert_reads(layout: BufferLayout, unsharded: torch.Tensor, params: list[torch.Tensor]) -> None:
    for param, slot in zip(params, layout.slots, strict=True):
        stride = slot.partition.stride(slot.partition.shape)
        assert torch.equal(unsharded[slot.unsharded_offset :].as_strided(slot.partition.shape, stride), param)


@for_each("seed", range(20))
def test_slots_are_aligned_disjoint_and_packed_first(seed: int) -> None:
    generator = random.Random(seed)
    itemsize = generator.choice([1, 2, 4, 8])
    world_size = generator.choice([1, 2, 4, 64])
    threshold = generator.choice([0, 512, 1 << 20])
    layout = BufferLayout.build(
        random_cuts(generator), world_size=world_size, itemsize=itemsize, direct_threshold_bytes=threshold
    )
    shards = [(s.shard_offset, s.shard_numel, s.direct) for s in layout.slots]
    wholes = [(s.unsharded_offset, s.partition.numel, s.direct) for s in layout.slots]
    for length, intervals in ((layout.shard_numel, shards), (layout.unsharded_numel, wholes)):
        end = 0
        for offset, numel, direct in sorted(intervals):
            if intervals is wholes or direct or numel * itemsize >= SMALLEST_ALIGNED_BYTES:
                alignment = DIRECT_ALIGNMENT_BYTES if direct else PACKED_ALIGNMENT_BYTES
                assert offset >= end and offset * itemsize % alignment == 0
            else:
                assert offset == end, "small packed shards lie without gaps"
            end = offset + numel
        assert end <= length
    for slot in layout.slots:
        arrives_in_order = slot.partition.dim is not None and slot.partition.outer == 1
        assert slot.direct == (arrives_in_order and world_size * slot.shard_numel * itemsize >= threshold)
        assert slot.direct == (slot.shard_offset >= layout.packed_numel) or slot.shard_numel == 0
    packed = sum(slot.shard_numel for slot in layout.slots if not slot.direct)
    ends = [slot.shard_offset + slot.shard_numel for slot in layout.slots if not slot.direct and slot.shard_numel]
    assert packed <= max(ends, default=0) <= packed * 9 / 8
    assert layout.packed_numel == padded_row(max(ends, default=0), itemsize)
    waste = layout.shard_numel - sum(slot.shard_numel for slot in layout.slots)
    assert waste * itemsize <= (len(layout.slots) + 2) * DIRECT_ALIGNMENT_BYTES


@for_each("seed", range(20))
def test_gradient_slots_are_disjoint_and_carry_presence(seed: int) -> None:
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 4, 64])
    threshold = generator.choice([0, 512])
    values = BufferLayout.build(
        random_cuts(generator), world_size=world_size, itemsize=4, direct_threshold_bytes=threshold
    )
    layout = GradientLayout.build(
        [slot.partition for slot in values.slots],
        [slot.direct for slot in values.slots],
        world_size=world_size,
        itemsize=4,
    )
    packed = [slot for slot in layout.slots if not slot.direct]
    assert sum(slot.shard_numel + slot.pad_numel for slot in packed) == layout.presence_offset
    assert layout.presence_offset <= sum(slot.shard_numel for slot in packed) * 9 / 8
    assert layout.packed_numel == padded_row(layout.presence_offset + len(layout.slots), 4)
    end = 0
    for slot in sorted(layout.slots, key=lambda slot: slot.offset):
        assert slot.offset >= end
        end = slot.offset + slot.shard_numel
        if slot.direct:
            assert slot.partition.size % world_size == 0 and slot.offset >= layout.packed_numel
    assert end <= layout.numel


@for_each("seed", range(40))
def test_any_parameters_survive_the_way_there_and_back(seed: int) -> None:
    """Cut into shards as `torch.chunk` cuts, put together again, and read through the slots: the parameters."""
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 3, 4, 7, 8])
    cuts, threshold = random_cuts(generator), generator.choice([0, 256, 1 << 30])
    layout = BufferLayout.build(cuts, world_size=world_size, itemsize=4, direct_threshold_bytes=threshold)
    params = [torch.randn(cut.shape) for cut in cuts]
    unsharded = gathered(layout, [scattered(layout, params, rank) for rank in range(world_size)])
    assert_reads(layout, unsharded, params)


@for_each("seed", range(20))
def test_fewer_ranks_fill_the_same_unsharded_buffer(seed: int) -> None:
    """The parts of a divisor of the ranks, in a dtype of another size, lie apart, aligned, and gather to the same."""
    generator = random.Random(seed)
    world_size = generator.choice([2, 4, 6, 8, 12])
    fewer = generator.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
    cuts, threshold = random_cuts(generator), generator.choice([0, 256, 1 << 30])
    layout = BufferLayout.build(cuts, world_size=world_size, itemsize=2, direct_threshold_bytes=threshold)
    itemsize = generator.choice([2, 4])
    parts = layout_over(layout, fewer, itemsize)
    assert (parts.world_size, parts.unsharded_numel) == (fewer, layout.unsharded_numel)
    for slot, before in zip(parts.slots, layout.slots, strict=True):
        assert (slot.unsharded_offset, slot.direct) == (before.unsharded_offset, before.direct)
        if slot.direct:
            assert fewer * slot.shard_numel <= world_size * before.shard_numel, "it fits where the slot is"
        if slot.direct or slot.shard_numel * itemsize >= SMALLEST_ALIGNED_BYTES:
            alignment = DIRECT_ALIGNMENT_BYTES if slot.direct else PACKED_ALIGNMENT_BYTES
            assert slot.shard_offset * itemsize % alignment == 0
        assert slot.direct == (slot.shard_offset >= parts.packed_numel) or slot.shard_numel == 0
    end = 0
    for slot in sorted(parts.slots, key=lambda slot: (slot.shard_offset, slot.shard_numel)):
        assert slot.shard_offset >= end
        end = slot.shard_offset + slot.shard_numel
    assert end <= parts.shard_numel
    params = [torch.randn(cut.shape) for cut in cuts]
    unsharded = gathered(parts, [scattered(parts, params, rank) for rank in range(fewer)])
    assert_reads(parts, unsharded, params)


@for_each("seed", range(15))
def test_gradients_of_any_dim_are_reduced_to_their_chunks(seed: int) -> None:
    """Packed and sent as the layout says, summed over the ranks: on each rank the sum of `torch.chunk`'s chunks."""
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 3, 4, 8])
    cuts = random_cuts(generator)
    direct = [cut.dim is not None and cut.outer == 1 and generator.random() < 0.5 for cut in cuts]
    layout = GradientLayout.build(cuts, direct, world_size=world_size, itemsize=4)
    gradients = [[torch.randint(-99, 99, cut.shape).float() for cut in cuts] for _ in range(world_size)]  # exact sums
    sent = [sent_by(layout, of_rank, world_size) for of_rank in gradients]
    for rank in range(world_size):
        output = torch.full((layout.numel,), float("nan"))
        output[: layout.packed_numel] = torch.stack([packed[rank] for packed, _ in sent]).sum(0)
        for index, slot in enumerate(layout.slots):
            assert slot.direct <= direct[index]
            if slot.direct and slot.shard_numel:
                parts = torch.stack([alone[index][rank] for _, alone in sent])
                output[slot.offset : slot.offset + slot.shard_numel] = parts.sum(0)
        presence = output[layout.presence_offset : layout.presence_offset + len(cuts)]
        assert torch.equal(presence, torch.full_like(presence, world_size))
        assert not output[layout.presence_offset + len(cuts) : layout.packed_numel].any()
        for index, slot in enumerate(layout.slots):
            chunks = [chunk_of(of_rank[index], slot.partition, world_size, rank) for of_rank in gradients]
            expected = torch.stack(chunks).sum(0)
            assert tuple(expected.shape) == slot.local_shape(rank)
            found = output[slot.offset :].as_strided(expected.shape, slot.partition.stride(expected.shape))
            assert torch.equal(found, expected)


def sent_by(
    layout: GradientLayout, gradients: list[torch.Tensor], world_size: int
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """What one rank sends, rank-major: the packed part (world_size, n), and by index what travels alone."""
    packed, alone = torch.full((world_size, layout.packed_numel), float("nan")), {}
    for index, (slot, gradient) in enumerate(zip(layout.slots, gradients, strict=True)):
        if slot.direct:
            flat = in_memory(gradient, slot.partition)
            alone[index] = flat.view(world_size, -1) if gradient.numel() else flat
            continue
        dealt = gradient.permute(slot.partition.order or tuple(range(gradient.dim())))
        if slot.is_dealt_out and slot.shard_numel:
            pieces = scatter_rows(dealt, slot.partition, slot.rows, world_size).reshape(world_size, -1)
        for rank in range(world_size):
            chunk = in_memory(chunk_of(gradient, slot.partition, world_size, rank), slot.partition)
            packed[rank, slot.offset - slot.pad_numel : slot.offset + slot.shard_numel] = 0
            part = packed[rank, slot.offset : slot.offset + slot.shard_numel]
            part[: chunk.numel()] = chunk
            if slot.is_dealt_out and slot.shard_numel:
                assert torch.equal(pieces[rank], part)
    packed[:, layout.presence_offset :] = 0
    packed[:, layout.presence_offset : layout.presence_offset + len(gradients)] = 1
    assert not packed.isnan().any(), "alignment is padding of some slot, so that one kernel fills everything"
    return packed, alone


@for_each("seed", range(30))
def test_the_order_in_memory_is_that_of_the_strides(seed: int) -> None:
    generator = random.Random(seed)
    shape = tuple(generator.choice([1, 2, 3, 5]) for _ in range(generator.randint(0, 4)))
    order = tuple(generator.sample(range(len(shape)), len(shape)))
    stride = Partition(shape, 0 if shape else None, order).stride(shape)
    tensor = torch.empty_strided(shape, stride)
    assert tensor.permute(order).is_contiguous()
    found = memory_order(tensor.shape, tensor.stride())
    assert bool(found) is not tensor.is_contiguous()
    assert tensor.permute(found or tuple(range(len(shape)))).is_contiguous()


@for_each(
    "tensor",
    [
        torch.empty(4, 1).expand(4, 3),
        torch.empty(4, 6)[:, :3],
        torch.empty(8)[::2],
        torch.empty(0, 3).t(),
        torch.ones(()),
    ],
)
def test_what_is_not_dense_has_no_order(tensor: torch.Tensor) -> None:
    assert memory_order(tensor.shape, tensor.stride()) == ()


def test_the_worked_example() -> None:
    layout = BufferLayout.build(
        [Partition((3, 2)), Partition((2,))], world_size=2, itemsize=4, direct_threshold_bytes=1 << 30
    )
    a, b = layout.slots
    assert (a.rows, a.shard_offset, b.rows, b.shard_offset) == (2, 0, 1, 4)
    assert (a.unsharded_offset, b.unsharded_offset) == (0, 8)
    assert (layout.packed_numel, layout.unsharded_numel) == (8, 10), "a row of 5 elements is padded to 32 bytes"
    assert [a.partition.part(a.rows, rank) for rank in range(2)] == [(0, 2), (2, 3)]


def test_arithmetic() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [align(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]


@pytest.mark.parametrize("world_size", [8, 512, 4096])
def test_a_row_for_each_of_many_ranks_is_not_mostly_alignment(world_size: int) -> None:
    """What is gathered is the parameters; what is reduced, them, one element of presence for each, and padding."""
    cuts = [Partition((4096,))] * 12
    layout = BufferLayout.build(cuts, world_size=world_size, itemsize=4)
    assert layout.packed_numel * world_size == 12 * 4096
    gradients = GradientLayout.build(cuts, [False] * 12, world_size=world_size, itemsize=4)
    assert gradients.presence_offset * world_size == 12 * 4096
    assert gradients.packed_numel == padded_row(gradients.presence_offset + 12, 4)


@for_each("world_size", [2, 3, 8, 64, 512, 4096])
@for_each("seed", range(10))
def test_rows_of_what_is_packed_are_aligned(seed: int, world_size: int) -> None:
    """NCCL moves words of 16 bytes only where every rank's row starts at a multiple of 16; 128 suits it better."""
    generator = random.Random(seed)
    itemsize = generator.choice([1, 2, 4, 8, 16])
    cuts, threshold = random_cuts(generator), generator.choice([512, DIRECT_THRESHOLD_BYTES])
    if generator.random() < 0.5:  # blocks of a transformer
        width = generator.choice([64, 768, 1000])
        shapes = generator.choices([(width, width), (3 * width, width), (width,), (width, 4 * width)], k=9)
        cuts = [Partition(shape) for shape in shapes]
    layout = BufferLayout.build(cuts, world_size=world_size, itemsize=itemsize, direct_threshold_bytes=threshold)
    direct = [generator.random() < 0.5 for _ in cuts]
    gradients = GradientLayout.build(cuts, direct, world_size=world_size, itemsize=itemsize)
    carried = gradients.presence_offset + len(cuts)
    ends = [slot.shard_offset + slot.shard_numel for slot in layout.slots if not slot.direct]
    for fewer in {1, world_size} | {size for size in (2, 8) if world_size % size == 0}:
        parts = layout_over(layout, fewer, itemsize)
        for row in (parts.packed_numel, parts.shard_numel, parts.all_packed().packed_numel):
            assert_row_is_aligned(row * itemsize)
    for row, numel in ((layout.packed_numel, max(ends, default=0)), (gradients.packed_numel, carried)):
        assert_row_is_aligned(row * itemsize)
        added = (row - numel) * itemsize
        assert added <= max(15, min(DIRECT_ALIGNMENT_BYTES, numel * itemsize // 8)), "the price"


def assert_row_is_aligned(nbytes: int) -> None:
    assert nbytes % (PACKED_ALIGNMENT_BYTES if nbytes < 1024 else DIRECT_ALIGNMENT_BYTES) == 0
