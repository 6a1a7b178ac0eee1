"""`python -m benchmarks.primitives`: the forms of all-gather and reduce-scatter on gloo, by size and number of ranks.

    python -m benchmarks.primitives --ranks 4
    python -m benchmarks.primitives --ranks 32 --forms native,peers --largest 4096     many ranks: less of each

What `fsdp2.plugs.transports.gloo_p2p` chooses by. Every rank is a process of one thread; repetitions of all forms are
interleaved.
Printed for rank 0, per form: CPU milliseconds of all its threads / wall milliseconds, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.ranks import on_ranks
from benchmarks.tables import Table
from fsdp2.core.transport import Native
from fsdp2.plugs.transports.gloo_p2p import PeerToPeer

KIB = 1 << 10
SIZES = (16 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB, 65536 * KIB)
MOVED_BYTES = 1 << 28

Exchange = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]
"""Of the whole (world_size * n,) and this rank's part (n,)."""


def _gather(transport: type[Native]) -> Exchange:
    def gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        works: list[dist.Work] = []
        transport(group).all_gather([(whole, part)], works)
        for work in works:
            work.wait()

    return gather


def _scatter(transport: type[Native]) -> Exchange:
    def scatter(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
        works: list[dist.Work] = []
        transport(group).reduce_scatter([(part, whole)], dist.ReduceOp.AVG, works)
        for work in works:
            work.wait()

    return scatter


def _gather_by_broadcasts(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    parts = whole.split(part.numel())
    parts[group.rank()].copy_(part)
    works = [dist.broadcast(each, group_src=rank, group=group, async_op=True) for rank, each in enumerate(parts)]
    for work in works:
        if work is not None:
            work.wait()


def _scatter_by_all_reduce(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=group)
    part.copy_(whole.split(part.numel())[group.rank()])


def _scatter_by_all_to_all(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    arrived = torch.empty_like(whole)
    dist.all_to_all_single(arrived, whole, group=group)
    torch.mean(arrived.view(group.size(), -1), 0, out=part)


FORMS: dict[str, Exchange] = {
    "gather: native": _gather(Native),
    "gather: peers": _gather(PeerToPeer),
    "gather: broadcasts": _gather_by_broadcasts,
    "scatter: native": _scatter(Native),
    "scatter: peers": _scatter(PeerToPeer),
    "scatter: all-reduce": _scatter_by_all_reduce,
    "scatter: all-to-all": _scatter_by_all_to_all,
}


def _measure_on_rank(
    world_size: int, names: Sequence[str], sizes: Sequence[int], most: int
) -> dict[str, list[tuple[float, float]]]:
    group = dist.group.WORLD
    assert group is not None, "initialized"
    medians: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for nbytes in sizes:
        whole = torch.full((nbytes // 4,), 0.5)
        part = torch.ones(nbytes // 4 // world_size)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(max(5, min(most, MOVED_BYTES // nbytes))):
            for name in names:
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                FORMS[name](whole, part, group)
                samples[name].append((time.process_time() - cpu, time.perf_counter() - wall))
        for name, pairs in samples.items():
            cpus, walls = zip(*pairs, strict=True)
            medians[name].append((statistics.median(cpus), statistics.median(walls)))
    return medians


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.primitives", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--forms", default="", help="names that a form's must end in, by commas (default: all forms)")
    parser.add_argument("--largest", type=int, default=SIZES[-1] // KIB, help="KiB of the largest whole")
    parser.add_argument("--repetitions", type=int, default=40, help="at most so many of each (default: 40)")
    options = parser.parse_args(arguments)
    ranks, ends = options.ranks, tuple(options.forms.split(","))
    names = [name for name in FORMS if name.endswith(ends)]
    sizes = [each for each in SIZES if each <= options.largest * KIB]
    medians = on_ranks(ranks, _measure_on_rank, ranks, names, sizes, options.repetitions)[0]
    table = Table(
        f"torch {torch.__version__}, gloo, {ranks} ranks: CPU ms of one rank / wall ms, by bytes of the whole",
        ["", *(f"{nbytes // KIB} KiB" for nbytes in sizes)],
    )
    for name, pairs in medians.items():
        table.add(name, *(f"{1e3 * cpu:.2f} / {1e3 * wall:.2f}" for cpu, wall in pairs))
    print(table.render())


if __name__ == "__main__":
    main()
