"""The ways of packing gradients: all of them give the same bytes."""

from __future__ import annotations

import pytest
import torch

from fsdp2 import _torch
from fsdp2.core import gradients as packing
from fsdp2.core.buffers import view_as_wider_dtype
from fsdp2.core.gradients import packing_for
from fsdp2.core.layout import GradientLayout
from fsdp2.core.sharding import Partition

HOST = torch.device("cpu")


def layout_of(world_size: int, *cuts: Partition, itemsize: int = 4) -> GradientLayout:
    return GradientLayout.build(cuts, [False] * len(cuts), world_size=world_size, itemsize=itemsize)


@pytest.mark.parametrize(
    ("world_size", "cuts", "expected"),
    [
        (8, [Partition((8,))] * 3, _torch.chunk_cat),
        (1024, [Partition((1024,))] * 3, packing._columns),
        (1024, [Partition((1024,)), Partition((0,))], packing._columns),
        (1024, [Partition((1024, 1)), Partition((1024, 1))], packing._columns),
        (1024, [Partition((1024,)), Partition((1024, 1))], _torch.chunk_cat),
        (1024, [Partition((1024,)), Partition((2048,))], _torch.chunk_cat),
        (1024, [Partition((1024,)), Partition((1000,))], _torch.chunk_cat),  # padded
        (1024, [Partition((1024,), block_rows=2)], _torch.chunk_cat),
        (1024, [Partition((1024,), dim=None)], _torch.chunk_cat),
        (1024, [Partition((1, 1024), dim=1)], _torch.chunk_cat),
        (1024, [], _torch.chunk_cat),
    ],
)
def test_columns_are_for_single_elements_of_many_ranks(
    world_size: int, cuts: list[Partition], expected: packing.Pack
) -> None:
    layout = layout_of(world_size, *cuts)
    assert packing_for(layout, world_size, HOST, torch.float32, casts=False) is expected
    casting = packing._columns if expected is packing._columns else packing._cast_chunks
    assert packing_for(layout, world_size, HOST, torch.float32, casts=True) is casting
    assert packing_for(layout, world_size, torch.device("cuda"), torch.float32, casts=True) is _torch.chunk_cat


@pytest.mark.parametrize(
    ("dtype", "numel", "count", "are_columns"),
    [
        (torch.float32, 2, 2, True),
        (torch.float32, 4, 4, True),
        (torch.bfloat16, 2, 6, True),
        (torch.bfloat16, 8, 8, True),
        (torch.float64, 2, 2, True),
        (torch.float32, 2, 3, False),  # a row of 9 elements is no whole number of pairs
        (torch.float32, 3, 3, False),  # no dtype has 12 bytes
        (torch.float32, 8, 8, False),
        (torch.float64, 4, 4, False),
    ],
)
@pytest.mark.parametrize("trailing", [False, True])
def test_columns_are_for_a_few_bytes_of_many_ranks(
    trailing: bool, dtype: torch.dtype, numel: int, count: int, are_columns: bool
) -> None:
    shape = (1024, numel) if trailing else (1024 * numel,)
    layout = layout_of(1024, *[Partition(shape)] * count, itemsize=dtype.itemsize)
    found = packing_for(layout, 1024, HOST, dtype, casts=False)
    assert found is (packing._columns if are_columns else _torch.chunk_cat)
    assert packing_for(layout, 1024, HOST, dtype, casts=True) is packing._cast_chunks


@pytest.mark.parametrize("order", [(), (0, 2, 3, 1)])
def test_columns_lie_alike_in_memory(order: tuple[int, ...]) -> None:
    """Gradients are packed in memory order, in which those of one shape may have several."""
    plain, other = Partition((1024, 2, 1, 2)), Partition((1024, 2, 1, 2), order=order)
    layout = layout_of(1024, plain, plain, other, other)
    found = packing_for(layout, 1024, HOST, torch.float32, casts=False)
    assert found is (_torch.chunk_cat if order else packing._columns)
    layout = layout_of(1024, *[other] * 4)
    assert packing_for(layout, 1024, HOST, torch.float32, casts=False) is packing._columns


@pytest.mark.parametrize("numel", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["vectors", "expanded", "matrices", "transposed"])
@pytest.mark.parametrize("casts", [False, True])
def test_columns_are_chunks(casts: bool, kind: str, dtype: torch.dtype, numel: int) -> None:
    world_size, count = 1024, 4
    gradients = list(torch.randn(count, world_size * numel).to(dtype).unbind())
    if kind == "expanded":
        gradients = [each[:1].expand(world_size * numel) for each in gradients]
    elif kind == "matrices":
        gradients = [each.view(world_size, numel) for each in gradients]
    elif kind == "transposed":
        gradients = [each.view(numel, world_size).t() for each in gradients]
    last = torch.full((world_size, count), 2.0, dtype=dtype)
    last[:, 1] = 0
    to = torch.float32 if casts else dtype
    columns, chunks = torch.empty(2, world_size, count * numel + count, dtype=to).unbind()
    packing._columns([*gradients, last], world_size, columns)
    _torch.chunk_cat([*gradients, last], world_size, chunks)
    assert columns.equal(chunks)


def test_bits_stay_as_they_are() -> None:
    """Of numbers that arithmetic would change: signaling NaNs, and denormal ones where these are flushed to zero."""
    bits = torch.tensor([0x7F800001, 1, -0x80000000, 0x7FA00000], dtype=torch.int32).repeat(1024)
    gradient = bits.view(torch.float32)
    packed = torch.empty(1024, 8)
    torch.set_flush_denormal(True)
    try:
        packing._columns([gradient, torch.ones(1024, 4)], 1024, packed)
    finally:
        torch.set_flush_denormal(False)
    assert packed[:, :4].reshape(-1).view(torch.int32).equal(bits)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "itemsize"),
    [
        ((3, 4, 2), (8, 2, 1), 0, 8),
        ((3, 4, 2), (8, 2, 1), 1, 4),  # starts between two
        ((3, 4, 2), (9, 2, 1), 0, 4),
        ((3, 4, 2), (16, 4, 2), 0, 4),
        ((3, 4, 3), (12, 3, 1), 0, 4),
        ((3, 4, 1), (4, 1, 1), 0, 4),
        ((3, 4), (4, 1), 4, 16),
        ((3, 4), (4, 1), 2, 8),
        ((3, 8), (10, 1), 0, 8),
        ((3, 16), (16, 1), 0, 16),
        ((3, 20), (20, 1), 0, 4),  # large enough as it is
        ((4,), (1,), 0, 16),
        ((0, 2), (2, 1), 0, 8),
    ],
)
def test_pieces_are_seen_where_they_lie_on_multiples_of_wider_elements(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
) -> None:
    other = torch.zeros(shape)
    one = torch.zeros(64).as_strided(shape, strides, offset)
    views = view_as_wider_dtype((one, other))
    assert all(each.element_size() == itemsize for each in views)
    assert all(each.data_ptr() == tensor.data_ptr() for each, tensor in zip(views, (one, other), strict=True))


@pytest.mark.parametrize("numel", [4, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_casts_are_the_same_before_and_after(dtype: torch.dtype, numel: int) -> None:
    """The second size is cast by the operator, lest both forms take much memory."""
    world_size = 8
    gradients = [torch.randn(world_size, numel).to(dtype), torch.randn(world_size - 3).to(dtype)]
    found, expected = torch.empty(2, world_size, numel + 1).unbind()
    packing._cast_chunks(gradients, world_size, found)
    _torch.chunk_cat(gradients, world_size, expected)
    assert found.equal(expected)
