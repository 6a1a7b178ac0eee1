"""Activation checkpointing costs no all-gather beyond the one per pass, in any nesting."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from fsdp2.core.transport import Native
from tests.harness import fake_world
from tests.harness.internals import gathered_first, groups_of

BLOCKS = 4


class Checkpointed(nn.Module):
    """Recomputes ``inner`` in backward."""

    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        result = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        assert isinstance(result, Tensor)
        return result


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def build(nesting: str, reentrant: bool) -> nn.Module:
    if nesting == "inside":
        layers = [fully_shard(Checkpointed(block(), reentrant)) for _ in range(BLOCKS)]
    elif nesting == "outside":
        layers = [Checkpointed(fully_shard(block()), reentrant) for _ in range(BLOCKS)]
    else:
        pairs = [nn.Sequential(fully_shard(block()), fully_shard(block())) for _ in range(BLOCKS // 2)]
        layers = [Checkpointed(pair, reentrant) for pair in pairs]
    return fully_shard(nn.Sequential(nn.Linear(16, 16), *layers))


# A reentrant checkpoint around two blocks recomputes the first, then the second, whose backward comes first: keeping
# the first as well would unshard as many groups as the checkpoint spans.
EXPECTED = {
    ("inside", False): 2, ("inside", True): 2,
    ("outside", False): 2, ("outside", True): 2,
    ("outside_two", False): 2, ("outside_two", True): 2.5,
}  # fmt: skip


@pytest.mark.parametrize(("nesting", "reentrant"), EXPECTED, ids=lambda each: str(each))
def test_all_gathers_per_block(nesting: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    gather = Native.all_gather

    def counted(transport, members, *args, **kwargs):  # type: ignore[no-untyped-def]
        counts[owner[id(members[0][0])].name] += 1
        return gather(transport, members, *args, **kwargs)

    with fake_world(4):
        model = build(nesting, reentrant)
        for _ in range(2):
            model(torch.zeros(2, 16)).sum().backward()
        groups = groups_of(model)
        owner = {id(gathered_first(group)): group for group in groups}
        monkeypatch.setattr(Native, "all_gather", counted)
        model(torch.zeros(2, 16)).sum().backward()
        assert all(group.phase.value == "sharded" for group in groups)
    root = counts.pop("Sequential")
    assert root == 1
    assert len(counts) == BLOCKS
    assert sum(counts.values()) / BLOCKS == EXPECTED[nesting, reentrant], counts
