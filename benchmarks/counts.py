"""Exact counts, which machine load cannot change: Python calls, operations, copies, collectives, garbage."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.copies import bytes_written, is_copy, tensors_in, total_nbytes
from benchmarks.host_time import FORWARD_AND_BACKWARD, garbage_collector_off
from benchmarks.step import Phase, Trainer

COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional"})
# Operations of those namespaces that transfer nothing.
NOT_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
COUNTED_PHASES = (*FORWARD_AND_BACKWARD, Phase.CLIP)


class PythonCallCounter:
    """Counts the calls made inside a `with` block: Python functions and, separately, built-in (C) ones.

    Calls that the interpreter makes without a frame, such as type constructors in C, do not appear.
    """

    def __init__(self) -> None:
        self.python_calls = 0
        self.builtin_calls = 0

    @property
    def calls(self) -> int:
        return self.python_calls + self.builtin_calls

    def __enter__(self) -> PythonCallCounter:
        sys.setprofile(self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        # This method, and its call of `sys.setprofile`.
        self.python_calls -= 1
        self.builtin_calls -= 1

    def _record(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self.python_calls += 1
        elif event == "c_call":
            self.builtin_calls += 1


class LocalDispatchMode(TorchDispatchMode):
    """Sees operations on plain tensors; those on DTensors arrive as operations on their local tensors."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.observe(func, args, kwargs, result)
        return result

    def observe(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Called after each operation, while its arguments and its result are alive."""
        raise NotImplementedError


@dataclass(slots=True)
class Collective:
    """Calls of one kind of collective, the tensors they carried, and their bytes.

    `nbytes` is the larger of input and output: the gathered tensors of an all-gather, the unreduced ones of a
    reduce-scatter. A coalesced call carries many tensors.
    """

    calls: int = 0
    tensors: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class OperationCounts:
    """What was dispatched: how many operations, bytes copied by each kind, and collectives by kind."""

    operations: int = 0
    copied_bytes: Counter[str] = field(default_factory=Counter)
    collectives: dict[str, Collective] = field(default_factory=dict)


class OperationCounter(LocalDispatchMode):
    """Fills `counts` with the operations dispatched in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = OperationCounts()

    def observe(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        self.counts.operations += 1
        if op.namespace in COLLECTIVE_NAMESPACES:
            self._observe_collective(op, args, result)
        elif is_copy(op):
            self.counts.copied_bytes[op._schema.name] += bytes_written(op, args, kwargs, result)

    def _observe_collective(self, op: torch._ops.OpOverload, args: tuple[Any, ...], result: object) -> None:
        kind = op._schema.name.split("::")[1]
        if kind in NOT_COLLECTIVES:
            return
        sides = [*args, result]
        collective = self.counts.collectives.setdefault(kind.strip("_"), Collective())
        collective.calls += 1
        collective.tensors += max(sum(1 for _ in tensors_in(side)) for side in sides)
        collective.nbytes += max(total_nbytes(side) for side in sides)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts of one warm step, by phase, and the objects in reference cycles that the step left behind."""

    calls: dict[Phase, int]
    operations: dict[Phase, OperationCounts]
    garbage_objects: int

    def copied_bytes(self) -> Counter[str]:
        """Bytes copied in forward and backward, by operation."""
        return self.operations[Phase.FORWARD].copied_bytes + self.operations[Phase.BACKWARD].copied_bytes

    def collectives(self) -> dict[str, Collective]:
        """Collectives of forward and backward, by kind."""
        total: dict[str, Collective] = {}
        for phase in FORWARD_AND_BACKWARD:
            for kind, part in self.operations[phase].collectives.items():
                whole = total.setdefault(kind, Collective())
                whole.calls += part.calls
                whole.tensors += part.tensors
                whole.nbytes += part.nbytes
        return total


def count_step(trainer: Trainer) -> StepCounts:
    """Counts three steps of a warm trainer, one for each kind of count, lest the counters see each other."""
    calls: dict[Phase, int] = {}
    operations: dict[Phase, OperationCounts] = {}

    def count_calls(phase: Phase) -> None:
        counter = PythonCallCounter()
        with counter:
            trainer.run(phase)
        calls[phase] = counter.calls - 1  # `Trainer.run` itself

    def count_operations(phase: Phase) -> None:
        counter = OperationCounter()
        with counter:
            trainer.run(phase)
        operations[phase] = counter.counts

    with garbage_collector_off():
        _run_counted_step(trainer, count_calls)
        _run_counted_step(trainer, count_operations)
        gc.collect()
        # Without clipping: the cycles that DTensor's norm leaves are not the implementation's.
        for phase in (*FORWARD_AND_BACKWARD, Phase.ZERO_GRAD):
            trainer.run(phase)
        garbage_objects = gc.collect()
    return StepCounts(calls, operations, garbage_objects)


def _run_counted_step(trainer: Trainer, run_phase: Callable[[Phase], None]) -> None:
    for phase in COUNTED_PHASES:
        run_phase(phase)
        if phase is Phase.BACKWARD:
            trainer.tame_gradients()
    trainer.run(Phase.ZERO_GRAD)
