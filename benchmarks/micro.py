"""`python -m benchmarks.micro`: single operations of one group: unshard, reshard, reduce; beside torch's `fully_shard`.

    python -m benchmarks.micro --parameters 36
    python -m benchmarks.micro --impl unsharded,torch,torch-again     how far torch differs from itself (A/A)

On the fake process group, through the public methods alone. A reduction is measured as the backward of a group whose
parameters stay unsharded: it reduces the gradients, delivers and reshards; the unsharded model's own backward stands
beside it. CPU time of the calling thread, operations interleaved; ratios are taken within a repetition.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.clip import Weights
from benchmarks.counts import PythonCallCounter
from benchmarks.host_time import WARM_UP_STEPS, garbage_collector_off
from benchmarks.implementations import (
    IMPLEMENTATIONS,
    UNSHARDED,
    ShardingOptions,
    base_of,
    fake_process_group,
    shard_group,
)
from benchmarks.samples import compared, ratios, spread, write_json
from benchmarks.tables import Table

UNSHARD, RESHARD, REDUCE = "unshard", "reshard", "backward: reduce, reshard"
OPERATIONS = (UNSHARD, RESHARD, REDUCE)
Seconds = dict[str, dict[str, list[float]]]
"""By operation and implementation, one for each repetition."""


class Group:
    """A module of `count` weights under one implementation, whose parameters are unsharded and resharded by hand."""

    def __init__(self, name: str, count: int, mesh: DeviceMesh) -> None:
        self.module = Weights(count)
        self.is_sharded = base_of(name) != UNSHARDED
        options = ShardingOptions(world_size=mesh.size(), reshard_after_forward=False)
        shard_group(name, self.module, mesh=mesh, options=options)
        self._factor = torch.ones(())
        self._loss: torch.Tensor | None = None

    def has(self, operation: str) -> bool:
        """Whether there is such an operation; an unsharded module has a backward only."""
        return self.is_sharded or operation == REDUCE

    def prepare(self, operation: str) -> None:
        """What comes before the operation that is measured."""
        if operation == RESHARD:
            self._call("unshard")
        elif operation == REDUCE:
            self._loss = self.module(self._factor)

    def run(self, operation: str) -> None:
        """The operation itself."""
        if operation == REDUCE:
            assert self._loss is not None, "prepared"
            self._loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._call(operation)

    def clean_up(self, operation: str) -> None:
        """Leave the group sharded and without gradients."""
        self._loss = None
        if operation == UNSHARD:
            self._call("reshard")
        for parameter in self.module.parameters():
            parameter.grad = None

    def _call(self, method: str) -> None:
        getattr(self.module, method)()


def measure(
    names: Sequence[str], count: int, *, world_size: int, repetitions: int
) -> tuple[Seconds, dict[str, dict[str, int]]]:
    """Seconds, and Python calls by operation and implementation."""
    seconds: Seconds = {operation: {} for operation in OPERATIONS}
    calls: dict[str, dict[str, int]] = {operation: {} for operation in OPERATIONS}
    with fake_process_group(world_size) as mesh:
        groups = {name: Group(name, count, mesh) for name in names}
        with garbage_collector_off():
            for repetition in range(WARM_UP_STEPS + repetitions):
                first = repetition % len(names)
                for name in (*names[first:], *names[:first]):
                    for operation in reversed(OPERATIONS):  # the first backward initializes
                        sample = _timed(groups[name], operation)
                        if repetition >= WARM_UP_STEPS and sample is not None:
                            seconds[operation].setdefault(name, []).append(sample)
        for name, group in groups.items():
            for operation in filter(group.has, OPERATIONS):
                group.prepare(operation)
                with PythonCallCounter() as counter:
                    group.run(operation)
                group.clean_up(operation)
                calls[operation][name] = counter.calls
    return seconds, calls


def _timed(group: Group, operation: str) -> float | None:
    if not group.has(operation):
        return None
    group.prepare(operation)
    start = time.thread_time()
    group.run(operation)
    sample = time.thread_time() - start
    group.clean_up(operation)
    return sample


def _table(seconds: Seconds, calls: dict[str, dict[str, int]], names: Sequence[str], title: str) -> Table:
    others = compared(names)
    notes = ["us of CPU time of the calling thread, and ratios: median [quartiles]"]
    table = Table(title, ["", *names, *(f"{name}/torch" for name in others)], notes=notes)
    for operation, samples in seconds.items():
        cells = [spread([1e6 * each for each in samples[name]], 1) if name in samples else "" for name in names]
        table.add(f"{operation}, us", *cells, *ratios(samples, names))
    for operation, found in calls.items():
        cells = [str(found.get(name, "")) for name in names]
        table.add(f"{operation}, calls", *cells, *(f"{found[name] / found['torch']:.3f}" for name in others))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro", description=__doc__.splitlines()[0])
    parser.add_argument("--impl", type=lambda text: text.split(","), default=list(IMPLEMENTATIONS), metavar="NAMES")
    parser.add_argument("--parameters", type=int, default=12, help="of the group, of (16, 16) (default: 12)")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--repetitions", type=int, default=200, help="interleaved (default: 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    given = parser.parse_args(arguments)
    names = given.impl
    seconds, calls = measure(names, given.parameters, world_size=given.world_size, repetitions=given.repetitions)
    title = (
        f"One group of {given.parameters} parameters of (16, 16) over {given.world_size} ranks, torch "
        f"{torch.__version__}; {given.repetitions} interleaved repetitions"
    )
    print(_table(seconds, calls, names, title).render())
    write_json(given.json, seconds=seconds, python_calls=calls)


if __name__ == "__main__":
    main()
