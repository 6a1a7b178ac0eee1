"""`python -m benchmarks.hot_path`: where the host time of one implementation's forward and backward goes.

Times come from samples: a CPU-time interval timer interrupts warm steps, and each sample goes to the Python
line it finds (with the built-in functions which that line calls). Unlike a tracing profiler this slows
nothing, so that cheap functions called often do not look expensive. What runs in C++ between Python
functions, such as the autograd engine, goes to the Python line that follows it. Calls and storage resizes
are counted exactly, in steps of their own.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from unittest import mock

import torch

from benchmarks.host_time import FORWARD_AND_BACKWARD, WARM_UP_STEPS, garbage_collector_off
from benchmarks.implementations import ShardingOptions, fake_process_group
from benchmarks.models import SMALL_PARAMETERS
from benchmarks.step import Phase, Trainer
from benchmarks.tables import Table

SAMPLE_SECONDS = 0.002


@dataclass(slots=True)
class HotPath:
    """Samples of one phase: `steps` steps that took `seconds` of CPU time; and exact counts of one step."""

    steps: int
    seconds: float = 0.0
    samples: int = 0
    own_lines: Counter[tuple[CodeType, int]] = field(default_factory=Counter)
    own_functions: Counter[CodeType] = field(default_factory=Counter)
    inclusive_functions: Counter[CodeType] = field(default_factory=Counter)
    calls: Counter[CodeType] = field(default_factory=Counter)
    storage_resizes: int = 0

    def add_sample(self, frame: FrameType | None) -> None:
        """Attributes one sample to `frame` and, inclusively, to its callers below `Trainer.run`."""
        assert frame is not None
        self.samples += 1
        self.own_lines[frame.f_code, frame.f_lineno] += 1
        self.own_functions[frame.f_code] += 1
        callers: set[CodeType] = set()
        while frame is not None and frame.f_code is not Trainer.run.__code__:
            callers.add(frame.f_code)
            frame = frame.f_back
        self.inclusive_functions.update(callers)

    def microseconds(self, samples: int, groups: int) -> float:
        """What `samples` stand for, per step and group."""
        return 1e6 * self.seconds * samples / max(1, self.samples) / self.steps / groups


def main(arguments: Sequence[str] | None = None) -> None:
    """Profiles with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hot_path", description=__doc__.splitlines()[0])
    parser.add_argument("--impl", default="fsdp2", help="unsharded, torch or fsdp2 (default: fsdp2)")
    parser.add_argument("--steps", type=int, default=300, help="sampled steps (default: 300)")
    parser.add_argument("--rows", type=int, default=30, help="rows of each table (default: 30)")
    parser.add_argument("--world-size", type=int, default=8)
    options = parser.parse_args(arguments)
    with fake_process_group(options.world_size) as mesh:
        sharding = ShardingOptions(world_size=options.world_size)
        trainer = Trainer(options.impl, SMALL_PARAMETERS, mesh=mesh, options=sharding)
        trainer.warm_up(WARM_UP_STEPS)
        for phase, hot_path in trace_hot_path(trainer, steps=options.steps).items():
            for table in _tables(phase, hot_path, groups=trainer.spec.groups, rows=options.rows):
                print(table.render(), end="\n\n")


def trace_hot_path(trainer: Trainer, *, steps: int) -> dict[Phase, HotPath]:
    """Counts calls and resizes in two steps of a warm trainer, then samples `steps` steps."""
    paths = {phase: HotPath(steps) for phase in FORWARD_AND_BACKWARD}

    def run_step(measured: Callable[[Phase], None]) -> None:
        for phase in FORWARD_AND_BACKWARD:
            measured(phase)
        trainer.run(Phase.ZERO_GRAD)

    def count_calls(phase: Phase) -> None:
        sys.setprofile(lambda frame, event, _: paths[phase].calls.update([frame.f_code] * (event == "call")))
        trainer.run(phase)
        sys.setprofile(None)

    def count_resizes(phase: Phase) -> None:
        with _recorded_resizes() as sizes:
            trainer.run(phase)
        paths[phase].storage_resizes = len(sizes)

    running: Phase | None = None

    def sample(phase: Phase) -> None:
        nonlocal running
        start = time.thread_time()
        running = phase
        trainer.run(phase)
        running = None
        paths[phase].seconds += time.thread_time() - start

    def add_sample(frame: FrameType | None) -> None:
        if running is not None:
            paths[running].add_sample(frame)

    with garbage_collector_off():
        run_step(count_calls)
        run_step(count_resizes)
        with _sampling(add_sample):
            for _ in range(steps):
                run_step(sample)
    return paths


@contextmanager
def _sampling(add_sample: Callable[[FrameType | None], None]) -> Iterator[None]:
    """Calls `add_sample` with the running frame about every `SAMPLE_SECONDS` of this process's CPU time."""
    previous = signal.signal(signal.SIGPROF, lambda _, frame: add_sample(frame))
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


@contextmanager
def _recorded_resizes() -> Iterator[list[int]]:
    """The sizes given to `UntypedStorage.resize_`; calls through a method bound earlier escape."""
    sizes: list[int] = []
    resize = torch.UntypedStorage.resize_

    def recording_resize(storage: torch.UntypedStorage, size: int) -> object:
        sizes.append(size)
        return resize(storage, size)

    with mock.patch.object(torch.UntypedStorage, "resize_", recording_resize):
        yield sizes


def _tables(phase: Phase, path: HotPath, *, groups: int, rows: int) -> list[Table]:
    total = path.microseconds(path.samples, groups)
    functions = Table(
        f"{phase.value}, per group: {total:.0f} us, {path.storage_resizes / groups:.1f} storage resizes; "
        f"functions by inclusive time ({path.samples} samples)",
        ["function", "calls/group", "own us/group", "with callees us/group"],
    )
    for code, samples in path.inclusive_functions.most_common(rows):
        functions.add(
            f"{_location(code, code.co_firstlineno)} {code.co_name}",
            f"{path.calls[code] / groups:.2f}",
            f"{path.microseconds(path.own_functions[code], groups):.2f}",
            f"{path.microseconds(samples, groups):.2f}",
        )
    lines = Table(f"{phase.value}: lines by own time", ["line", "us/group", "share"])
    for (code, line), samples in path.own_lines.most_common(rows):
        microseconds = path.microseconds(samples, groups)
        lines.add(f"{_location(code, line)} {code.co_name}", f"{microseconds:.2f}", f"{microseconds / total:.1%}")
    return [functions, lines]


def _location(code: CodeType, line: int) -> str:
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line}"


if __name__ == "__main__":
    main()
