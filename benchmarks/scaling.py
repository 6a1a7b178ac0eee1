"""`python -m benchmarks.scaling`: how the cost of wrapping and of a step grows with the world and with the model.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --impl fsdp2 --blocks 4,64,512
    python -m benchmarks.scaling --impl torch,torch-again,fsdp2     how far torch differs from itself (A/A)

On the fake process group, so that any world fits in one process. CPU time of the calling thread. Every round measures
every contender at every size, in a new model, the median of some steps; printed are medians and quartiles of rounds,
and of what the largest size takes over the smallest in the same round. Exponents are those of a straight line through
the logarithms: 0 is flat, 1 proportional. Worlds are compared on parameters whose dim 0 (4096) divides by both as well,
since padding of smaller ones is work that grows with the world by nature.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.host_time import WARM_UP_STEPS, Quartiles, garbage_collector_off
from benchmarks.implementations import NAMES_HELP, UNSHARDED, ShardingOptions, base_of, fake_process_group, shard_blocks
from benchmarks.models import build_model, small_parameters
from benchmarks.samples import compared, spread, write_json
from benchmarks.tables import Table

ROWS = 4096
WRAP, STEP = "fully_shard", "forward + backward"
Build = Callable[[], tuple[nn.Module, torch.Tensor]]
"""Makes a model with `blocks`, and its input."""
Samples = dict[str, dict[str, dict[int, list[float]]]]
"""Microseconds per parameter by what was measured, contender and size, one for each round."""


class Scales(nn.Module):
    """Multiplies by a product of matrices of `ROWS` rows."""

    def __init__(self, count: int, columns: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(ROWS, columns) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(ROWS, columns)` to the same shape."""
        for scale in self.scales:
            x = x * scale
        return x


