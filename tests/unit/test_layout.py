"""Slot arithmetic: properties over random shapes, and the worked example of the docstring."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fsdp2.layout import (
    DIRECT_ALIGNMENT_BYTES,
    PACKED_ALIGNMENT_BYTES,
    BufferLayout,
    GradientLayout,
    align,
    ceil_div,
)


def random_cuts(generator: random.Random, world_size: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Shapes, and the dims that are cut: any size in dim 0, an even one in others, as `fully_shard` demands."""
    shapes, dims = [], []
    for _ in range(generator.randint(1, 7)):
        shape = [generator.choice([0, 1, 2, 3, 5, 8, 13, 64, 97]) for _ in range(generator.randint(1, 4))]
        dim = generator.randrange(len(shape))
        if dim > 0:
            shape[dim] = world_size * generator.choice([0, 1, 2, 5])
        shapes.append(tuple(shape))
        dims.append(dim)
    return shapes, dims


def chunk_of(whole: torch.Tensor, dim: int, world_size: int, rank: int) -> torch.Tensor:
    """What torch says ``rank`` holds: its chunk, empty if there are fewer than ranks."""
    chunks = whole.chunk(world_size, dim) if whole.shape[dim] else ()
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


def gathered(layout: BufferLayout, shards: list[torch.Tensor]) -> torch.Tensor:
    """The unsharded buffer, from every rank's shard buffer: as collectives concatenate, and copies put in place."""
    world_size = layout.world_size
    unsharded = torch.full((layout.unsharded_numel,), float("nan"))
    for slot in layout.slots:
        parts = torch.stack([shard[slot.shard_offset : slot.shard_offset + slot.shard_numel] for shard in shards])
        if not slot.direct:  # the ranks' parts of each entry before the dim lie side by side
            parts = parts.view(world_size, slot.outer, slot.rows * slot.row_numel).transpose(0, 1)
        end = slot.unsharded_offset + world_size * slot.shard_numel
        unsharded[slot.unsharded_offset : end] = parts.flatten()
    return unsharded


