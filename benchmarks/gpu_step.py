"""`python -m benchmarks.gpu_step`: whole steps of a large model on one GPU, with a sleep in the place of the wire.

    python -m benchmarks.gpu_step --impl torch,torch-again,fsdp2 --gigabytes-per-second 100
    python -m benchmarks.gpu_step --trace traces                      a Chrome trace of a step of each
    python -m benchmarks.gpu_step --device cpu --dim 64               a rehearsal: the same program, no figures of worth

One process is rank 0 of a fake group. In the place of torch.distributed's collectives, for torch and for fsdp2, this
rank's part is copied, and the communication stream is busy for as long as the bytes would take on the wire. What of
that is not hidden behind compute is `exposed`: the step less the same process's step over a wire without length.
Samples are taken in processes of their own, in turns, each with its own allocator. Real NCCL between several GPUs is
not measured.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.host_time import Quartiles
from benchmarks.implementations import AGAIN, ShardingOptions, fake_process_group, shard_blocks
from benchmarks.models import LARGE_PARAMETERS, ModelSpec, build_model
from benchmarks.samples import compared, write_json
from benchmarks.step import LEARNING_RATE
from benchmarks.tables import Table

STEP, EXPOSED, ALLOCATED, RESERVED = "step, ms", "exposed, ms", "allocated, MiB", "reserved, MiB"
FIGURES = (STEP, EXPOSED, ALLOCATED, RESERVED)
WARM_UP_STEPS = 3
MEBIBYTE = 2**20
Samples = dict[str, dict[str, list[float]]]
"""By figure and implementation, one for each process."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one process measures.

    Attributes:
        rows: of a batch.
        bytes_per_second: of the wire, for what one rank receives; 0: it takes no time.
        steps: that are timed, after a few to warm up.
        trace: the Chrome trace of one more step goes here, if anywhere.
    """

    name: str
    spec: ModelSpec
    rows: int
    device: str
    world_size: int
    bytes_per_second: float
    steps: int
    trace: Path | None = None


class Wire:
    """Keeps the current stream (on CPU: the host) busy for as long as bytes are under way.

    Attributes:
        seconds_per_byte: 0 without length.
    """

    def __init__(self, device: torch.device, bytes_per_second: float) -> None:
        self._is_host = device.type == "cpu"
        self.seconds_per_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._cycles_per_second = 0.0 if self._is_host else _cycles_per_second()

    def send(self, nbytes: int) -> None:
        """Be busy for ``nbytes``."""
        seconds = nbytes * self.seconds_per_byte
        if not seconds:
            return
        if self._is_host:
            time.sleep(seconds)
        else:
            torch.cuda._sleep(int(seconds * self._cycles_per_second))


def _cycles_per_second() -> float:
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return 1e3 * cycles / start.elapsed_time(end)


@contextmanager
def delayed_collectives(wire: Wire) -> Iterator[None]:
    """In the place of torch.distributed's, which torch and fsdp2 look up at each call: so both take their usual ways.

    Every rank has what this one has: of a gather that many copies, of a reduction this rank's part.
    """

    def gather(*tensors: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False, **named: torch.Tensor) -> None:
        output, input, *_ = [*tensors, *named.values()]
        world_size = group.size()
        output.view(world_size, -1).copy_(input.view(1, -1).expand(world_size, -1))
        wire.send(output.nbytes * (world_size - 1) // world_size)

    def reduce(
        *tensors: torch.Tensor, group: dist.ProcessGroup, op: Any = None, async_op: bool = False, **named: torch.Tensor
    ) -> None:
        output, input, *_ = [*tensors, *named.values()]
        output.copy_(input.view(-1)[: output.numel()])
        wire.send(input.nbytes * (group.size() - 1) // group.size())

    names = {"all_gather_single": gather, "all_gather_into_tensor": gather}
    names |= {"reduce_scatter_single": reduce, "reduce_scatter_tensor": reduce}
    with ExitStack() as stack:
        for name, function in names.items():
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, function))
        yield


def measure_in_process(run: Run) -> dict[str, float]:
    """Milliseconds per step (median) and what of it is exposed, and the peaks of both kinds of memory."""
    device = torch.device(run.device)
    with fake_process_group(run.world_size, device.type) as mesh, ExitStack() as stack:
        with device:
            model = build_model(run.spec)
        options = ShardingOptions(world_size=run.world_size, param_dtype=torch.bfloat16)
        shard_blocks(run.name, model, mesh=mesh, options=options)
        wire = Wire(device, run.bytes_per_second)
        stack.enter_context(delayed_collectives(wire))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        batch = torch.linspace(-1, 1, run.rows * run.spec.dim, device=device).view(run.rows, -1)

        def step() -> None:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM_UP_STEPS):
            step()
        gc.collect()
        _reset_peaks(device)
        over_wire = Quartiles.of([_milliseconds(step, device) for _ in range(run.steps)]).median
        found = {STEP: over_wire, **_peaks(device)}
        if run.trace is not None:
            with torch.profiler.profile() as profile:
                step()
                _synchronize(device)
            run.trace.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(run.trace / f"{run.name}.json"))
        wire.seconds_per_byte = 0.0
        found[EXPOSED] = over_wire - Quartiles.of([_milliseconds(step, device) for _ in range(run.steps)]).median
    return found


def _milliseconds(step: Any, device: torch.device) -> float:
    _synchronize(device)
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _reset_peaks(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peaks(device: torch.device) -> dict[str, float]:
    if device.type == "cpu":
        return {}
    return {
        ALLOCATED: torch.cuda.max_memory_allocated(device) / MEBIBYTE,
        RESERVED: torch.cuda.max_memory_reserved(device) / MEBIBYTE,
    }


def measure(names: Sequence[str], run: Run, repetitions: int) -> Samples:
    """Every implementation in turn, ``repetitions`` times."""
    samples: Samples = {figure: {name: [] for name in names} for figure in FIGURES}
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        for repetition in range(repetitions):
            first = repetition % len(names)
            for name in (*names[first:], *names[:first]):
                here = replace(run, name=name, trace=run.trace if repetition == 0 else None)
                for figure, value in pool.apply(measure_in_process, (here,)).items():
                    samples[figure][name].append(value)
    return samples


def _table(samples: Samples, names: Sequence[str], title: str) -> Table:
    others = compared(names)
    table = Table(
        title,
        ["", *names, *(f"{name}/torch" for name in others)],
        notes=[f"medians of processes, and ratios of medians; '{AGAIN}' is the same implementation again: noise"],
    )
    for figure, found in samples.items():
        medians = {name: Quartiles.of(values).median for name, values in found.items() if values}
        if medians:
            ratios = [f"{medians[name] / medians['torch']:.3f}" for name in others]
            table.add(figure, *(f"{medians[name]:.1f}" for name in names), *ratios)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own).

    Raises:
        SystemExit: there is no such device.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_step", description=__doc__.splitlines()[0])
    parser.add_argument("--impl", type=lambda text: text.split(","), default=["torch", "fsdp2"], metavar="NAMES")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--blocks", type=int, default=16, help="of two matrices (default: 16)")
    parser.add_argument("--dim", type=int, default=2048, help="of a matrix, the other is 8 times that (default: 2048)")
    parser.add_argument("--rows", type=int, default=8192, help="of a batch (default: 8192)")
    parser.add_argument("--gigabytes-per-second", type=float, default=100.0, help="of the wire (default: 100)")
    parser.add_argument("--steps", type=int, default=10, help="timed in each process (default: 10)")
    parser.add_argument("--repetitions", type=int, default=3, help="processes of each, in turns (default: 3)")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a Chrome trace of one step of each there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is available to torch; --device cpu rehearses without figures of worth")
    spec = replace(LARGE_PARAMETERS, name="large", blocks=given.blocks, dim=given.dim, hidden_dim=8 * given.dim)
    run = Run(
        "",
        spec,
        given.rows,
        given.device,
        given.world_size,
        1e9 * given.gigabytes_per_second,
        given.steps,
        given.trace,
    )
    samples = measure(given.impl, run, given.repetitions)
    numel = given.blocks * 16 * given.dim**2
    title = (
        f"{numel / 1e9:.2f}e9 parameters in bf16, reduced in fp32, {given.rows} rows, rank 0 of {given.world_size}, "
        f"a wire of {given.gigabytes_per_second:g} GB/s, {given.device}, torch {torch.__version__}"
    )
    print(_table(samples, given.impl, title).render())
    write_json(given.json, samples=samples)


if __name__ == "__main__":
    main()
