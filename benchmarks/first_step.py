"""`python -m benchmarks.first_step`: what comes before training runs at its pace, beside torch's `fully_shard`.

    python -m benchmarks.first_step --blocks 64
    python -m benchmarks.first_step --blocks 160 --no-optimizer       torch's AdamW alone would take minutes
    python -m benchmarks.first_step --impl torch,torch-again          how far torch differs from itself (A/A)

`fully_shard` on every block, the first forward and backward, and the first step of AdamW, of each implementation in a
process of its own, whose caches know nothing yet; on the fake process group. CPU time of the calling thread. Ours steps
with `fsdp2.optim.local`; on the DTensors of either implementation the plain optimizer's first step is the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.distributed.tensor import distribute_tensor

import fsdp2
from benchmarks.implementations import (
    IMPLEMENTATIONS,
    UNSHARDED,
    ShardingOptions,
    base_of,
    fake_process_group,
    shard_blocks,
)
from benchmarks.models import build_model, small_parameters
from benchmarks.samples import compared, ratios, spread, write_json
from benchmarks.step import LEARNING_RATE
from benchmarks.tables import Table

ADAMW = "first AdamW step"
PARTS = ("fully_shard", "first forward + backward", ADAMW, "second forward + backward")
Seconds = dict[str, dict[str, list[float]]]
"""By part and implementation, one for each repetition."""


def first_step(name: str, blocks: int, world_size: int, parts: Sequence[str]) -> dict[str, float]:
    """Seconds of each of `parts` (`PARTS`, or fewer) under `name`, in a process that has done nothing before."""
    torch.set_num_threads(1)
    spec = small_parameters(blocks=blocks, params_per_block=12)
    model, inputs = build_model(spec), torch.linspace(-1, 1, spec.batch_rows * spec.dim).view(-1, spec.dim)
    build_model(small_parameters(blocks=1, params_per_block=2))(inputs).backward()  # whatever torch sets up once
    with fake_process_group(world_size) as mesh:
        distribute_tensor(torch.ones(world_size), mesh)  # and DTensor, half a second
        options = ShardingOptions(world_size=world_size)
        seconds = [_seconds(lambda: shard_blocks(name, model, mesh=mesh, options=options))]
        seconds.append(_seconds(lambda: model(inputs).backward()))
        if ADAMW in parts:
            optimizer = _optimizer(name, list(model.parameters()))
            seconds.append(_seconds(optimizer.step))
        model.zero_grad()
        seconds.append(_seconds(lambda: model(inputs).backward()))
    return dict(zip(parts, seconds, strict=True))


def _optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if base_of(name) == "fsdp2":
        return fsdp2.optim.local(torch.optim.AdamW, parameters, lr=LEARNING_RATE, foreach=True)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=True)


def _seconds(action: Callable[[], object]) -> float:
    start = time.thread_time()
    action()
    return time.thread_time() - start


def measure(
    names: Sequence[str], *, blocks: int, world_size: int, repetitions: int, parts: Sequence[str] = PARTS
) -> Seconds:
    """Seconds of every implementation in turn, each time in a new process."""
    seconds: Seconds = {part: {name: [] for name in names} for part in parts}
    context = multiprocessing.get_context("forkserver")  # which imports torch once
    context.set_forkserver_preload(["benchmarks.implementations", "fsdp2"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        for repetition in range(repetitions):
            first = repetition % len(names)
            for name in (*names[first:], *names[:first]):
                for part, sample in pool.apply(first_step, (name, blocks, world_size, parts)).items():
                    seconds[part][name].append(sample)
    return seconds


def _table(seconds: Seconds, names: Sequence[str], title: str) -> Table:
    others = compared(names)
    table = Table(
        title,
        ["ms", *names, *(f"{name}/torch" for name in others)],
        notes=["CPU time of the calling thread, and ratios: median [quartiles]; each sample in a process of its own"],
    )
    for part, samples in seconds.items():
        cells = [
            ""
            if part == "fully_shard" and base_of(name) == UNSHARDED
            else spread([1e3 * each for each in samples[name]], 1)
            for name in names
        ]
        table.add(part, *cells, *ratios(samples, names))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__.splitlines()[0])
    parser.add_argument("--impl", type=lambda text: text.split(","), default=list(IMPLEMENTATIONS), metavar="NAMES")
    parser.add_argument("--blocks", type=int, default=8, help="of 12 small parameters (default: 8)")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--repetitions", type=int, default=5, help="interleaved (default: 5)")
    parser.add_argument("--no-optimizer", action="store_true", help="leave AdamW out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    given = parser.parse_args(arguments)
    parts = [part for part in PARTS if part != ADAMW or not given.no_optimizer]
    sizes = {"blocks": given.blocks, "world_size": given.world_size, "repetitions": given.repetitions}
    seconds = measure(given.impl, **sizes, parts=parts)
    title = (
        f"First step, {given.blocks} blocks of 12 small parameters over {given.world_size} ranks, torch "
        f"{torch.__version__}; {given.repetitions} interleaved repetitions"
    )
    print(_table(seconds, given.impl, title).render())
    write_json(given.json, seconds=seconds)


if __name__ == "__main__":
    main()