def scattered(layout: BufferLayout, params: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The shard buffer of ``rank``."""
    shard = torch.zeros(layout.shard_numel)
    for param, slot in zip(params, layout.slots, strict=True):
        chunk = chunk_of(param, slot.dim, layout.world_size, rank)
        assert tuple(chunk.shape) == slot.local_shape(rank)
        start, stop = slot.row_range(rank)
        assert torch.equal(param.narrow(slot.dim, start, stop - start), chunk)
        assert chunk.numel() <= slot.shard_numel
        shard[slot.shard_offset : slot.shard_offset + chunk.numel()] = chunk.flatten()
    return shard


def random_shapes(generator: random.Random) -> list[tuple[int, ...]]:
    dims = lambda: tuple(generator.choice([0, 1, 2, 3, 5, 8, 13, 64, 97]) for _ in range(generator.randint(1, 3)))  # noqa: E731
    return [dims() for _ in range(generator.randint(1, 7))]


@pytest.mark.parametrize("seed", range(60))
def test_any_parameters_survive_the_way_there_and_back(seed: int) -> None:
    """Cut into shards, concatenated rank by rank as a collective does, and read through the slots: the parameters."""
    generator = random.Random(seed)
    shapes, world_size = random_shapes(generator), generator.choice([1, 2, 3, 4, 7, 8])
    layout = BufferLayout.build(
        shapes, world_size=world_size, itemsize=4, direct_threshold_bytes=generator.choice([0, 256, 1 << 30])
    )
    params = [torch.randn(shape) for shape in shapes]
    shards = []
    for rank in range(world_size):
        shard = torch.zeros(layout.shard_numel)
        for param, slot in zip(params, layout.slots, strict=True):
            start, stop = slot.row_range(rank)
            rows = param[start:stop]
            assert tuple(rows.shape) == slot.local_shape(rank)
            shard[slot.shard_offset : slot.shard_offset + rows.numel()] = rows.flatten()
        shards.append(shard)
    unsharded = torch.full((layout.unsharded_numel,), float("nan"))
    for slot in layout.slots:
        parts = [shard[slot.shard_offset : slot.shard_offset + slot.shard_numel] for shard in shards]
        unsharded[slot.unsharded_offset : slot.unsharded_offset + world_size * slot.shard_numel] = torch.cat(parts)
    for param, slot, shape in zip(params, layout.slots, shapes, strict=True):
        found = unsharded[slot.unsharded_offset :][: math.prod(shape)].view(shape)
        assert torch.equal(found, param)


@pytest.mark.parametrize("seed", range(40))
def test_slots_are_aligned_disjoint_and_packed_first(seed: int) -> None:
    generator = random.Random(seed)
    itemsize = generator.choice([1, 2, 4, 8])
    world_size = generator.choice([1, 2, 4, 64])
    threshold = generator.choice([0, 512, 1 << 20])
    layout = BufferLayout.build(
        random_shapes(generator), world_size=world_size, itemsize=itemsize, direct_threshold_bytes=threshold
    )
    places = {
        layout.shard_numel: [(s.shard_offset, s.shard_numel, s.direct) for s in layout.slots],
        layout.unsharded_numel: [(s.unsharded_offset, world_size * s.shard_numel, s.direct) for s in layout.slots],
    }
    for length, intervals in places.items():
        end = 0
        for offset, numel, direct in sorted(intervals):
            alignment = DIRECT_ALIGNMENT_BYTES if direct else PACKED_ALIGNMENT_BYTES
            assert offset >= end and offset * itemsize % alignment == 0
            end = offset + numel
        assert end <= length
    for slot in layout.slots:
        assert slot.direct == (world_size * slot.shard_numel * itemsize >= threshold)
        assert slot.direct == (slot.shard_offset >= layout.packed_numel) or slot.shard_numel == 0
    waste = layout.shard_numel - sum(slot.shard_numel for slot in layout.slots)
    assert waste * itemsize <= len(layout.slots) * DIRECT_ALIGNMENT_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_gradient_slots_are_disjoint_and_carry_presence(seed: int) -> None:
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 4, 64])
    values = BufferLayout.build(
        random_shapes(generator), world_size=world_size, itemsize=4, direct_threshold_bytes=generator.choice([0, 512])
    )
    layout = GradientLayout.build(
        [slot.shape for slot in values.slots],
        [slot.dim for slot in values.slots],
        [slot.direct for slot in values.slots],
        world_size=world_size,
        itemsize=4,
    )
    packed = [slot for slot in layout.slots if not slot.direct]
    assert sum(slot.shard_numel + slot.pad_numel for slot in packed) == layout.presence_offset
    assert layout.packed_numel == layout.presence_offset + len(layout.slots)
    end = 0
    for slot in sorted(layout.slots, key=lambda slot: slot.offset):
        assert slot.offset >= end
        end = slot.offset + slot.shard_numel
        if slot.direct:
            assert slot.shape[0] % world_size == 0 and slot.offset >= layout.packed_numel
    assert end <= layout.numel


@pytest.mark.parametrize("seed", range(80))
def test_any_dim_survives_the_way_there_and_back(seed: int) -> None:
    """As `torch.chunk` cuts."""
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 3, 4, 7, 8])
    shapes, dims = random_cuts(generator, world_size)
    threshold = generator.choice([0, 256, 1 << 30])
    layout = BufferLayout.build(shapes, dims, world_size=world_size, itemsize=4, direct_threshold_bytes=threshold)
    params = [torch.randn(shape) for shape in shapes]
    unsharded = gathered(layout, [scattered(layout, params, rank) for rank in range(world_size)])
    for param, slot in zip(params, layout.slots, strict=True):
        assert not slot.direct or slot.outer == 1, "several pieces per rank cannot arrive in place"
        found = unsharded[slot.unsharded_offset :][: slot.numel].view(slot.shape)
        assert torch.equal(found, param)


@pytest.mark.parametrize("seed", range(80))
def test_fewer_ranks_fill_the_same_unsharded_buffer(seed: int) -> None:
    """The parts of a divisor of the ranks, in a dtype of another size, lie apart, aligned, and gather to the same."""
    generator = random.Random(seed)
    world_size = generator.choice([2, 4, 6, 8, 12])
    fewer = generator.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
    shapes, dims = random_cuts(generator, world_size)
    threshold = generator.choice([0, 256, 1 << 30])
    layout = BufferLayout.build(shapes, dims, world_size=world_size, itemsize=2, direct_threshold_bytes=threshold)
    itemsize = generator.choice([2, 4])
    parts = layout.over(fewer, itemsize)
    assert (parts.world_size, parts.unsharded_numel) == (fewer, layout.unsharded_numel)
    for slot, before in zip(parts.slots, layout.slots, strict=True):
        assert (slot.unsharded_offset, slot.direct) == (before.unsharded_offset, before.direct)
        assert fewer * slot.shard_numel <= world_size * before.shard_numel, "it fits where the slot is"
        alignment = DIRECT_ALIGNMENT_BYTES if slot.direct else PACKED_ALIGNMENT_BYTES
        assert slot.shard_offset * itemsize % alignment == 0
        assert slot.direct == (slot.shard_offset >= parts.packed_numel) or slot.shard_numel == 0
    end = 0
    for slot in sorted(parts.slots, key=lambda slot: (slot.shard_offset, slot.shard_numel)):
        assert slot.shard_offset >= end
        end = slot.shard_offset + slot.shard_numel
    assert end <= parts.shard_numel
    params = [torch.randn(shape) for shape in shapes]
    unsharded = gathered(parts, [scattered(parts, params, rank) for rank in range(fewer)])
    for param, slot in zip(params, parts.slots, strict=True):
        assert torch.equal(unsharded[slot.unsharded_offset :][: slot.numel].view(slot.shape), param)


@pytest.mark.parametrize("seed", range(60))
def test_gradients_of_any_dim_are_reduced_to_their_chunks(seed: int) -> None:
    """Packed and sent as the layout says, summed over the ranks: on each rank the sum of `torch.chunk`'s chunks."""
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 3, 4, 8])
    shapes, dims = random_cuts(generator, world_size)
    direct = [dim == 0 and generator.random() < 0.5 for dim in dims]
    layout = GradientLayout.build(shapes, dims, direct, world_size=world_size, itemsize=4)
    gradients = [[torch.randint(-99, 99, shape).float() for shape in shapes] for _ in range(world_size)]  # exact sums
    sent = [sent_by(layout, of_rank, world_size) for of_rank in gradients]
    for rank in range(world_size):
        output = torch.full((layout.numel,), float("nan"))
        output[: layout.packed_numel] = torch.stack([packed[rank] for packed, _ in sent]).sum(0)
        for index, slot in enumerate(layout.slots):
            assert slot.direct <= direct[index]
            if slot.direct and slot.shard_numel:
                parts = torch.stack([alone[index][rank] for _, alone in sent])
                output[slot.offset : slot.offset + slot.shard_numel] = parts.sum(0)
        presence = output[layout.presence_offset : layout.presence_offset + len(shapes)]
        assert torch.equal(presence, torch.full_like(presence, world_size))
        for index, slot in enumerate(layout.slots):
            chunks = [chunk_of(of_rank[index], slot.dim, world_size, rank) for of_rank in gradients]
            expected = torch.stack(chunks).sum(0)
            assert tuple(expected.shape) == slot.local_shape(rank)
            assert torch.equal(output[slot.offset :][: expected.numel()].view(expected.shape), expected)


