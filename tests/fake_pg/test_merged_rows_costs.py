"""What rows of merged dims cost beside a cut of another dim, and what a model says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import BlockShard, fully_shard
from tests.harness import fake_world
from tests.harness.counting import CopiedBytes

EXPERTS, ROWS, COLUMNS = 3, 1024, 256
WHOLE_BYTES = EXPERTS * ROWS * COLUMNS * 4


class Stack(nn.Module):
    """3 matrices of 1 MiB each, fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, ROWS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight).sum()


def place(kind: str) -> Any:
    if kind == "merged":
        return lambda parameter: BlockShard.split_leading(parameter.shape, 2)
    return lambda parameter: Shard(1)


def copied_bytes(kind: str) -> tuple[int, int]:
    """In a forward, and in its backward with the reduction, of rank 1 of 4, after a first step."""
    with fake_world(4, 1):
        model = fully_shard(Stack(), shard_placement_fn=place(kind), reshard_after_forward=False)
        x = torch.randn(EXPERTS, 2, ROWS)
        for _ in range(2):
            with CopiedBytes() as forward:
                loss = model(x)
            with CopiedBytes() as backward:
                loss.backward()
            model.zero_grad()
        return forward.nbytes, backward.nbytes


def test_rows_of_merged_dims_are_neither_packed_nor_put_in_order() -> None:
    """Of another dim that is cut, the whole is copied once after the gather, and once before the reduce-scatter."""
    forward, backward = copied_bytes("merged")
    assert (forward, backward) == (0, backward) and backward < 4096  # which ranks have a gradient travels in a row
    forward, backward = copied_bytes("Shard(1)")
    assert forward >= WHOLE_BYTES and backward >= WHOLE_BYTES
