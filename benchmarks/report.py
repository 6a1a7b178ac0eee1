"""The printed tables: one row per figure, one column per implementation, then the ratios."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.host_time import FORWARD_AND_BACKWARD
from benchmarks.implementations import AGAIN, UNSHARDED
from benchmarks.memory import StepMemory
from benchmarks.results import Environment, Results, StepFigures
from benchmarks.step import WHOLE_STEP, Phase
from benchmarks.tables import Table

REFERENCE = "torch"
MISSING = "-"
MIB = 1 << 20
HOST_TIME_ROWS = {
    **{phase.value: (phase,) for phase in Phase},
    "forward + backward": FORWARD_AND_BACKWARD,
    "whole step": WHOLE_STEP,
}


def render(results: Results) -> str:
    """The whole report as text."""
    tables = [_host_time_table(results), *(_exact_table(figures) for figures in results.figures)]
    return "\n\n".join([_header(results), *(table.render() for table in tables)])


def _header(results: Results) -> str:
    machine = Environment.current()
    load = " ".join(f"{value:.1f}" for value in machine.load_average)
    reshard = results.options.reshard_after_forward
    return (
        f"torch {machine.torch}, Python {machine.python}, {machine.cpu}, {machine.cores} cores, "
        f"{machine.threads} thread(s), load average {load}\n"
        f"fake process group, world size {results.options.world_size}, "
        f"reshard_after_forward {'default' if reshard is None else reshard}\n"
        f"$ {' '.join(sys.orig_argv)}"
    )


def _host_time_table(results: Results) -> Table:
    times, model = results.host_times, results.figures[0]
    names = list(times.seconds)
    pairs = _compared(names)
    if UNSHARDED in names:
        pairs += [(name, UNSHARDED) for name in names if name != UNSHARDED and not name.endswith(AGAIN)]
    table = Table(
        f"Host CPU time, us per parameter: median [quartiles] of {results.repetitions} interleaved steps "
        f"({model.title}: {times.parameter_count} parameters, {model.spec.groups} groups)",
        ["", *names, *(f"{name}/{other}" for name, other in pairs)],
        notes=[
            "over unsharded: forward + backward minus those of the unsharded model: what sharding costs",
            "whole step: with AdamW foreach; clip: torch's function, of fsdp2 as fsdp2.compat.install() has it",
            "ratios are taken within a step's repetition, then summarized",
            *(
                f"{name} is a second {name.removesuffix(AGAIN)}: their ratio differs from 1 by noise alone"
                for name in names
                if name.endswith(AGAIN)
            ),
        ],
    )
    for label, phases in HOST_TIME_ROWS.items():
        ratios = [times.ratio(name, other, phases).text(3) for name, other in pairs]
        table.add(label, *(times.per_parameter_us(name, phases).text(1) for name in names), *ratios)
    if UNSHARDED in names:
        over = [MISSING if name == UNSHARDED else times.over_unsharded_us(name).text(1) for name in names]
        ratios = [MISSING if other == UNSHARDED else times.over_ratio(name, other).text(3) for name, other in pairs]
        table.add("over unsharded", *over, *ratios)
    return table


def _exact_table(figures: StepFigures) -> Table:
    names = list(figures.counts)
    compared = _compared(names)
    unit_mib = figures.fp32_bytes / MIB
    table = Table(
        f"Exact figures of one step ({figures.title}: {figures.parameter_count} parameters, "
        f"{figures.spec.groups} groups; 1 P = all parameters in fp32 = {unit_mib:.2f} MiB; "
        f"a block, unsharded: {figures.block_bytes / MIB:.3f} MiB)",
        ["", *names, *(f"{name}/{other}" for name, other in compared)],
        notes=[
            "Python calls include built-in functions; copied: bytes written, see benchmarks/copies.py; "
            "peak: without optimizer state"
        ],
    )
    for label, digits, values in [*_call_rows(figures), *_traffic_rows(figures), *_memory_rows(figures)]:
        cells = [f"{values[name]:.{digits}f}" for name in names]
        ratios = [_ratio(values[name], values[other]) for name, other in compared]
        table.add(label, *cells, *ratios)
    return table


# Label, digits after the point, and the figure by implementation.
Row = tuple[str, int, dict[str, float]]


def _call_rows(figures: StepFigures) -> list[Row]:
    rows: list[Row] = []
    for unit, amount in (("parameter", figures.parameter_count), ("group", figures.spec.groups)):
        for phase in FORWARD_AND_BACKWARD:
            calls = {name: counts.calls[phase] / amount for name, counts in figures.counts.items()}
            rows.append((f"{phase.value}: Python calls/{unit}", 1, calls))
    for phase in FORWARD_AND_BACKWARD:
        operations = {
            name: counts.operations[phase].operations / figures.parameter_count
            for name, counts in figures.counts.items()
        }
        rows.append((f"{phase.value}: dispatched operations/parameter", 2, operations))
    garbage = {name: float(counts.garbage_objects) for name, counts in figures.counts.items()}
    rows.append(("cyclic garbage, objects", 0, garbage))
    return rows


def _traffic_rows(figures: StepFigures) -> list[Row]:
    unit = figures.fp32_bytes
    copied = {name: counts.copied_bytes() for name, counts in figures.counts.items()}
    collectives = {name: counts.collectives() for name, counts in figures.counts.items()}
    rows: list[Row] = [("copied, P", 3, {name: part.total() / unit for name, part in copied.items()})]
    for kind in sorted({kind for part in copied.values() for kind in part}):
        label = f"  {kind.removeprefix('aten::')}, P"
        rows.append((label, 3, {name: part[kind] / unit for name, part in copied.items()}))
    for kind in sorted({kind for part in collectives.values() for kind in part}):
        found = {name: part.get(kind) for name, part in collectives.items()}
        calls = {name: float(part.calls) if part else 0.0 for name, part in found.items()}
        rows.append((f"{kind}, calls", 0, calls))
        if any(part and part.tensors != part.calls for part in found.values()):
            tensors = {name: float(part.tensors) if part else 0.0 for name, part in found.items()}
            rows.append((f"{kind}, tensors", 0, tensors))
        nbytes = {name: part.nbytes / unit if part else 0.0 for name, part in found.items()}
        rows.append((f"{kind}, P", 3, nbytes))
    return rows


def _memory_rows(figures: StepFigures) -> list[Row]:
    def row(label: str, nbytes: Callable[[StepMemory], int]) -> Row:
        return label, 3, {name: nbytes(memory) / MIB for name, memory in figures.memory.items()}

    return [
        row("parameters, MiB", lambda memory: memory.parameters),
        row("at rest over parameters, MiB", lambda memory: memory.at_rest_over),
        row("forward: peak over parameters, MiB", lambda memory: memory.forward_over),
        row("backward: peak over parameters + gradients, MiB", lambda memory: memory.backward_over),
    ]


def _compared(names: list[str]) -> list[tuple[str, str]]:
    """What is divided by what: implementations by `REFERENCE`, and a second instance by the first."""
    pairs = [(name, name.removesuffix(AGAIN) if name.endswith(AGAIN) else REFERENCE) for name in names]
    return [(name, other) for name, other in pairs if other in names and name not in (other, UNSHARDED)]


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.3f}" if reference else MISSING
