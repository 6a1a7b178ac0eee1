"""`python -m benchmarks.clip`: clipping many small sharded parameters, `fsdp2.clip_grad_norm_` beside torch's own.

Both clip the same gradients of the same sharded model in turn, on the fake process group, so that no figure contains
communication. Times are CPU times of the calling thread; ratios are taken within a repetition.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from benchmarks.counts import OperationCounter, OperationCounts, PythonCallCounter
from benchmarks.host_time import WARM_UP_STEPS, garbage_collector_off
from benchmarks.implementations import fake_process_group
from benchmarks.samples import spread
from benchmarks.step import GRADIENT_VALUE, local_tensor
from benchmarks.tables import Table

ROWS, COLUMNS = 16, 16
Clip = Callable[[list[nn.Parameter], float], torch.Tensor]
CONTENDERS: dict[str, Clip] = {"torch": torch.nn.utils.clip_grad_norm_, "fsdp2": fsdp2.clip_grad_norm_}


class Weights(nn.Module):
    """`count` weights of (16, 16)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(ROWS, COLUMNS)) for _ in range(count))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return torch.stack([factor * weight.sum() for weight in self.weights]).sum()


def sharded_parameters(count: int, mesh: DeviceMesh) -> list[nn.Parameter]:
    """`count` parameters of (16, 16), sharded over `mesh`, with the gradients of a backward pass."""
    model = Weights(count)
    fsdp2.fully_shard(model, mesh=mesh)
    model(torch.ones(())).backward()
    parameters = list(model.parameters())
    for parameter in parameters:
        assert parameter.grad is not None
        local_tensor(parameter.grad).fill_(GRADIENT_VALUE)
    return parameters


def measure(count: int, *, world_size: int, repetitions: int) -> str:
    """The table as text."""
    with fake_process_group(world_size) as mesh:
        parameters = sharded_parameters(count, mesh)
        seconds = _host_seconds(parameters, repetitions)
        operations = {name: _operations(clip, parameters) for name, clip in CONTENDERS.items()}
        calls = {name: _python_calls(clip, parameters) for name, clip in CONTENDERS.items()}
    table = Table(
        f"Clipping {count} parameters of ({ROWS}, {COLUMNS}) sharded over {world_size} ranks, torch "
        f"{torch.__version__}; times: median [quartiles] of {repetitions} interleaved repetitions",
        ["", *CONTENDERS, "fsdp2/torch"],
    )
    ratios = [mine / other for mine, other in zip(seconds["fsdp2"], seconds["torch"], strict=True)]
    times = [spread([1e6 * each / count for each in seconds[name]], digits=2) for name in CONTENDERS]
    table.add("host CPU time, us per parameter", *times, spread(ratios, digits=3))
    rows = {
        "Python calls": calls,
        "dispatched operations": {name: part.operations for name, part in operations.items()},
        "collectives": {
            name: sum(each.calls for each in part.collectives.values()) for name, part in operations.items()
        },
    }
    for label, figures in rows.items():
        ratio = f"{figures['fsdp2'] / figures['torch']:.3f}" if figures["torch"] else "-"
        table.add(label, *(str(figures[name]) for name in CONTENDERS), ratio)
    return table.render()


def _host_seconds(parameters: list[nn.Parameter], repetitions: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with garbage_collector_off():
        for repetition in range(WARM_UP_STEPS + repetitions):
            for name, clip in sorted(CONTENDERS.items(), reverse=bool(repetition % 2)):
                start = time.thread_time()
                clip(parameters, 1.0)
                if repetition >= WARM_UP_STEPS:
                    seconds[name].append(time.thread_time() - start)
    return seconds


def _operations(clip: Clip, parameters: list[nn.Parameter]) -> OperationCounts:
    counter = OperationCounter()
    with counter:
        clip(parameters, 1.0)
    return counter.counts


def _python_calls(clip: Clip, parameters: list[nn.Parameter]) -> int:
    counter = PythonCallCounter()
    with counter:
        clip(parameters, 1.0)
    return counter.calls


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clip", description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=512, help="default: 512")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--repetitions", type=int, default=80, help="interleaved (default: 80)")
    options = parser.parse_args(arguments)
    print(measure(options.parameters, world_size=options.world_size, repetitions=options.repetitions))


if __name__ == "__main__":
    main()
