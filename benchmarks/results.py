"""Everything one run measured, and its form as JSON."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.counts import StepCounts
from benchmarks.host_time import HostTimes
from benchmarks.implementations import UNSHARDED, ShardingOptions
from benchmarks.memory import StepMemory
from benchmarks.models import ModelSpec
from benchmarks.step import Phase

JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the versions, without which no figure means anything."""

    torch: str
    python: str
    cpu: str
    cores: int | None
    threads: int
    load_average: tuple[float, float, float]

    @classmethod
    def current(cls) -> Environment:
        return cls(
            torch=str(torch.__version__),
            python=platform.python_version(),
            cpu=_cpu_name(),
            cores=os.cpu_count(),
            threads=torch.get_num_threads(),
            load_average=os.getloadavg(),
        )


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The exact figures of one model and dtype: `counts[implementation]`, `memory[implementation]`.

    `block_bytes` are those of one block's unsharded parameters in `param_dtype`.
    """

    spec: ModelSpec
    param_dtype: torch.dtype
    parameter_count: int
    parameter_numel: int
    block_bytes: int
    counts: dict[str, StepCounts] = field(default_factory=dict)
    memory: dict[str, StepMemory] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.spec.name}, {str(self.param_dtype).removeprefix('torch.')}"

    @property
    def fp32_bytes(self) -> int:
        """Bytes of the whole model's parameters as fp32: the unit of copies and collectives."""
        return 4 * self.parameter_numel

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "model": asdict(self.spec),
            "param_dtype": str(self.param_dtype),
            "parameter_count": self.parameter_count,
            "fp32_bytes": self.fp32_bytes,
            "block_bytes": self.block_bytes,
            "implementations": {
                name: {"counts": _counts_json(self.counts[name]), "memory": asdict(self.memory[name])}
                for name in self.counts
            },
        }


@dataclass(frozen=True, slots=True)
class Results:
    """One run: the host times of the first model of `figures`, and the exact figures of all of them."""

    options: ShardingOptions
    repetitions: int
    host_times: HostTimes
    figures: list[StepFigures]

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "environment": asdict(Environment.current()),
            "command": " ".join(sys.orig_argv),
            "world_size": self.options.world_size,
            "reshard_after_forward": self.options.reshard_after_forward,
            "repetitions": self.repetitions,
            "host_time": _host_time_json(self.host_times),
            "steps": [figures.to_json() for figures in self.figures],
        }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _host_time_json(times: HostTimes) -> dict[str, JsonValue]:
    def summary(name: str) -> dict[str, JsonValue]:
        figures: dict[str, JsonValue] = {phase.value: asdict(times.per_parameter_us(name, (phase,))) for phase in Phase}
        if UNSHARDED in times.seconds:
            figures["over unsharded"] = asdict(times.over_unsharded_us(name))
        return figures

    return {
        name: {
            "us_per_parameter": summary(name),
            "seconds": {phase.value: list(samples) for phase, samples in times.seconds[name].items()},
        }
        for name in times.seconds
    }


def _counts_json(counts: StepCounts) -> dict[str, JsonValue]:
    return {
        "python_calls": {phase.value: calls for phase, calls in counts.calls.items()},
        "operations": {phase.value: part.operations for phase, part in counts.operations.items()},
        "copied_bytes": {phase.value: dict(part.copied_bytes) for phase, part in counts.operations.items()},
        "collectives": {
            phase.value: {kind: asdict(collective) for kind, collective in part.collectives.items()}
            for phase, part in counts.operations.items()
        },
        "garbage_objects": counts.garbage_objects,
    }
