"""`python -m benchmarks.scaling`: how the cost of wrapping and of a step grows with the world and with the model.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --impl fsdp2 --blocks 4,64,512

On the fake process group, so that any world fits in one process. CPU time of the calling thread, medians. Exponents are
those of a straight line through the logarithms: 0 is flat, 1 proportional. Two worlds are compared on parameters whose
dim 0 (4096) divides by both, since padding of smaller ones is work that grows with the world by nature.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.implementations import UNSHARDED, ShardingOptions, fake_process_group, shard_blocks
from benchmarks.models import build_model, small_parameters
from benchmarks.tables import Table

ROWS = 4096
Build = Callable[[], tuple[nn.Module, torch.Tensor]]
"""Makes a model with `blocks`, and its input."""


class Scales(nn.Module):
    """Multiplies by a product of vectors of `ROWS` elements."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(ROWS) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(ROWS,)` to the same shape."""
        for scale in self.scales:
            x = x * scale
        return x


class Tall(nn.Module):
    """Blocks of parameters that divide by every world up to `ROWS`."""

    def __init__(self, blocks: int, params_per_block: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scales(params_per_block) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(ROWS,)` to a scalar loss."""
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).sum()


def _tall() -> tuple[nn.Module, torch.Tensor]:
    return Tall(8, 12), torch.ones(ROWS)


def _small(blocks: int) -> Build:
    spec = small_parameters(blocks=blocks, params_per_block=12)
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
    gc.collect()
    gc.disable()
    for _ in range(repetitions):
        start = time.thread_time()
        action()
        samples.append(time.thread_time() - start)
    gc.enable()
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

        for _ in range(3):
            step()
        return 1e6 * wrapping / len(parameters), 1e6 * _seconds(step, repetitions) / len(parameters)


def _exponent(sizes: Sequence[int], values: Sequence[float]) -> str:
    if len(sizes) < 2 or min(values) <= 0:
        return "-"
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values])
    return f"{slope:.2f}"


def _table(
    title: str,
    label: str,
    sizes: Sequence[int],
    names: Sequence[str],
    measure: Callable[[str, int], tuple[float, float]],
) -> Table:
    table = Table(title, ["us per parameter", *(f"{label} {size}" for size in sizes), "exponent"])
    for name in names:
        wraps, steps = zip(*(measure(name, size) for size in sizes), strict=True)
        for what, values in (("fully_shard", wraps), ("forward + backward", steps)):
            if name != UNSHARDED or what != "fully_shard":
                cells = [f"{value:.1f}" for value in values]
                table.add(f"{name}: {what}", *cells, _exponent(sizes, values))
    return table


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--impl", type=lambda text: text.split(","), default=[UNSHARDED, "torch", "fsdp2"])
    parser.add_argument("--worlds", type=_sizes, default=[8, 64, 512, 4096], help="default: 8,64,512,4096")
    parser.add_argument("--blocks", type=_sizes, default=[4, 16, 64, 192], help="default: 4,16,64,192")
    parser.add_argument("--repetitions", type=int, default=15)
    given = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)\n")
    worlds = _table(
        "8 blocks of 12 small parameters, by world size: padded to the world",
        "W",
        given.worlds,
        given.impl,
        lambda name, world: _measure(name, _small(8), world, given.repetitions),
    )
    tall = _table(
        "8 blocks of 12 parameters with 4096 rows, by world size: no padding",
        "W",
        given.worlds,
        given.impl,
        lambda name, world: _measure(name, _tall, world, given.repetitions),
    )
    blocks = _table(
        "blocks of 12 small parameters, world size 8, by their number",
        "blocks",
        given.blocks,
        given.impl,
        lambda name, count: _measure(name, _small(count), 8, given.repetitions),
    )
    print("\n\n".join(table.render() for table in (worlds, tall, blocks)))


if __name__ == "__main__":
    main()
