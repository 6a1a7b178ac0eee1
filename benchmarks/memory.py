"""Peak live bytes of forward and backward, counted from storages rather than from an allocator.

After every dispatched operation the bytes of all storages seen so far are added up. Storages are held
weakly, and asked for their size each time, so that `untyped_storage().resize_()`, which dispatches nothing,
is seen at the next operation. Storages may overlap (a tensor over a slice of another's storage):
overlapping bytes count once. Memory that an operation takes and returns inside itself is invisible.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor

from benchmarks.copies import tensors_in
from benchmarks.counts import LocalDispatchMode
from benchmarks.host_time import FORWARD_AND_BACKWARD, garbage_collector_off
from benchmarks.step import Phase, Trainer, local_tensor


class LiveBytes(LocalDispatchMode):
    """Tracks the storages of tensors that operations in `with` blocks touch; `peak` is their largest sum.

    A storage stays tracked between `with` blocks, until it is freed; one that no operation saw is unknown, but for the
    `kept` ones: a function that returns those of a memory pool.
    """

    def __init__(self, kept: Callable[[], Iterable[torch.UntypedStorage]] = tuple) -> None:
        super().__init__()
        self.peak = 0
        self._kept = kept
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def observe(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        for tensor in tensors_in((*args, *kwargs.values(), result)):
            self._track(tensor)
        intervals = self._live_intervals()
        # Adding up is cheap and never too little; only what might be a new peak is worth the sorting.
        if sum(end - start for start, end in intervals) > self.peak:
            self.peak = max(self.peak, union_length(intervals))

    def live(self) -> int:
        """Bytes alive now in the storages tracked so far."""
        return union_length(self._live_intervals())

    def reset_peak(self) -> None:
        self.peak = self.live()

    def _track(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):  # by which DTensor tries operators out
            return
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None or known() is not storage:
            self._storages[storage._cdata] = weakref.ref(storage)

    def _live_intervals(self) -> list[tuple[int, int]]:
        """Addresses `(start, end)` of the storages alive; forgets the freed ones."""
        intervals = []
        freed = []
        for key, reference in self._storages.items():
            storage = reference()
            if storage is None:
                freed.append(key)
            elif nbytes := storage.nbytes():
                start = storage.data_ptr()
                intervals.append((start, start + nbytes))
        for key in freed:
            del self._storages[key]
        for storage in self._kept():
            intervals.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return intervals


def union_length(intervals: list[tuple[int, int]]) -> int:
    """Length of the union of half-open `intervals`: `[(0, 10), (5, 12), (20, 21)]` have 13."""
    total = 0
    covered_until = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one rank in a warm step, without optimizer state, which neither forward nor backward touches.

    Attributes:
        parameters: elements of this rank's parameters.
        gradients: elements of this rank's gradients after backward.
        at_rest_over: alive between steps (gradients are None then) beyond `parameters` and the input.
        forward_over: peak during forward beyond `parameters`.
        backward_over: peak during backward beyond `parameters + gradients`.
    """

    parameters: int
    gradients: int
    at_rest_over: int
    forward_over: int
    backward_over: int


def measure_step_memory(trainer: Trainer) -> StepMemory:
    """Runs two steps of a warm trainer, without optimizer: one to meet every storage, one to measure."""
    tracker = LiveBytes(trainer.kept_storages)
    peaks: dict[Phase, int] = {}
    at_rest = gradient_bytes = 0
    with garbage_collector_off():
        for _ in range(2):
            gc.collect()
            at_rest = tracker.live()
            for phase in FORWARD_AND_BACKWARD:
                tracker.reset_peak()
                with tracker:
                    trainer.run(phase)
                peaks[phase] = tracker.peak
            gradient_bytes = _local_bytes([parameter.grad for parameter in trainer.parameters])
            trainer.run(Phase.ZERO_GRAD)
    parameter_bytes = _local_bytes(list(trainer.parameters))
    return StepMemory(
        parameters=parameter_bytes,
        gradients=gradient_bytes,
        at_rest_over=at_rest - parameter_bytes - trainer.inputs.nbytes,
        forward_over=peaks[Phase.FORWARD] - parameter_bytes,
        backward_over=peaks[Phase.BACKWARD] - parameter_bytes - gradient_bytes,
    )


def _local_bytes(tensors: list[torch.Tensor | None]) -> int:
    locals_ = [local_tensor(tensor.detach()) for tensor in tensors if tensor is not None]
    return sum(local.numel() * local.element_size() for local in locals_)
