"""`scaled`: the estimate of a deep model, from those of two that have fewer of its blocks.

Blocks that are all alike add as much each: bytes, messages and seconds grow by the same for every block, once the first
and the last ones are there. So two estimates give a line, and the deep model lies on it. A search is made with these;
what it puts first is then estimated whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fsdp2.tools.estimating.result import CollectiveSum, Estimate, PhasePeak, StepTime


def scaled(few: Estimate, more: Estimate, depths: tuple[int, int, int]) -> Estimate:
    """The estimate of a model with ``depths[2]`` blocks.

    Args:
        few: of the same with ``depths[0]`` blocks.
        more: of the same with ``depths[1]`` blocks, which are more.
        depths: numbers of blocks.
    """
    low, high, wanted = depths
    line = _Line((wanted - low) / (high - low))
    phases = {
        name: PhasePeak(line.whole(each.nbytes, other.nbytes), line.each(each.by_use, other.by_use))
        for (name, each), other in zip(few.phases.items(), more.phases.values(), strict=True)
    }
    peak, host = max(each.nbytes for each in phases.values()), line.whole(few.host_bytes, more.host_bytes)
    before = {(each.kind, each.ranks, each.nodes): each for each in few.collectives}
    sums = tuple(line.sums(before.get((each.kind, each.ranks, each.nodes)), each) for each in more.collectives)
    hardware = few.hardware
    return replace(
        few,
        parameters=line.whole(few.parameters, more.parameters),
        groups=line.whole(few.groups, more.groups),
        phases=phases,
        peak_bytes=peak,
        resting_bytes=line.whole(few.resting_bytes, more.resting_bytes),
        host_bytes=host,
        activations=line.each(few.activations, more.activations),
        collectives=sums,
        sent_inside=sum(each.sent_inside for each in sums),
        sent_between=sum(each.sent_between for each in sums),
        to_host=line.whole(few.to_host, more.to_host),
        fits=peak <= hardware.usable_bytes and host <= hardware.host_memory_bytes,
        time=None if few.time is None or more.time is None else line.time(few.time, more.time),
    )


class _Line:
    """Goes through what two estimates say; ``at``: how far on it, 0 the first, 1 the second."""

    def __init__(self, at: float) -> None:
        self._at = at

    def number(self, first: float, second: float) -> float:
        """The number there; at least 0."""
        return max(0.0, first + self._at * (second - first))

    def whole(self, first: int, second: int) -> int:
        """The same, of whole numbers."""
        return round(self.number(first, second))

    def each(self, first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        """The same, by name."""
        return {name: self.whole(first.get(name, 0), second.get(name, 0)) for name in dict.fromkeys((*first, *second))}

    def sums(self, first: CollectiveSum | None, second: CollectiveSum) -> CollectiveSum:
        """The same, of collectives of one kind."""
        first = first or replace(second, count=0, nbytes=0, sent_inside=0, sent_between=0, seconds=0.0)
        names = ("count", "nbytes", "sent_inside", "sent_between")
        wholes: dict[str, Any] = {name: self.whole(getattr(first, name), getattr(second, name)) for name in names}
        return replace(second, **wholes, seconds=self.number(first.seconds, second.seconds))

    def time(self, first: StepTime, second: StepTime) -> StepTime:
        """The same; the utilization follows from the rest."""
        names = [each.name for each in fields(StepTime) if each.name != "mfu"]
        found = {name: self.number(getattr(first, name), getattr(second, name)) for name in names}
        if not second.mfu or not found["seconds"]:
            return StepTime(**found, mfu=0.0)
        peak = second.model_flops / second.seconds / second.mfu
        return StepTime(**found, mfu=found["model_flops"] / found["seconds"] / peak)
