"""`python -m benchmarks.optimizers`: AdamW and clipping on sharded parameters, beside the same on plain local tensors.

Five contenders take the same steps: plain tensors of the shapes of this rank's shards, torch's `fully_shard` with
torch's optimizer, ours with the same optimizer as an ordinary program has it, with `fsdp2.optim.local`, and that with
``flat=True``. Gradients are clipped by torch's function, of an ordinary program after `fsdp2.compat.install`, and by
`fsdp2.clip_grad_norm_`. On the fake process group, so that no figure contains communication. Times are CPU times of the
calling thread; ratios are taken within a repetition. The other table shows the first step, which DTensor makes slow, at
growing numbers of parameters.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from benchmarks.counts import OperationCounter, PythonCallCounter
from benchmarks.host_time import WARM_UP_STEPS, Quartiles, garbage_collector_off
from benchmarks.implementations import ShardingOptions, build_contender, fake_process_group
from benchmarks.models import SMALL_PARAMETERS, ModelSpec, small_parameters
from benchmarks.samples import spread, write_json
from benchmarks.step import GRADIENT_VALUE, LEARNING_RATE, local_tensor
from benchmarks.tables import Table

PLAIN, TORCH, ORDINARY, LOCAL, FLAT = "plain tensors", "torch", "fsdp2", "fsdp2 local", "fsdp2 flat"
CONTENDERS = (PLAIN, TORCH, ORDINARY, LOCAL, FLAT)
KINDS = ("AdamW foreach", "AdamW fused", "clip_grad_norm_")
FIRST_STEP_BLOCKS = (4, 8, 16)
Parameters = list[nn.Parameter]
Run = Callable[[], object]
Samples = dict[str, dict[str, list[float]]]
"""Seconds by kind and contender, one for each repetition."""


def parameters_of(spec: ModelSpec, mesh: DeviceMesh) -> dict[str, Parameters]:
    """The parameters of each contender, with gradients: ours share one model, whose gradients lie on its buffers."""
    sharded: dict[str, Parameters] = {}
    for name in ("torch", "fsdp2"):
        model, inputs = build_contender(name, spec, mesh=mesh, options=ShardingOptions(world_size=mesh.size()))
        for _ in range(2):
            model.zero_grad()
            model(inputs).backward()
        sharded[name] = list(model.parameters())
        for parameter in sharded[name]:
            assert parameter.grad is not None
            local_tensor(parameter.grad).fill_(GRADIENT_VALUE)
    plain = [nn.Parameter(local_tensor(parameter.detach()).clone()) for parameter in sharded["torch"]]
    for parameter in plain:
        parameter.grad = torch.full_like(parameter, GRADIENT_VALUE)
    return {PLAIN: plain, TORCH: sharded["torch"], **dict.fromkeys((ORDINARY, LOCAL, FLAT), sharded["fsdp2"])}


def optimizer_of(name: str, parameters: Parameters, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW as contender `name` has it, with weight decay off."""
    arguments = {"lr": LEARNING_RATE, "weight_decay": 0.0, "fused" if fused else "foreach": True}
    if name in (LOCAL, FLAT):
        return fsdp2.optim.local(torch.optim.AdamW, parameters, flat=name == FLAT, **arguments)
    return torch.optim.AdamW(parameters, **arguments)  # type: ignore[arg-type]


def runs_of(parameters: dict[str, Parameters]) -> dict[str, dict[str, Run]]:
    """What is timed, by kind and contender. Clipping has no flat form."""

    torchs = torch.nn.utils.clip_grad_norm_
    functions = {ORDINARY: fsdp2.optim.torch_clipping.substitutes()[torchs], LOCAL: fsdp2.clip_grad_norm_}

    def clip(name: str) -> Run:
        function = functions.get(name, torchs)
        return lambda: function(parameters[name], 1.0)

    runs: dict[str, dict[str, Run]] = {}
    for kind in KINDS[:2]:
        fused = kind == "AdamW fused"
        runs[kind] = {name: optimizer_of(name, parameters[name], fused=fused).step for name in CONTENDERS}
    runs[KINDS[2]] = {name: clip(name) for name in CONTENDERS[:-1]}
    return runs


