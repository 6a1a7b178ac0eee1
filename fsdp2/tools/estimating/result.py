"""`Estimate`: what `fsdp2.estimate` answers, as data, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp2._remedies import ESTIMATE
from fsdp2.tools.estimating.hardware import Hardware
from fsdp2.tools.quantities import shown_bytes, shown_count


def shown_seconds(seconds: float) -> str:
    """In seconds, or thousandths of them."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most that is alive at once in a phase of a step.

    Attributes:
        nbytes: on the rank's device.
        by_use: of them, what each is for.
    """

    nbytes: int
    by_use: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """All collectives of one kind in a step, over process groups that lie on nodes alike.

    Attributes:
        kind: all-gather, reduce-scatter or all-reduce.
        ranks: of one process group.
        nodes: over which these lie.
        count: how many collectives.
        nbytes: of the whole tensors.
        sent_inside: bytes that one rank sends to ranks of its own node (the mean).
        sent_between: bytes that one rank sends to other nodes (the mean).
        seconds: how long they run, one after the other.
    """

    kind: str
    ranks: int
    nodes: int
    count: int
    nbytes: int
    sent_inside: int
    sent_between: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """Another setting, and what it does.

    Attributes:
        change: the arguments of `fsdp2.estimate` that are different, as they are written.
        peak_bytes: with them.
        fits: whether that fits.
        step_seconds: with them; None where time is not estimated.
    """

    change: str
    peak_bytes: int
    fits: bool
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, from a written model.

    'Know before a run whether it fits, and how fast it is' in the documentation has the model, with its errors.

    Attributes:
        seconds: of the whole step.
        compute_seconds: how long computation runs.
        exposed_seconds: how long it stands still, for communication.
        communication_seconds: of all collectives, one after the other.
        flops: operations of one rank, as they are computed.
        model_flops: without what is computed once more, and causal attention as if it were whole.
        mfu: model flops per second, of the peak.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    communication_seconds: float
    flops: float
    model_flops: float
    mfu: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one rank of a training run needs. ``str()`` shows it; `to_json` writes it.

    Attributes:
        model: the name of its class.
        parameters: elements of the whole model.
        groups: how many.
        mesh: sizes of its dims, by name.
        settings: what was estimated, in words.
        hardware: the machine.
        phases: the peak of each phase of a step.
        peak_bytes: the highest of them, on the device.
        resting_bytes: alive between two steps, on the device.
        host_bytes: the most that is offloaded to the host at once.
        activations: bytes kept for backward by one forward, by how blocks are checkpointed.
        collectives: of a step.
        sent_inside: bytes that one rank sends to ranks of its node in a step (the mean).
        sent_between: bytes that one rank sends to other nodes in a step (the mean).
        to_host: bytes between device and host in a step.
        fits: whether the peak, and what is offloaded, fit on the hardware.
        remedies: other settings, tried if it does not fit.
        time: None on a CPU, and where activations were given instead of computed.
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
    activations: Mapping[str, int]
    collectives: Sequence[CollectiveSum]
    sent_inside: int
    sent_between: int
    to_host: int
    fits: bool
    remedies: Sequence[Remedy]
    time: StepTime | None

    def to_json(self) -> str:
        """Everything, as one JSON object. Bytes and seconds are numbers."""
        return json.dumps(_plain(self), indent=2)

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._memory(), "", *self._traffic(), "", *self._speed()])

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
        for remedy in self.remedies:
            word = "would fit" if remedy.fits else "would not"
            time = "" if remedy.step_seconds is None else f", {shown_seconds(remedy.step_seconds)} a step"
            lines.append(f"  {word}: {remedy.change} ({shown_bytes(remedy.peak_bytes)}{time})")
        if not self.fits:
            lines.append(
                "  `fsdp2 suggest`, or fsdp2.suggest in Python, may find a faster one, of all meshes and strategies"
            )
        return lines

    def _memory(self) -> list[str]:
        uses = [use for phase in self.phases.values() for use in phase.by_use]
        rows = [["peak of a rank", *self.phases]]
        for use in dict.fromkeys(uses):
            rows.append([f"  {use}", *(_cell(phase.by_use.get(use, 0)) for phase in self.phases.values())])
        rows.append(["  together", *(shown_bytes(phase.nbytes) for phase in self.phases.values())])
        kept = ", ".join(f"{shown_bytes(nbytes)} (checkpointing {how})" for how, nbytes in self.activations.items())
        return [*_table(rows), f"kept for backward: {kept}; between steps: {shown_bytes(self.resting_bytes)}"]

    def _traffic(self) -> list[str]:
        if not self.collectives:
            return ["no communication: there is one rank"]
        rows = [["a rank, a step", "ranks", "nodes", "count", "whole", "sent inside", "sent between", "alone"]]
        for each in self.collectives:
            sent = [_cell(each.sent_inside), _cell(each.sent_between)]
            numbers = [str(each.ranks), str(each.nodes), str(each.count), shown_bytes(each.nbytes)]
            rows.append([f"  {each.kind}", *numbers, *sent, shown_seconds(each.seconds)])
        host = f"; to and from the host: {shown_bytes(self.to_host)}" if self.to_host else ""
        inside, between = shown_bytes(self.sent_inside), shown_bytes(self.sent_between)
        return [*_table(rows), f"sent inside a node: {inside}; between nodes: {between}{host}"]

    def _speed(self) -> list[str]:
        if self.time is None:
            return ["time: not estimated (on CPUs, and where activation_bytes was given)"]
        time = self.time
        return [
            f"step: {shown_seconds(time.seconds)}: computes {shown_seconds(time.compute_seconds)}, waits for"
            f" communication {shown_seconds(time.exposed_seconds)} (of {shown_seconds(time.communication_seconds)});"
            f" MFU {time.mfu:.1%}",
            f"  from a model that is written down, with its errors, in {ESTIMATE}",
        ]


def _cell(nbytes: int) -> str:
    return shown_bytes(nbytes) if nbytes else "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _plain(estimate: Estimate) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in estimate.__dataclass_fields__:
        value = getattr(estimate, name)
        found[name] = _plain_value(value)
    found["hardware"]["peak_flops"] = dict(estimate.hardware.peak_flops)
    return found


def _plain_value(value: Any) -> Any:
    if isinstance(value, Hardware):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {key: _plain_value(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain_value(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    return value
