"""`python -m benchmarks.fsdp1`: FSDP1's wrapper here beside torch's FSDP1 and `fully_shard`, in one run.

    fsdp1-flat   torch's FullyShardedDataParallel, use_orig_params=False: torch's fastest
    fsdp1        the same with use_orig_params=True
    torch        torch's fully_shard
    fsdp2        fully_shard here
    wrapper      FullyShardedDataParallel here

Steps run on torch's fake process group, so that no figure contains communication, and are timed in CPU time of the
calling thread, interleaved. State dicts run on real gloo ranks, as torch's exchange objects, in CPU time of all threads
of all ranks. Whole steps on real ranks are measured by
`python -m benchmarks.throughput --impl unsharded,fsdp1,fsdp1-flat,torch,fsdp2,wrapper`.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.counts import StepCounts, count_step
from benchmarks.host_time import FORWARD_AND_BACKWARD, WARM_UP_STEPS, garbage_collector_off, measure_host_times
from benchmarks.implementations import UNSHARDED, WRAPPING_MODULES, ShardingOptions, fake_process_group
from benchmarks.memory import LiveBytes, StepMemory, measure_step_memory
from benchmarks.models import LARGE_PARAMETERS, SMALL_PARAMETERS, ModelSpec
from benchmarks.ranks import on_ranks
from benchmarks.samples import spread
from benchmarks.step import Phase, Trainer
from benchmarks.tables import Table

NAMES = ("fsdp1-flat", "fsdp1", "torch", "fsdp2", "wrapper")
TIMED = {
    "forward + backward": FORWARD_AND_BACKWARD,
    "clip_grad_norm_": (Phase.CLIP,),
    "AdamW foreach": (Phase.ADAMW_FOREACH,),
    "all of these": (*FORWARD_AND_BACKWARD, Phase.CLIP, Phase.ADAMW_FOREACH),
}
BESIDE = ("fsdp1-flat", "fsdp1", "fsdp2")
"""What `wrapper` is divided by."""
KINDS = ("FULL", "SHARDED", "LOCAL", "optimizer FULL", "optimizer SHARDED")
MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp1", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=40, help="interleaved timed steps (default: 40)")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks that state dicts are made on (default: 2)")
    parser.add_argument("--state-dict-repetitions", type=int, default=10, help="default: 10")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # torch's, about its own FSDP1
    with fake_process_group(options.world_size) as mesh:
        sharding = ShardingOptions(world_size=options.world_size)
        for spec in (SMALL_PARAMETERS, LARGE_PARAMETERS):
            trainers = [Trainer(name, spec, mesh=mesh, options=sharding) for name in (UNSHARDED, *NAMES)]
            print(_times(trainers, options.repetitions).render(), "\n")
            print(_figures(trainers[1:]).render(), "\n")
    for spec in (SMALL_PARAMETERS, LARGE_PARAMETERS):
        print(_state_dicts(spec, options.ranks, options.state_dict_repetitions).render(), "\n")


def _beside(values: dict[str, float], names: Sequence[str] = BESIDE) -> list[str]:
    return [f"{values['wrapper'] / values[name]:.3f}" if values[name] else "-" for name in names]


def _times(trainers: Sequence[Trainer], repetitions: int) -> Table:
    times = measure_host_times(trainers, repetitions=repetitions)
    table = Table(
        f"Host CPU time, us per parameter ({trainers[0].spec.name}: {len(trainers[0].parameters)} parameters, torch "
        f"{torch.__version__}): median [quartiles] of {repetitions} interleaved steps",
        ["", UNSHARDED, *NAMES, *(f"wrapper/{name}" for name in BESIDE)],
    )
    for label, phases in TIMED.items():
        cells = [times.per_parameter_us(name, phases).text(1) for name in (UNSHARDED, *NAMES)]
        table.add(label, *cells, *(times.ratio("wrapper", name, phases).text(3) for name in BESIDE))
    return table


def _figures(trainers: Sequence[Trainer]) -> Table:
    """Exact figures of one step."""
    counts: dict[str, StepCounts] = {each.name: count_step(each) for each in trainers}
    memory: dict[str, StepMemory] = {each.name: measure_step_memory(each) for each in trainers}
    units = trainers[0].spec.groups
    table = Table(
        f"Exact figures of one step ({trainers[0].spec.name}, {units} units)",
        ["", *NAMES, *(f"wrapper/{name}" for name in BESIDE)],
    )

    def add(label: str, digits: int, of: Callable[[str], float]) -> None:
        values = {name: float(of(name)) for name in NAMES}
        table.add(label, *(f"{values[name]:.{digits}f}" for name in NAMES), *_beside(values))

    for phase in (*FORWARD_AND_BACKWARD, Phase.CLIP):
        add(f"{phase.value}: Python calls/unit", 1, lambda name, phase=phase: counts[name].calls[phase] / units)  # type: ignore[misc]
    add("collectives", 0, lambda name: sum(each.calls for each in counts[name].collectives().values()))
    add("copied, MiB", 3, lambda name: counts[name].copied_bytes().total() / MIB)
    add("at rest over parameters, MiB", 3, lambda name: memory[name].at_rest_over / MIB)
    add("forward: peak over parameters, MiB", 3, lambda name: memory[name].forward_over / MIB)
    add("backward: peak over parameters + gradients, MiB", 3, lambda name: memory[name].backward_over / MIB)
    return table


def state_dict_of(trainer: Trainer, kind: str) -> Callable[[], Any]:
    """What makes a state dict of one of `KINDS` of a model under an FSDP1 wrapper, and of its optimizer."""
    wrapper: Any = type(trainer.model)
    from fsdp2.compat.fsdp1 import StateDictType  # torch's own, where it has one

    of_optimizer = kind.startswith("optimizer ")
    state_dict_type = StateDictType[f"{kind.removeprefix('optimizer ')}_STATE_DICT"]

    def make() -> Any:
        with wrapper.state_dict_type(trainer.model, state_dict_type):
            if of_optimizer:
                return wrapper.optim_state_dict(trainer.model, trainer.optimizer)
            return trainer.model.state_dict()

    return make


def _state_dicts(spec: ModelSpec, ranks: int, repetitions: int) -> Table:
    by_rank = on_ranks(ranks, _state_dicts_on_rank, spec, ranks, repetitions)
    names = list(WRAPPING_MODULES)
    beside = [name for name in BESIDE if name in names]
    table = Table(
        f"State dicts ({spec.name}, {ranks} gloo ranks): CPU ms of all ranks, median [quartiles] of {repetitions}; "
        "peak of the first rank over what was there before, MiB",
        ["", *names, *(f"wrapper/{name}" for name in beside)],
    )
    for kind in KINDS:
        seconds = {
            name: [sum(each) for each in zip(*(of[kind][name][0] for of in by_rank), strict=True)] for name in names
        }
        ratios = [
            spread([mine / other for mine, other in zip(seconds["wrapper"], seconds[name], strict=True)], 3)
            for name in beside
        ]
        table.add(f"{kind}, ms", *(spread([1e3 * each for each in seconds[name]], 2) for name in names), *ratios)
        peaks = {name: by_rank[0][kind][name][1] / MIB for name in names}
        table.add(f"{kind}, MiB", *(f"{peaks[name]:.3f}" for name in names), *_beside(peaks, beside))
    return table


def _state_dicts_on_rank(
    spec: ModelSpec, ranks: int, repetitions: int
) -> dict[str, dict[str, tuple[list[float], int]]]:
    """Seconds of each repetition and the peak, by kind and implementation."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (ranks,))
    options = ShardingOptions(world_size=ranks)
    trainers = [Trainer(name, spec, mesh=mesh, options=options) for name in WRAPPING_MODULES]
    for trainer in trainers:
        trainer.warm_up(1)
    found: dict[str, dict[str, tuple[list[float], int]]] = {}
    for kind in KINDS:
        makers = {each.name: state_dict_of(each, kind) for each in trainers}
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        with garbage_collector_off():
            for repetition in range(WARM_UP_STEPS + repetitions):
                for name, make in makers.items():
                    dist.barrier()
                    start = time.process_time()
                    make()
                    if repetition >= WARM_UP_STEPS:
                        seconds[name].append(time.process_time() - start)
                    gc.collect()
        found[kind] = {name: (seconds[name], _peak(make)) for name, make in makers.items()}
    return found


class _BytesOfStateDicts(LiveBytes):
    """Without what collectives are shown: where they are made of messages, as here, tools get buffers of their own."""

    def observe(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        if op.namespace != "c10d":  # what a state dict sends and receives, other operations have made
            super().observe(op, args, kwargs, result)


def _peak(make: Callable[[], Any]) -> int:
    """Bytes that are live at most while it runs, beyond those of before."""
    tracker = _BytesOfStateDicts()
    with tracker:
        make()  # to meet every storage
    gc.collect()
    before = tracker.live()
    tracker.reset_peak()
    with tracker:
        kept = make()
    del kept
    return tracker.peak - before


if __name__ == "__main__":
    main()
