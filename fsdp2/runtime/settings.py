"""What users set: one frozen value per group and one per root, which check themselves and are replaced as a whole.

A new setting is a field here and a method of `FSDPModule`. Copies and pickles of modules carry the values, and ranks
compare them when a root forms (`described`). `FSDPParamGroup.configure` says what a change costs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from fsdp2.arguments import is_number
from fsdp2.common import FSDPTypeError, FSDPValueError
from fsdp2.params.custom_comm import AllGather, Comm, ReduceScatter, check_comm

AllReduceHook = Callable[[torch.Tensor], None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GroupSettings:
    """How a group communicates. Every rank must set the same.

    Attributes:
        requires_gradient_sync: whether the end of the group's backward reduces; else gradients stay unsharded.
        requires_all_reduce: whether a reduction goes over replicas too; else it is kept until one does.
        divide_factor: the sum of gradients is divided by it; None: by the number of ranks.
        denominator: if there is one, the sum is divided by it instead, outside the collectives: it may differ from step
            to step, and be a 0-D tensor, whose value the host need not know.
        only_sums: collectives only ever sum, and scaling is separate.
        zeros_for_unused: parameters without any gradient get zeros.
        max_pending: how many reductions may be in flight; the largest of all groups counts.
        all_reduce_hook: called with every flat result, before it is delivered.
        all_reduce_hook_stream: where; None: on the all-reduce stream.
        custom_all_gather: takes the place of the all-gather.
        custom_reduce_scatter: takes the place of the reduce-scatter.
        has_scatter_group: reduce-scatters have a process group of their own.
        gathers_on_compute: all-gathers are issued from the current stream, as asynchronous works.
        unshards_in_backward: whether backward needs the parameters.
        keeps_unsharded_storage: resharding leaves the unsharded buffers their memory, so that addresses repeat.
    """

    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    divide_factor: float | None = None
    denominator: float | torch.Tensor | None = None
    only_sums: bool = False
    zeros_for_unused: bool = False
    max_pending: int = 1
    all_reduce_hook: AllReduceHook | None = None
    all_reduce_hook_stream: Any = None
    custom_all_gather: AllGather | None = None
    custom_reduce_scatter: ReduceScatter | None = None
    has_scatter_group: bool = False
    gathers_on_compute: bool = False
    unshards_in_backward: bool = True
    keeps_unsharded_storage: bool = False

    def __post_init__(self) -> None:
        factor = self.divide_factor
        if factor is not None and (not is_number(factor) or not 0 < float(factor) < math.inf):
            raise FSDPValueError(f"set_gradient_divide_factor takes a positive number, got {factor!r}.")
        if isinstance(self.max_pending, bool) or not isinstance(self.max_pending, int):
            raise FSDPTypeError(f"max_input_buffers must be an int, got {self.max_pending!r}.")
        if self.max_pending < 1:
            raise FSDPValueError(f"max_input_buffers must be at least 1, got {self.max_pending}.")
        if self.all_reduce_hook is not None and not callable(self.all_reduce_hook):
            raise FSDPTypeError(f"set_all_reduce_hook takes a function of a tensor, got {self.all_reduce_hook!r}.")
        if self.custom_all_gather is not None:
            check_comm(self.custom_all_gather, "set_custom_all_gather")
        if self.custom_reduce_scatter is not None:
            check_comm(self.custom_reduce_scatter, "set_custom_reduce_scatter")

    def scales_like(self, other: GroupSettings) -> bool:
        """Whether gradients are scaled by the same collectives. (A denominator is applied after them.)"""
        return (self.divide_factor, self.only_sums, self.denominator is None) == (
            other.divide_factor,
            other.only_sums,
            other.denominator is None,
        )

    def changes_layout(self, other: GroupSettings) -> bool:
        """Whether reductions are laid out otherwise than with ``other``."""
        return (
            not self.scales_like(other)
            or self.zeros_for_unused is not other.zeros_for_unused
            or self.custom_reduce_scatter is not other.custom_reduce_scatter
            or self.has_scatter_group is not other.has_scatter_group
        )


DEFAULT = GroupSettings()
"""Groups that are set alike share one value, so that changing many of them makes one new one."""

FREE = frozenset({"requires_gradient_sync", "requires_all_reduce", "max_pending"})
"""What is only looked at when a backward begins or ends: changed from microbatch to microbatch, at no cost."""


@dataclasses.dataclass(frozen=True, slots=True)
class RootSettings:
    """How iterations go, on the outermost sharded module.

    Attributes:
        is_last_backward: whether the end of the next backward waits for all reductions.
        finalizes_manually: the user says when a backward has ended, with ``finalize_backward``.
        prefetch_bytes: how many bytes of unsharded parameters may be gathered ahead; None: one unit's.
        pools_memory: memory for communication is kept from use to use; None: as the communication context has it.
    """

    is_last_backward: bool = True
    finalizes_manually: bool = False
    prefetch_bytes: int | None = None
    pools_memory: bool | None = None

    def __post_init__(self) -> None:
        nbytes = self.prefetch_bytes
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
            raise FSDPValueError(f"the prefetch budget must be a number of bytes >= 0 or None, got {nbytes!r}.")

    def setter_called(self) -> str | None:
        """The method, for roots only, that was called here, if any was."""
        if self.finalizes_manually:
            return "set_manual_backward_finalization"
        if self.pools_memory is not None:
            return "set_communication_memory_pool"
        return None if self.prefetch_bytes is None else "set_prefetch_budget"


def denominator_of(value: Any) -> float | torch.Tensor:
    """A number, or a 0-D tensor with a value of its own; that is looked at only if it is on the host.

    Raises:
        FSDPValueError: anything else, or not positive.
    """
    is_known = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
    if is_number(value) and (not is_known or 0 < float(value) < math.inf):
        return value.detach().reshape(()).clone() if isinstance(value, torch.Tensor) else float(value)
    raise FSDPValueError(f"the denominator of a gradient reduction must be one positive number, got {value!r}.")


def described(settings: GroupSettings | RootSettings, *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """What is not as it is by default, except ``without``: alike on ranks that set alike."""
    return {
        field.name: _shown(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
        if field.name not in without and getattr(settings, field.name) is not field.default
    }


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, Comm) or (callable(value) and hasattr(value, "allocate")):
        return type(value).__name__
    return str(value) if value is None or isinstance(value, (bool, int, float)) else "set"
