"""`python -m benchmarks.compile`: compiled training steps beside eager ones, on real gloo ranks, interleaved.

    python -m benchmarks.compile                         inductor; minutes on two cores, most of them compilation
    python -m benchmarks.compile --backend aot_eager     graphs without kernels of their own: what capturing costs
    python -m benchmarks.compile --impl torch-blocks,fsdp2-blocks --blocks 4

Names are those of `benchmarks.implementations`: what is compiled is `-whole`, `-blocks`, `-hooks` or nothing. torch's
own cannot be compiled whole. `exchanges` moves what must travel in a step and does nothing else, as in
`benchmarks.throughput`: with the unsharded model's compiled step it is what a compiled step would take at the least.

First comes the time to the end of the first two steps, in which everything is compiled; then, as in
`benchmarks.throughput`, CPU time of all threads of all ranks, which decides, and wall time of the slowest rank.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.implementations import UNSHARDED, ShardingOptions
from benchmarks.models import ModelSpec
from benchmarks.ranks import on_ranks
from benchmarks.results import Environment
from benchmarks.samples import write_json
from benchmarks.tables import Table
from benchmarks.throughput import TIMES, Interval, over_limit
from benchmarks.training import EXCHANGES, training_step

UNSHARDED_WHOLE = f"{UNSHARDED}-whole"
CONTENDERS = (
    UNSHARDED_WHOLE,
    EXCHANGES,
    "torch",
    "torch-blocks",
    "fsdp2",
    "fsdp2-blocks",
    "fsdp2-hooks",
    "fsdp2-whole",
)
REFERENCE = "torch"


def _spec(blocks: int) -> ModelSpec:
    return ModelSpec(
        name=f"{blocks} blocks", blocks=blocks, params_per_block=4, dim=256, hidden_dim=1024, bias=True, batch_rows=64
    )


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-5)


def _measure_on_rank(
    names: Sequence[str], blocks: int, backend: str, repetitions: int
) -> dict[str, dict[str, list[float]]]:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks
    options = ShardingOptions(world_size=2, backend=backend)
    mesh = init_device_mesh("cpu", (2,))
    seconds: dict[str, dict[str, list[float]]] = {}
    steps = {}
    for name in names:
        dist.barrier()
        begun = time.perf_counter()
        steps[name] = training_step(name, _spec(blocks), mesh=mesh, options=options, make_optimizer=_sgd)
        for _ in range(2):
            steps[name]()
        seconds[name] = {"first": [time.perf_counter() - begun], "cpu": [], "wall": []}
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in (*names[first:], *names[:first]):
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            steps[name]()
            seconds[name]["cpu"].append(time.process_time() - cpu)
            seconds[name]["wall"].append(time.perf_counter() - wall)
    return seconds


def measure(names: Sequence[str], *, blocks: int, backend: str, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by name: of the first two steps, and of each repetition CPU of both ranks and wall of the slower."""
    one, other = on_ranks(2, _measure_on_rank, tuple(names), blocks, backend, repetitions)
    return {
        name: {
            "first": [max(one[name]["first"][0], other[name]["first"][0])],
            "cpu": [sum(each) for each in zip(one[name]["cpu"], other[name]["cpu"], strict=True)],
            "wall": [max(each) for each in zip(one[name]["wall"], other[name]["wall"], strict=True)],
        }
        for name in names
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--impl", type=lambda text: text.split(","), default=list(CONTENDERS), metavar="NAMES")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of the model (default: 12)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: inductor)")
    parser.add_argument("--repetitions", type=int, default=20, help="interleaved timed steps (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    given = parser.parse_args(arguments)
    unknown = set(given.impl) - set(CONTENDERS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    samples = measure(given.impl, blocks=given.blocks, backend=given.backend, repetitions=given.repetitions)
    notes = ["CPU of all threads of both ranks; ratios with the 95 % interval of a bootstrap"]
    if {UNSHARDED_WHOLE, EXCHANGES, "fsdp2-whole"} <= samples.keys():
        whole, compute, exchanges = (samples[name] for name in ("fsdp2-whole", UNSHARDED_WHOLE, EXCHANGES))
        over = (f"{label} {over_limit(whole[key], compute[key], exchanges[key])}" for key, label in TIMES.items())
        notes.append(f"fsdp2-whole over the unsharded step and the exchanges, one after the other: {', '.join(over)}")
    machine = Environment.current()
    load = " ".join(f"{value:.1f}" for value in machine.load_average)
    print(f"torch {machine.torch}, {machine.cpu}, {machine.cores} cores, load average {load}")
    print(f"$ {' '.join(sys.orig_argv)}\n")
    table = Table(
        f"Training step, {given.blocks} blocks, 2 gloo ranks, {given.backend}: medians of {given.repetitions} steps",
        ["", "first two steps s", "CPU ms", f"CPU / {REFERENCE}", "wall ms"],
        notes=notes,
    )
    for name, mine in samples.items():
        reference = samples.get(REFERENCE)
        ratio = "" if reference is None or name == REFERENCE else str(Interval.of(mine["cpu"], reference["cpu"]))
        times = [f"{1e3 * median(mine[which]):.1f}" for which in ("cpu", "wall")]
        table.add(name, f"{mine['first'][0]:.1f}", times[0], ratio, times[1])
    print(table.render())
    write_json(given.json, samples=samples)


if __name__ == "__main__":
    main()