class Tall(nn.Module):
    """Blocks of parameters that divide by every world up to `ROWS`."""

    def __init__(self, blocks: int, params_per_block: int, columns: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scales(params_per_block, columns) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(ROWS, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(ROWS, columns)` to a scalar loss."""
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).sum()


def _tall(columns: int) -> Build:
    return lambda: (Tall(8, 12, columns), torch.ones(ROWS, columns))


def _small(blocks: int, params_per_block: int = 12) -> Build:
    spec = small_parameters(blocks=blocks, params_per_block=params_per_block)
    return lambda: (build_model(spec), torch.ones(spec.batch_rows, spec.dim))


@contextlib.contextmanager
def _silent_collectives() -> Iterator[None]:
    """Collectives do nothing: those of the fake group copy this rank's part once for every rank of the world."""
    names = ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    with contextlib.ExitStack() as stack:
        for name in names:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, lambda *args, **kwargs: None))
        yield


def _seconds(action: Callable[[], object], repetitions: int) -> float:
    samples = []
    with garbage_collector_off():
        for _ in range(repetitions):
            start = time.thread_time()
            action()
            samples.append(time.thread_time() - start)
    return statistics.median(samples)


def _measure(name: str, build: Build, world_size: int, repetitions: int) -> tuple[float, float]:
    """Microseconds per parameter of wrapping, and of one forward and backward."""
    with fake_process_group(world_size) as mesh, _silent_collectives():
        model, inputs = build()
        start = time.thread_time()
        shard_blocks(name, model, mesh=mesh, options=ShardingOptions(world_size=world_size))
        wrapping = time.thread_time() - start
        parameters = list(model.parameters())

        def step() -> None:
            model(inputs).backward()
            for parameter in parameters:
                parameter.grad = None

        for _ in range(WARM_UP_STEPS):
            step()
        return 1e6 * wrapping / len(parameters), 1e6 * _seconds(step, repetitions) / len(parameters)


def _sample(
    names: Sequence[str], sizes: Sequence[int], rounds: int, measure: Callable[[str, int], tuple[float, float]]
) -> Samples:
    samples: Samples = {what: {name: {size: [] for size in sizes} for name in names} for what in (WRAP, STEP)}
    for _ in range(rounds):
        for size in sizes:
            for name in names:
                for what, value in zip((WRAP, STEP), measure(name, size), strict=True):
                    samples[what][name][size].append(value)
    return samples


def _exponent(sizes: Sequence[int], values: Sequence[float]) -> str:
    if len(sizes) < 2 or min(values) <= 0:
        return "-"
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values])
    return f"{slope:.2f}"


def _table(title: str, label: str, sizes: Sequence[int], samples: Samples) -> Table:
    growth = f"{label} {sizes[-1]} / {sizes[0]}"
    table = Table(title, ["us per parameter", *(f"{label} {size}" for size in sizes), "exponent", growth])
    for what, by_name in samples.items():
        for name, by_size in by_name.items():
            if what == WRAP and base_of(name) == UNSHARDED:
                continue
            medians = [Quartiles.of(by_size[size]).median for size in sizes]
            grown = [last / first for first, last in zip(by_size[sizes[0]], by_size[sizes[-1]], strict=True)]
            cells = [spread(by_size[size], 1) for size in sizes]
            table.add(f"{name}: {what}", *cells, _exponent(sizes, medians), spread(grown, 3))
    steps = samples[STEP]
    if UNSHARDED in steps:
        for name in compared(list(steps)):
            cells = [spread(_over_unsharded(steps, name, size), 3) for size in sizes]
            table.add(f"{name} / torch, over {UNSHARDED}", *cells, "", "")
    return table


def _over_unsharded(steps: dict[str, dict[int, list[float]]], name: str, size: int) -> list[float]:
    """What sharding adds to a step, over what torch's adds to it in the same round."""
    rounds = zip(*(steps[each][size] for each in (name, "torch", UNSHARDED)), strict=True)
    return [(mine - unsharded) / (other - unsharded) for mine, other, unsharded in rounds]


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--impl",
        type=lambda text: text.split(","),
        default=[UNSHARDED, "torch", "fsdp2"],
        metavar="NAMES",
        help=f"comma-separated: {NAMES_HELP}",
    )
    parser.add_argument("--worlds", type=_sizes, default=[8, 64, 512, 4096], help="default: 8,64,512,4096")
    parser.add_argument(
        "--columns",
        type=_sizes,
        default=[1, 16],
        help="of the matrices with 4096 rows, a table for each (default: 1,16)",
    )
    parser.add_argument("--params-per-block", type=_sizes, default=[1, 12, 36], help="default: 1,12,36")
    parser.add_argument("--blocks", type=_sizes, default=[4, 16, 64, 192], help="default: 4,16,64,192")
    parser.add_argument("--repetitions", type=int, default=15, help="steps, of which the median counts (default: 15)")
    parser.add_argument("--rounds", type=int, default=3, help="of everything, interleaved (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    given = parser.parse_args(arguments)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s); median [quartiles] of {given.rounds} rounds\n"
    )
    figures: dict[str, Samples] = {}

    def show(title: str, label: str, sizes: Sequence[int], measure: Callable[[str, int], tuple[float, float]]) -> None:
        figures[title] = _sample(given.impl, sizes, given.rounds, measure)
        print(_table(title, label, sizes, figures[title]).render(), end="\n\n", flush=True)

    steps = given.repetitions
    show(
        "8 blocks of 12 small parameters, by world size: padded to the world",
        "W",
        given.worlds,
        lambda name, world: _measure(name, _small(8), world, steps),
    )
    for columns in given.columns:
        show(
            f"8 blocks of 12 parameters of 4096 x {columns}, by world size: no padding",
            "W",
            given.worlds,
            lambda name, world, columns=columns: _measure(name, _tall(columns), world, steps),
        )
    show(
        "8 blocks of small parameters, world size 8, by how many they have",
        "P",
        given.params_per_block,
        lambda name, count: _measure(name, _small(8, count), 8, steps),
    )
    show(
        "blocks of 12 small parameters, world size 8, by their number",
        "blocks",
        given.blocks,
        lambda name, count: _measure(name, _small(count), 8, steps),
    )
    write_json(given.json, microseconds_per_parameter=figures)


if __name__ == "__main__":
    main()
