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


def test_the_worked_example() -> None:
    layout = BufferLayout.build([(3, 2), (2,)], world_size=2, itemsize=4, direct_threshold_bytes=1 << 30)
    a, b = layout.slots
    assert (a.rows, a.shard_offset, b.rows, b.shard_offset) == (2, 0, 1, 4)
    assert (layout.packed_numel, layout.unsharded_numel) == (5, 10)
    assert [a.row_range(rank) for rank in range(2)] == [(0, 2), (2, 3)]


def test_arithmetic() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [align(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
