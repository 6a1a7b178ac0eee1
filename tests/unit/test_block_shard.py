"""`BlockShard` by itself: what it accepts, equality, and which boxes of the whole a run of rows is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Shard

from fsdp2 import BlockShard, FSDPError, FSDPNotImplementedError, FSDPValueError
from tests.unit.helpers import for_each


def test_it_is_a_placement_of_its_own_kind() -> None:
    placement = BlockShard.split_leading((3, 4, 5), 2)
    assert isinstance(placement, Placement) and not isinstance(placement, Shard)
    assert not (placement.is_shard() or placement.is_replicate() or placement.is_partial())
    assert placement.is_block_shard() and placement.block_numels == (5,) and placement.block_repeats is None
    for same in (BlockShard((5,)), BlockShard((5, 5), (2, 1)), copy.deepcopy(placement)):
        assert same == placement and hash(same) == hash(placement)
    assert pickle.loads(pickle.dumps(placement)) == placement != BlockShard((4,))
    assert repr(placement) == "BlockShard(block_numels=(5,))"
    with pytest.raises(AttributeError, match="immutable"):
        placement.block_numels = (4,)


@for_each("given", [((),), ((1, -1),), ((True,),), ((0,),), ((1,), (0,)), ((1, 2), (1,)), (5,)])
def test_what_is_no_blocks(given: Any) -> None:
    with pytest.raises(FSDPError):
        BlockShard(*given)


def test_one_dim_is_what_shard_does() -> None:
    for shape, k in (((3, 4, 5), 1), ((3, 1, 5), 2), ((3, 0, 5), 2)):
        with pytest.raises(FSDPValueError, match=r"use Shard\(0\)"):
            BlockShard.split_leading(shape, k)
    for k in (0, 4):
        with pytest.raises(FSDPValueError, match="takes 2 to 3 of the dims"):
            BlockShard.split_leading((3, 4, 5), k)
    for blocks in ((3,), (10,), (5, 4)):
        with pytest.raises(FSDPNotImplementedError, match="split_leading"):
            BlockShard(blocks).leading((3, 4, 5))


def test_boxes_by_hand() -> None:
    placement = BlockShard((5,))
    assert placement.boxes((3, 4, 5), 0, 6) == [((0, 1), (0, 4), (0, 5)), ((1, 2), (0, 2), (0, 5))]
    assert placement.boxes((3, 4, 5), 6, 12) == [((1, 2), (2, 4), (0, 5)), ((2, 3), (0, 4), (0, 5))]
    assert placement.boxes((3, 4, 5), 5, 7) == [((1, 2), (1, 3), (0, 5))]
    assert placement.boxes((3, 4, 5), 12, 12) == []


@for_each(("shape", "k"), [((3, 4, 5), 2), ((3, 4, 5), 3), ((2, 3, 2, 2), 3), ((1, 3, 4), 2)])
def test_boxes_are_the_rows_one_after_the_other(shape: tuple[int, ...], k: int) -> None:
    """Every run of rows, compared with what a view of the whole has there."""
    placement, whole = BlockShard.split_leading(shape, k), torch.arange(torch.Size(shape).numel()).view(shape)
    rows = placement.in_rows(whole)
    for start in range(len(rows) + 1):
        for stop in range(start, len(rows) + 1):
            boxes = placement.boxes(shape, start, stop)
            parts = [whole[tuple(slice(*each) for each in box)].reshape(-1) for box in boxes]
            assert torch.cat([whole.new_empty(0), *parts]).equal(rows[start:stop].reshape(-1))


def test_rows_of_ranks() -> None:
    assert BlockShard((4,)).rows_of_ranks((3, 5, 4), 4) == (4, 4, 4, 3)
    assert BlockShard((4,)).rows_of_ranks((2, 3, 4), 4) == (2, 2, 2, 0)
