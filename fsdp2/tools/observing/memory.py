"""How much memory this process has used."""

from __future__ import annotations

import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """The most bytes that this process has used: of the allocator of ``device``; on CPU, what was ever resident."""
    if device.type != "cpu":
        reads = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        return int(reads(device)) if reads is not None else 0
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