def sent_by(
    layout: GradientLayout, gradients: list[torch.Tensor], world_size: int
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """What one rank sends, rank-major: the packed part (world_size, n), and by index what travels alone."""
    packed, alone = torch.full((world_size, layout.packed_numel), float("nan")), {}
    for index, (slot, gradient) in enumerate(zip(layout.slots, gradients, strict=True)):
        if slot.direct:
            alone[index] = gradient.view(world_size, -1) if gradient.numel() else gradient
            continue
        for rank in range(world_size):
            chunk = chunk_of(gradient, slot.dim, world_size, rank).flatten()
            part = packed[rank, slot.offset : slot.offset + slot.shard_numel + slot.pad_numel]
            part.zero_()
            part[: chunk.numel()] = chunk
    packed[:, layout.presence_offset :] = 1
    assert not packed.isnan().any(), "alignment is padding of some slot, so that one kernel fills everything"
    return packed, alone


def test_the_worked_example() -> None:
    layout = BufferLayout.build([(3, 2), (2,)], world_size=2, itemsize=4, direct_threshold_bytes=1 << 30)
    a, b = layout.slots
    assert (a.rows, a.shard_offset, b.rows, b.shard_offset) == (2, 0, 1, 4)
    assert (layout.packed_numel, layout.unsharded_numel) == (5, 10)
    assert [a.row_range(rank) for rank in range(2)] == [(0, 2), (2, 3)]


def test_arithmetic() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [align(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
