"""The ways of packing gradients: all of them give the same bytes."""

from __future__ import annotations

import pytest
import torch

from fsdp2 import _torch
from fsdp2.params import packing
from fsdp2.params.packing import packing_for
from fsdp2.plan.layout import Cut, GradientLayout

HOST = torch.device("cpu")


def layout_of(world_size: int, *cuts: Cut) -> GradientLayout:
    return GradientLayout.build(cuts, [False] * len(cuts), world_size=world_size, itemsize=4)


@pytest.mark.parametrize(
    ("world_size", "cuts", "expected"),
    [
        (8, [Cut((8,))] * 3, _torch.chunk_cat),
        (1024, [Cut((1024,))] * 3, packing._columns),
        (1024, [Cut((1024,)), Cut((0,))], packing._columns),
        (1024, [Cut((1024,)), Cut((2048,))], _torch.chunk_cat),
        (1024, [Cut((1024,)), Cut((1000,))], _torch.chunk_cat),  # padded
        (1024, [Cut((1024,), block_rows=2)], _torch.chunk_cat),
        (1024, [Cut((1024,), dim=None)], _torch.chunk_cat),
        (1024, [Cut((1, 1024), dim=1)], _torch.chunk_cat),
        (1024, [], _torch.chunk_cat),
    ],
)
def test_columns_are_for_single_elements_of_many_ranks(
    world_size: int, cuts: list[Cut], expected: packing.Pack
) -> None:
    layout = layout_of(world_size, *cuts)
    assert packing_for(layout, world_size, HOST, casts=False) is expected
    casting = packing._columns if expected is packing._columns else packing._cast_chunks
    assert packing_for(layout, world_size, HOST, casts=True) is casting
    assert packing_for(layout, world_size, torch.device("cuda"), casts=True) is _torch.chunk_cat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("expanded", [False, True])
def test_columns_are_chunks_of_one_element(expanded: bool, dtype: torch.dtype) -> None:
    world_size = 1024
    vectors = [torch.randn(1).to(dtype).expand(world_size) if expanded else torch.randn(world_size).to(dtype)] * 3
    last = torch.full((world_size, 3), 2.0, dtype=dtype)
    last[:, 1] = 0
    columns, chunks = torch.empty(2, world_size, 6).unbind()
    packing._columns([*vectors, last], world_size, columns)
    _torch.chunk_cat([*vectors, last], world_size, chunks)
    assert columns.equal(chunks)


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
