"""`python -m benchmarks.throughput`: whole training steps on real gloo ranks, implementations interleaved.

    python -m benchmarks.throughput                                      unsharded, torch, fsdp2; 2 ranks, fp32
    python -m benchmarks.throughput --impl torch,torch-again             how far torch differs from itself (A/A)
    python -m benchmarks.throughput --param-dtype bfloat16 --ranks 4

Every rank is a process of one thread. A repetition runs one step (forward, backward, AdamW) of each implementation,
in an order that rotates; all ranks start it together. Two figures of it, summed or taken over the ranks:

* CPU time of all threads of all ranks, those of the communication library included: waiting does not count, so that
  it bears a loaded machine. This one decides.
* wall time of the slowest rank. Worth something on a quiet machine only: `--impl torch,torch-again,fsdp2` shows the
  ratio of torch to itself beside it, and wall times are called inconclusive where its interval leaves [0.93, 1.07].

The ratio is that of medians, with the 95 % interval of a bootstrap over repetitions.

`exchanges` is no implementation: it moves the bytes that sharding must move (each parameter gathered for forward and
for backward, and its gradient reduced) from rank to rank, and does nothing else. With the unsharded model's step it is
what a sharded step would take if nothing were in vain and nothing overlapped; ours over that is printed below.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.implementations import AGAIN, NAMES_HELP, UNSHARDED, ShardingOptions
from benchmarks.models import ModelSpec
from benchmarks.ranks import on_ranks
from benchmarks.results import Environment
from benchmarks.samples import write_json
from benchmarks.tables import Table
from benchmarks.training import EXCHANGES, training_step

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ABOUT_30M = ModelSpec(
    name="30M parameters", blocks=7, params_per_block=12, dim=512, hidden_dim=1376, bias=True, batch_rows=128
)
WARM_UP_STEPS = 3
REFERENCE = "torch"
TIMES = {"cpu": "CPU", "wall": "wall"}
QUIET = (0.93, 1.07)
"""Where the wall time of an implementation over its own second instance must lie for wall times to say anything."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of each repetition: CPU of all ranks together, and wall of the slowest."""

    cpu: tuple[float, ...]
    wall: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of medians, and where 95 % of the bootstrap's lie."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Sequence[float], other: Sequence[float], *, draws: int = 2000) -> Interval:
        """Ratio of ``mine`` to ``other``, paired by repetition."""
        generator = random.Random(0)
        indices = range(len(mine))
        ratios = []
        for _ in range(draws):
            drawn = generator.choices(indices, k=len(mine))
            above, below = (statistics.median(each[index] for index in drawn) for each in (mine, other))
            ratios.append(above / below)
        ratios.sort()
        ratio = statistics.median(mine) / statistics.median(other)
        return cls(ratio, ratios[int(0.025 * draws)], ratios[int(0.975 * draws) - 1])

    @property
    def is_quiet(self) -> bool:
        """Of an implementation over itself: whether the measurement hardly scatters."""
        return QUIET[0] <= self.low and self.high <= QUIET[1]

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


def _measure_on_rank(
    names: Sequence[str], repetitions: int, options: ShardingOptions, spec: ModelSpec
) -> dict[str, list[tuple[float, float]]]:
    warnings.simplefilter("ignore")  # torch's, about its own FSDP1, and those of other packages
    mesh = init_device_mesh("cpu", (options.world_size,))
    steps = {name: training_step(name, spec, mesh=mesh, options=options) for name in names}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(WARM_UP_STEPS):
        for step in steps.values():
            step()
    gc.collect()
    gc.freeze()  # what is there now is not scanned again between steps: with compiled contenders that takes seconds
    gc.disable()
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in (*names[first:], *names[:first]):
            gc.collect()
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            steps[name]()
            seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return seconds