def measure_steps(spec: ModelSpec, mesh: DeviceMesh, *, repetitions: int) -> tuple[str, Samples]:
    """The first table as text, and what it is made of."""
    parameters = parameters_of(spec, mesh)
    count = len(parameters[PLAIN])
    runs = runs_of(parameters)
    table = Table(
        f"AdamW step and clipping, {count} parameters sharded over {mesh.size()} ranks, torch {torch.__version__}; "
        f"medians of {repetitions} interleaved repetitions",
        ["", "us/parameter", "to plain tensors", "to torch", "Python calls", "operations"],
        notes=["us/parameter: CPU time of the calling thread. Ratios: median [quartiles]."],
    )
    samples: Samples = {}
    for kind, contenders in runs.items():
        seconds = samples[kind] = _seconds(contenders, repetitions)
        for name, run in contenders.items():
            ratios = [_ratio(seconds[name], seconds[other]) for other in (PLAIN, TORCH)]
            micro = 1e6 * Quartiles.of(seconds[name]).median / count
            table.add(f"{kind}, {name}", f"{micro:.2f}", *ratios, str(_python_calls(run)), str(_operations(run)))
    return table.render(), samples


def _seconds(contenders: dict[str, Run], repetitions: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    with garbage_collector_off():
        for repetition in range(WARM_UP_STEPS + repetitions):
            first = repetition % len(names)
            for name in (*names[first:], *names[:first]):
                contenders[name]()  # lest the caches be those of the one before
                start = time.thread_time()
                contenders[name]()
                if repetition >= WARM_UP_STEPS:
                    seconds[name].append(time.thread_time() - start)
            gc.collect()
    return seconds


def _ratio(mine: Sequence[float], other: Sequence[float]) -> str:
    return spread([one / another for one, another in zip(mine, other, strict=True)], 3)


def _python_calls(run: Run) -> int:
    counter = PythonCallCounter()
    with counter:
        run()
    return counter.calls


def _operations(run: Run) -> int:
    counter = OperationCounter()
    with counter:
        run()
    return counter.counts.operations


def measure_first_steps(blocks: Sequence[int], mesh: DeviceMesh) -> str:
    """The other table as text: every contender's first foreach step, in ms of CPU time."""
    table = Table("First AdamW step (foreach), ms of CPU time", ["parameters", *CONTENDERS])
    for number in blocks:
        parameters = parameters_of(small_parameters(blocks=number, params_per_block=12), mesh)
        cells = []
        for name in CONTENDERS:
            optimizer = optimizer_of(name, parameters[name], fused=False)
            with garbage_collector_off():  # else whoever comes after torch collects what torch has left
                start = time.thread_time()
                optimizer.step()
                cells.append(f"{1e3 * (time.thread_time() - start):.1f}")
        table.add(str(len(parameters[PLAIN])), *cells)
    return table.render()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=SMALL_PARAMETERS.blocks, help="of 12 parameters (default: 32)")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--repetitions", type=int, default=60, help="interleaved (default: 60)")
    parser.add_argument(
        "--first-steps",
        type=lambda text: [int(part) for part in text.split(",") if part],
        default=list(FIRST_STEP_BLOCKS),
        metavar="BLOCKS",
        help="numbers of blocks for the first steps (default: 4,8,16)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples of the second table to FILE")
    options = parser.parse_args(arguments)
    with fake_process_group(options.world_size) as mesh:
        # Whatever torch sets up once, on behalf of nobody.
        optimizer_of(
            PLAIN, parameters_of(small_parameters(blocks=1, params_per_block=2), mesh)[PLAIN], fused=False
        ).step()
        print(measure_first_steps(options.first_steps, mesh))
        print()
        spec = small_parameters(blocks=options.blocks, params_per_block=12)
        text, samples = measure_steps(spec, mesh, repetitions=options.repetitions)
        print(text)
    write_json(options.json, seconds=samples)


if __name__ == "__main__":
    main()
