"""Host CPU time of the phases of a step, of several implementations interleaved in one process.

Method: `time.thread_time`, the CPU clock of the calling thread (on CPU, backward runs there too), so that
time spent waiting for a core does not count. Every repetition runs one step of each implementation, in an
order that rotates. Ratios are taken within a repetition and then summarized, because load that changes
during the run hits both sides of a pair. The garbage collector runs between steps, never inside one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.implementations import UNSHARDED
from benchmarks.step import Phase, Trainer

FORWARD_AND_BACKWARD = (Phase.FORWARD, Phase.BACKWARD)
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Lower quartile, median and upper quartile of one sample per repetition."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quartiles:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        return cls(*statistics.quantiles(samples, n=4, method="inclusive"))

    def text(self, digits: int) -> str:
        """ "median [low, high]"."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class HostTimes:
    """CPU `seconds[implementation][phase][repetition]` of a model with `parameter_count` parameters."""

    seconds: dict[str, dict[Phase, list[float]]]
    parameter_count: int

    def per_parameter_us(self, name: str, phases: Sequence[Phase]) -> Quartiles:
        """Microseconds per parameter that `phases` take together."""
        return Quartiles.of([1e6 * total / self.parameter_count for total in self._totals(name, phases)])

    def ratio(self, name: str, reference: str, phases: Sequence[Phase]) -> Quartiles:
        """Time of `phases` under `name` divided by that under `reference`, paired by repetition."""
        pairs = zip(self._totals(name, phases), self._totals(reference, phases), strict=True)
        return Quartiles.of([mine / other for mine, other in pairs])

    def over_unsharded_us(self, name: str) -> Quartiles:
        """What sharding costs: forward + backward minus the unsharded model's, microseconds per parameter."""
        return Quartiles.of([1e6 * over / self.parameter_count for over in self._over(name)])

    def over_ratio(self, name: str, reference: str) -> Quartiles:
        """What sharding costs under `name` divided by what it costs under `reference`."""
        pairs = zip(self._over(name), self._over(reference), strict=True)
        return Quartiles.of([mine / other for mine, other in pairs])

    def _totals(self, name: str, phases: Sequence[Phase]) -> list[float]:
        return [sum(parts) for parts in zip(*(self.seconds[name][phase] for phase in phases), strict=True)]

    def _over(self, name: str) -> list[float]:
        mine, base = (self._totals(which, FORWARD_AND_BACKWARD) for which in (name, UNSHARDED))
        return [total - unsharded for total, unsharded in zip(mine, base, strict=True)]


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Collects once, then keeps the collector off inside; what exists on entry is not scanned again there.

    Nor afterwards, in a process that has frozen objects of its own: these cannot be told apart.
    """
    has_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not has_frozen:
            gc.unfreeze()


def measure_host_times(trainers: Sequence[Trainer], *, repetitions: int) -> HostTimes:
    """Warms every trainer up, then times `repetitions` interleaved steps of each.

    Raises RuntimeError when a parameter becomes NaN or infinite, or has no gradient after backward.
    """
    for trainer in trainers:
        trainer.warm_up(WARM_UP_STEPS)
    seconds: dict[str, dict[Phase, list[float]]] = {
        trainer.name: {phase: [] for phase in Phase} for trainer in trainers
    }
    with garbage_collector_off():
        for repetition in range(repetitions):
            first = repetition % len(trainers)
            for trainer in (*trainers[first:], *trainers[:first]):
                _time_step(trainer, seconds[trainer.name])
                gc.collect()
    for trainer in trainers:
        trainer.check_finite()
    return HostTimes(seconds, parameter_count=len(trainers[0].parameters))


def _time_step(trainer: Trainer, seconds: dict[Phase, list[float]]) -> None:
    for phase in Phase:
        start = time.thread_time()
        trainer.run(phase)
        seconds[phase].append(time.thread_time() - start)
        if phase is Phase.BACKWARD:
            trainer.tame_gradients()