def measure(
    names: Sequence[str],
    *,
    repetitions: int,
    options: ShardingOptions,
    spec: ModelSpec = ABOUT_30M,
    timeout: float | None = None,
) -> dict[str, Samples]:
    """Runs ``options.world_size`` processes, for ``timeout`` seconds at most; the samples by implementation."""
    arguments = (tuple(names), repetitions, options, spec)
    by_rank = on_ranks(options.world_size, _measure_on_rank, *arguments, timeout=timeout)
    return {
        name: Samples(
            cpu=tuple(
                sum(cpu for cpu, _ in of_ranks) for of_ranks in zip(*(each[name] for each in by_rank), strict=True)
            ),
            wall=tuple(
                max(wall for _, wall in of_ranks) for of_ranks in zip(*(each[name] for each in by_rank), strict=True)
            ),
        )
        for name in names
    }


def over_limit(ours: Sequence[float], compute: Sequence[float], exchanges: Sequence[float]) -> Interval:
    """`ours` over the model's own step and the exchanges, one after the other."""
    return Interval.of(ours, [sum(pair) for pair in zip(compute, exchanges, strict=True)])


def _table(samples: dict[str, Samples], options: ShardingOptions, repetitions: int) -> Table:
    notes = ["CPU of all threads of all ranks; wall of the slowest rank; ratios with the 95 % interval of a bootstrap"]
    for name in samples:
        base = name.removesuffix(AGAIN)
        if name != base and base in samples:
            itself = Interval.of(samples[name].wall, samples[base].wall)
            verdict = "quiet" if itself.is_quiet else "the machine is not quiet: wall times are inconclusive"
            notes.append(f"{name} is a second {base}: {verdict}")
    table = Table(
        f"Training step, {ABOUT_30M.name}, {options.world_size} gloo ranks, "
        f"{str(options.param_dtype).removeprefix('torch.')}: medians of {repetitions} interleaved steps",
        ["", "CPU ms", f"CPU / {REFERENCE}", "wall ms", f"wall / {REFERENCE}"],
        notes=notes,
    )
    if {UNSHARDED, EXCHANGES, "fsdp2"} <= samples.keys():
        of = [samples[name] for name in ("fsdp2", UNSHARDED, EXCHANGES)]
        over = (f"{label} {over_limit(*(getattr(each, key) for each in of))}" for key, label in TIMES.items())
        notes.append(f"fsdp2 over the unsharded step and the exchanges, one after the other: {', '.join(over)}")
    for name, mine in samples.items():
        cells = []
        for which in ("cpu", "wall"):
            values = getattr(mine, which)
            cells.append(f"{1e3 * statistics.median(values):.0f}")
            other = samples.get(REFERENCE)
            cells.append("" if other is None or name == REFERENCE else str(Interval.of(values, getattr(other, which))))
        table.add(name, *cells)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--impl",
        type=lambda text: text.split(","),
        default=[UNSHARDED, EXCHANGES, "torch", "torch-again", "fsdp2"],
        metavar="NAMES",
        help=f"comma-separated: {NAMES_HELP}; or {EXCHANGES}",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--repetitions", type=int, default=40, help="interleaved timed steps (default: 40)")
    parser.add_argument("--param-dtype", choices=DTYPES, default="float32")
    parser.add_argument("--no-reshard", action="store_true", help="reshard_after_forward=False everywhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    given = parser.parse_args(arguments)
    options = ShardingOptions(
        world_size=given.ranks,
        reshard_after_forward=False if given.no_reshard else None,
        param_dtype=DTYPES[given.param_dtype],
    )
    samples = measure(given.impl, repetitions=given.repetitions, options=options)
    machine = Environment.current()
    load = " ".join(f"{value:.1f}" for value in machine.load_average)
    print(f"torch {machine.torch}, {machine.cpu}, {machine.cores} cores, load average {load}")
    print(f"malloc: {os.environ.get('MALLOC_MMAP_MAX_', 'default')}; $ {' '.join(sys.orig_argv)}\n")
    print(_table(samples, options, given.repetitions).render())
    write_json(given.json, samples={name: asdict(each) for name, each in samples.items()})


if __name__ == "__main__":
    main()
