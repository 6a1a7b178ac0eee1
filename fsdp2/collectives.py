"""Issues the collectives of a plan: many members, one launch.

Knows process groups and backends, not groups of parameters. Each function must be called by all ranks of the process
group, in the same order, with members of the same sizes.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.buffers import Member


def all_gather(members: Sequence[Member], group: dist.ProcessGroup, works: list[dist.Work] | None) -> None:
    """Gather the input (n,) of every member into its output (world_size * n,).

    Asynchronous with a list of ``works``, to which each is added as soon as it is issued.

    Asynchronous (CPU): one work per member, all in flight together; on gloo that beats its coalesced form, which
    flattens inside. Otherwise on the current stream, coalesced into one launch if there are several members.
    """
    if works is not None:
        for output, input in members:
            _add(works, _torch.all_gather_single(output, input, group, True))
        return
    with _one_launch(members, group):
        for output, input in members:
            _torch.all_gather_single(output, input, group, False)


def reduce_scatter_mean(members: Sequence[Member], group: dist.ProcessGroup, works: list[dist.Work] | None) -> None:
    """Average the input (world_size * n,) of every member over the ranks; its output (n,) is this rank's part."""
    mean = dist.ReduceOp.AVG
    if works is not None:
        for output, input in members:
            _add(works, _torch.reduce_scatter_single(output, input, mean, group, True))
        return
    with _one_launch(members, group):
        for output, input in members:
            _torch.reduce_scatter_single(output, input, mean, group, False)


def _add(works: list[dist.Work], work: dist.Work | None) -> None:
    if work is not None:
        works.append(work)


def _one_launch(members: Sequence[Member], group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    return nullcontext() if len(members) < 2 else _torch.coalescing(group)


def disagreement(fingerprint: int, description: str, group: dist.ProcessGroup, device: torch.device) -> str | None:
    """None if every rank of ``group`` passes the same ``fingerprint``, else how the descriptions differ.

    Collective; the second exchange takes place only on disagreement, and then on all ranks.
    """
    mine = torch.tensor([fingerprint], dtype=torch.int64, device=device)
    world_size = dist.get_world_size(group)
    everyone = mine.new_empty(world_size)
    _torch.all_gather_single(everyone, mine, group, False)
    if len(set(everyone.tolist())) == 1:
        return None
    descriptions: list[str] = [""] * world_size
    dist.all_gather_object(descriptions, description, group=group)
    reference = descriptions[0].splitlines()
    for rank, text in enumerate(descriptions):
        if text != descriptions[0]:
            lines = difflib.unified_diff(reference, text.splitlines(), "rank 0", f"rank {rank}", lineterm="", n=1)
            return "\n".join(lines)
    return "the fingerprints differ, the descriptions do not"
