"""`python -m benchmarks`: measures, prints the tables, and writes all figures as JSON on request.

    python -m benchmarks                                   unsharded, torch and fsdp2, world size 8
    python -m benchmarks --impl unsharded,torch,torch-again   how far torch differs from itself (A/A)
    python -m benchmarks --param-dtype bfloat16            the host-time model under mixed precision

Needs one process and no network. Runs on torch's fake process group, so that no figure contains
communication.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.counts import count_step
from benchmarks.host_time import WARM_UP_STEPS, measure_host_times
from benchmarks.implementations import IMPLEMENTATIONS, NAMES_HELP, ShardingOptions, available, fake_process_group
from benchmarks.memory import measure_step_memory
from benchmarks.models import LARGE_PARAMETERS, SMALL_PARAMETERS, ModelSpec, small_parameters
from benchmarks.report import render
from benchmarks.results import Results, StepFigures
from benchmarks.step import Trainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    options = _parse(arguments)
    sharding = ShardingOptions(
        world_size=options.world_size,
        reshard_after_forward=False if options.no_reshard else None,
        param_dtype=DTYPES[options.param_dtype],
    )
    spec = small_parameters(blocks=options.blocks, params_per_block=options.params_per_block)
    start = time.perf_counter()
    with fake_process_group(options.world_size) as mesh:
        results = _measure(options.impl, spec, repetitions=options.repetitions, mesh=mesh, sharding=sharding)
    print(render(results))
    print(f"\n{time.perf_counter() - start:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(results.to_json(), indent=1))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--impl",
        type=lambda text: text.split(","),
        default=list(IMPLEMENTATIONS),
        metavar="NAMES",
        help=f"comma-separated: {NAMES_HELP} (default: unsharded, torch, fsdp2)",
    )
    parser.add_argument("--repetitions", type=int, default=80, help="interleaved timed steps (default: 80)")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--blocks", type=int, default=SMALL_PARAMETERS.blocks, help="default: 32")
    parser.add_argument("--params-per-block", type=int, default=SMALL_PARAMETERS.params_per_block, help="default: 12")
    parser.add_argument("--param-dtype", choices=DTYPES, default="float32", help="of the host-time model")
    parser.add_argument("--no-reshard", action="store_true", help="reshard_after_forward=False everywhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return options


def _available_names(names: Sequence[str], param_dtype: torch.dtype) -> list[str]:
    missing = [name for name in names if not available(name, param_dtype)]
    for name in missing:
        print(f"implementation '{name}' cannot be had with {param_dtype}: left out\n")
    return [name for name in names if name not in missing]


def _measure(
    names: Sequence[str], spec: ModelSpec, *, repetitions: int, mesh: DeviceMesh, sharding: ShardingOptions
) -> Results:
    """Measures host times on `spec`, and exact figures on `spec` and on the model with large parameters."""

    def trainers_of(shape: ModelSpec, options: ShardingOptions) -> list[Trainer]:
        usable = _available_names(names, options.param_dtype)
        return [Trainer(name, shape, mesh=mesh, options=options) for name in usable]

    trainers = trainers_of(spec, sharding)
    if not trainers:
        raise SystemExit("none of the implementations is available")
    host_times = measure_host_times(trainers, repetitions=repetitions)
    figures = [_exact_figures(trainers, sharding)]
    for dtype in DTYPES.values():
        large_options = replace(sharding, param_dtype=dtype)
        if trainers := trainers_of(LARGE_PARAMETERS, large_options):
            for trainer in trainers:
                trainer.warm_up(WARM_UP_STEPS)
            figures.append(_exact_figures(trainers, large_options))
    return Results(sharding, repetitions, host_times, figures)


def _exact_figures(trainers: Sequence[Trainer], options: ShardingOptions) -> StepFigures:
    parameters = trainers[0].parameters
    block_numel = sum(parameter.numel() for parameter in trainers[0].model.blocks[0].parameters())
    figures = StepFigures(
        spec=trainers[0].spec,
        param_dtype=options.param_dtype,
        parameter_count=len(parameters),
        parameter_numel=sum(parameter.numel() for parameter in parameters),
        block_bytes=block_numel * options.param_dtype.itemsize,
    )
    for trainer in trainers:
        figures.counts[trainer.name] = count_step(trainer)
        figures.memory[trainer.name] = measure_step_memory(trainer)
    return figures


if __name__ == "__main__":
    main()
