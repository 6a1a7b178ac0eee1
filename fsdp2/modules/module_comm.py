"""`CommunicationSettings`: what the communication setters of `FSDPModule` do to a module's groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp2.arguments import is_number
from fsdp2.common import FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.params.custom_comm import (
    OURS,
    AllGather,
    AllGatherInMemory,
    GroupMemory,
    ReduceScatter,
    ReduceScatterInMemory,
    SymmetricMemory,
    check_comm,
)
from fsdp2.plan.mesh import own_reduce_scatter_group
from fsdp2.runtime.param_group import FSDPParamGroup


def _checked_denominator(value: Any) -> float | torch.Tensor:
    """A number or a 0-D tensor, whose value is looked at only if it is on the host."""
    is_tensor = isinstance(value, torch.Tensor)
    is_known = not is_tensor or value.device.type == "cpu"
    if is_number(value) and (not is_known or 0 < float(value) < math.inf):
        return value.detach().reshape(()).clone() if isinstance(value, torch.Tensor) else float(value)
    raise FSDPValueError(f"the denominator of a gradient reduction must be one positive number, got {value!r}.")


class CommunicationSettings:
    """Changes how some groups communicate. Each method validates before it changes anything."""

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._groups = groups

    def _refuse_several(self, method: str) -> None:
        if len(self._groups) > 1:
            raise FSDPValueError(
                f"{method} is not possible on a module whose parameters are on several meshes (by shard_placement_fn): "
                "it would not be clear which of them is meant."
            )

    def custom_all_gather(self, comm: AllGather) -> None:
        """In the place of the all-gather."""
        check_comm(comm, "set_custom_all_gather")
        self._refuse_several("set_custom_all_gather")
        for group in self._groups:
            group.set_custom_all_gather(comm)

    def custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """In the place of the reduce-scatter."""
        check_comm(comm, "set_custom_reduce_scatter")
        self._refuse_several("set_custom_reduce_scatter")
        for group in self._groups:
            group.set_custom_reduce_scatter(comm)

    def all_reduce_hook(self, hook: Callable[[Any], None], stream: Any) -> None:
        """Called with the flat reduced gradients."""
        if not callable(hook):
            raise FSDPTypeError(f"set_all_reduce_hook takes a function of a tensor, got {hook!r}.")
        self._refuse_several("set_all_reduce_hook")
        for group in self._groups:
            if stream is not None and group.mesh.replicate_group is not None:
                raise FSDPValueError(
                    "set_all_reduce_hook: stream cannot be set when using native HSDP, a (replicate, shard) mesh, "
                    "whose all-reduce has a stream already; the hook runs there."
                )
        for group in self._groups:
            group.reducer.all_reduce_hook = hook
            group.reducer.all_reduce_hook_stream = stream

    def gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum by ``factor``."""
        if not is_number(factor) or not 0 < float(factor) < math.inf:
            raise FSDPValueError(f"set_gradient_divide_factor takes a positive number, got {factor!r}.")
        for group in self._groups:
            group.refuse_rescaling()
        for group in self._groups:
            group.set_gradient_reduction(float(factor), None)

    def gradient_reduction(self, reduction: str | float | torch.Tensor) -> None:
        """The mean, the sum, or the sum divided by a denominator."""
        denominator = None if isinstance(reduction, str) else _checked_denominator(reduction)
        if isinstance(reduction, str) and reduction not in ("mean", "sum"):
            raise FSDPValueError(
                "set_gradient_reduction takes 'mean', 'sum' or a positive number to divide the sum by, got "
                f"{reduction!r}."
            )
        factor = 1.0 if reduction == "sum" else None
        for group in self._groups:
            changes = (group.reducer.denominator is None) is not (denominator is None)
            if changes or group.reducer.divide_factor != factor:
                group.refuse_rescaling()
        for group in self._groups:
            group.set_gradient_reduction(factor, denominator)

    def only_sums(self, enable: bool) -> None:
        """Scale outside the collectives."""
        for group in self._groups:
            group.refuse_rescaling()
        for group in self._groups:
            group.reducer.only_sums = enable or group.mesh.device.type == "mtia"
            group.settings_changed()

    def zeros_for_unused(self, enable: bool) -> None:
        """Deliver zeros where no rank had a gradient."""
        for group in self._groups:
            group.reducer.zeros_for_unused = enable
            group.settings_changed()

    def max_input_buffers(self, count: int) -> None:
        """How many reductions may be in flight."""
        if isinstance(count, bool) or not isinstance(count, int):
            raise FSDPTypeError(f"max_input_buffers must be an int, got {count!r}.")
        if count < 1:
            raise FSDPValueError(f"max_input_buffers must be at least 1, got {count}.")
        for group in self._groups:
            group.reducer.max_pending = count

    def separate_reduce_scatter_group(self, enable: bool) -> None:
        """One more process group for each that shards, made once however often this is switched."""
        for group in self._groups:
            group.reducer.scatter_group = own_reduce_scatter_group(group.mesh) if enable else None
            group.settings_changed()

    def memory_from_process_group(self, enable: bool) -> None:
        """Buffers from the process group's allocator."""
        self._refuse_custom("set_allocate_memory_from_process_group_for_comm")
        for group in self._groups:
            process_group = group.mesh.shard_group
            if process_group is not None:
                scatter = group.reducer.scatter_group or process_group
                group.set_custom_all_gather(AllGatherInMemory(GroupMemory(process_group)) if enable else None)
                group.set_custom_reduce_scatter(ReduceScatterInMemory(GroupMemory(scatter)) if enable else None)

    def symmetric_memory(self, backend: str) -> None:
        """Buffers in symmetric memory."""
        if backend != "NCCL":
            raise FSDPValueError(f"set_symm_mem_for_comm knows the backend 'NCCL' only, got {backend!r}.")
        self._refuse_custom("set_symm_mem_for_comm")
        for group in self._groups:
            process_group = group.mesh.shard_group
            if process_group is not None:
                group.set_custom_all_gather(AllGatherInMemory(SymmetricMemory(process_group, backend)))
                if group.reducer.only_sums:
                    scatter = group.reducer.scatter_group or process_group
                    group.set_custom_reduce_scatter(ReduceScatterInMemory(SymmetricMemory(scatter, backend)))

    def _refuse_custom(self, method: str) -> None:
        for group in self._groups:
            for comm in (group.storage.custom, group.reducer.custom):
                if comm is not None and not isinstance(comm, OURS):
                    raise FSDPRuntimeError(
                        f"{method} and a custom collective exclude each other: {type(comm).__name__} allocates its "
                        "buffers itself."
                    )
