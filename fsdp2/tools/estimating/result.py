"""`Estimate`: the answer of `fsdp2.estimate`, as data, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from fsdp2.tools.estimating.hardware import Hardware
from fsdp2.tools.quantities import shown_bytes, shown_count, table


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most memory that is alive at once in a phase of a step.

    Attributes:
        nbytes: bytes on the rank's device.
        by_use: how many of them are for what.
    """

    nbytes: int
    by_use: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """All collectives of one kind in a step, over process groups that are spread over nodes in the same way.

    Attributes:
        kind: all-gather, reduce-scatter or all-reduce.
        ranks: ranks of one process group.
        nodes: how many nodes these are on.
        count: how many collectives there are.
        nbytes: bytes of the full tensors.
        sent_inside: bytes that one rank sends to ranks of its own node (the mean).
        sent_between: bytes that one rank sends to other nodes (the mean).
    """

    kind: str
    ranks: int
    nodes: int
    count: int
    nbytes: int
    sent_inside: int
    sent_between: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one rank of a training run needs. ``str()`` shows it; `to_json` writes it.

    Attributes:
        model: the name of its class.
        parameters: elements of the full model.
        groups: how many groups there are.
        mesh: the sizes of its dims, by name.
        settings: what was estimated, in words.
        hardware: the machine.
        phases: the peak of each phase of a step.
        peak_bytes: the highest of these peaks, on the device.
        resting_bytes: bytes that are alive between two steps, on the device.
        host_bytes: the most that is offloaded to the host at once.
        activation_bytes: bytes that one forward keeps for backward.
        collectives: the collectives of a step.
        sent_inside: bytes that one rank sends to ranks of its node in a step (the mean).
        sent_between: bytes that one rank sends to other nodes in a step (the mean).
        to_host: bytes that move between device and host in a step.
        fits: whether the peak, and what is offloaded, fit on the hardware.
        fits_on: names of the known devices whose memory has room for the peak.
    """

    model: str
    parameters: int
    groups: int
    mesh: Mapping[str, int]
    settings: Mapping[str, str]
    hardware: Hardware
    phases: Mapping[str, PhasePeak]
    peak_bytes: int
    resting_bytes: int
    host_bytes: int
    activation_bytes: int
    collectives: Sequence[CollectiveSum]
    sent_inside: int
    sent_between: int
    to_host: int
    fits: bool
    fits_on: tuple[str, ...]

    def to_json(self) -> str:
        """Everything, as one JSON object. Bytes are numbers."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._memory(), "", *self._traffic()])

    def _head(self) -> list[str]:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        said = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        usable = self.hardware.usable_bytes
        verdict = "fits" if self.fits else "DOES NOT FIT"
        lines = [
            f"{self.model}: {shown_count(self.parameters)} parameters, {self.groups} "
            f"group{'' if self.groups == 1 else 's'}, on {mesh}",
            f"  {said}",
            f"{verdict}: {shown_bytes(self.peak_bytes)} of {shown_bytes(usable)} on {self.hardware.name}"
            f" ({shown_bytes(self.hardware.memory_bytes)}, less {shown_bytes(self.hardware.reserved_bytes)} for the"
            " driver, NCCL and gaps)",
        ]
        if self.host_bytes:
            room = shown_bytes(self.hardware.host_memory_bytes)
            lines.append(f"  offloaded to the host: {shown_bytes(self.host_bytes)} of {room} for each rank")
        lines.append(f"  devices with room for that: {', '.join(self.fits_on) or 'none of the known ones'}")
        if not self.fits:
            lines.append("  `fsdp2 estimate --suggest`, or fsdp2.suggest in Python, says what would make it fit")
        return lines

    def _memory(self) -> list[str]:
        uses = [use for phase in self.phases.values() for use in phase.by_use]
        rows = [
            [use, *(_cell(phase.by_use.get(use, 0)) for phase in self.phases.values())] for use in dict.fromkeys(uses)
        ]
        rows.append(["together", *(shown_bytes(phase.nbytes) for phase in self.phases.values())])
        lines = table(("peak of a rank", *self.phases), rows, right=range(1, len(self.phases) + 1))
        kept, between = shown_bytes(self.activation_bytes), shown_bytes(self.resting_bytes)
        return [*lines, f"kept for backward: {kept}; between steps: {between}"]

    def _traffic(self) -> list[str]:
        if not self.collectives:
            return ["no communication: there is one rank"]
        headers = ("a rank, a step", "ranks", "nodes", "count", "whole", "sent inside", "sent between")
        rows = []
        for each in self.collectives:
            sent = [_cell(each.sent_inside), _cell(each.sent_between)]
            rows.append([each.kind, *map(str, (each.ranks, each.nodes, each.count)), shown_bytes(each.nbytes), *sent])
        host = f"; to and from the host: {shown_bytes(self.to_host)}" if self.to_host else ""
        inside, between = shown_bytes(self.sent_inside), shown_bytes(self.sent_between)
        return [
            *table(headers, rows, right=range(1, 7)),
            f"sent inside a node: {inside}; between nodes: {between}{host}",
        ]


def _cell(nbytes: int) -> str:
    return shown_bytes(nbytes) if nbytes else "-"
