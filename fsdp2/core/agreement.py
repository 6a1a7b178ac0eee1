"""Whether ranks agree on what they are about to do: compared by a fingerprint, explained by a difference."""

from __future__ import annotations

import difflib

import torch
import torch.distributed as dist

from fsdp2 import _torch


def disagreement(
    fingerprint: int, description: str, group: dist.ProcessGroup | None, device: torch.device
) -> str | None:
    """None if every rank of ``group`` passes the same ``fingerprint``, else how the descriptions differ.

    Collective, and seen by no patched function or dispatch mode; the second exchange takes place only on disagreement,
    and then on all ranks.
    """
    if group is None or group.size() == 1:
        return None
    mine = torch.tensor([fingerprint], dtype=torch.int64, device=device)
    world_size = dist.get_world_size(group)
    everyone = mine.new_empty(world_size)
    _torch.gather_unobserved(everyone, mine, group)
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
