"""Copies of shards in host memory that is kept between saves, so that training may go on while they are written."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.checkpoint.writing import Pickled, with_checksums
from fsdp2.core.sharding import dtensor_over
from fsdp2.core.streams import device_for


class _Kept(NamedTuple):
    """The copy of one tensor.

    Attributes:
        like: its ``DTensorSpec``; None of a plain one.
        local: its memory.
        shown: what takes the place of the tensor: itself, or a DTensor on it.
    """

    like: Any
    local: torch.Tensor
    shown: torch.Tensor


class Staging:
    """The memory for one copy of everything that this rank has, from the first use on."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def copy(self, flat: dict[str, Any]) -> dict[str, Any]:
        """``flat`` as it is now: tensors are copied, everything else is pickled. Returns when that is done.

        Stream: the current one, which the host waits for.
        """
        found: dict[str, Any] = {}
        into: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        with torch.no_grad():
            for key, value in flat.items():
                if not isinstance(value, torch.Tensor):
                    found[key] = _pickled(value)
                elif (kept := self._room_for(key, value)) is None:
                    found[key] = value.detach().clone().cpu()
                else:
                    found[key] = kept.shown
                    into.append(kept.local)
                    values.append(_torch.plain_of(value))
            for key in [key for key in self._kept if key not in flat]:
                del self._kept[key]
            _copy(into, values)
        return found

    def _room_for(self, key: str, value: torch.Tensor) -> _Kept | None:
        """Memory for ``value``; None for one that is copied in a way of its own."""
        spec = _torch.spec_of(value) if isinstance(value, DTensor) else None
        local = _torch.plain_of(value)
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
            return None
        kept = self._kept.get(key)
        if (
            kept is None
            or (kept.local.shape, kept.local.dtype) != (local.shape, local.dtype)
            or (kept.like is not spec and kept.like != spec)
        ):
            pinned = local.device.type not in ("cpu", "meta")
            memory = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pinned)
            shown = memory if spec is None else dtensor_over(memory, spec)
            kept = self._kept[key] = _Kept(spec, memory, shown)
        return kept


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(into, values, strict=True):
        targets, sources = by_device.setdefault(value.device, ([], []))
        targets.append(target)
        sources.append(value)
    for targets, sources in by_device.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for device in map(device_for, by_device):
        device.block_host(device.record(device.current_stream()))


def _pickled(value: Any) -> Pickled:
    found = Pickled()
    with with_checksums():
        torch.save(value, found)
    return found
