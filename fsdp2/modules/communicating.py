"""Those methods of `FSDPModule` that set how its groups communicate. Every rank must set the same.

They are functions here and become methods there, for nothing may come between `FSDPModule` and the class that it is
mixed in front of: programs look that one up in the MRO.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fsdp2 import _torch
from fsdp2.arguments import ANYTHING, checked
from fsdp2.common import FSDPNotImplementedError, FSDPRuntimeError
from fsdp2.modules.module_comm import CommunicationSettings
from fsdp2.params.custom_comm import AllGather, ReduceScatter
from fsdp2.runtime.state import FSDPState


class Communicating(Protocol):
    """What these methods need of a module."""

    def _communication(self, *, recurse: bool) -> CommunicationSettings:
        """Of the module's own groups, and if ``recurse`` of those below."""

    def _get_fsdp_state(self) -> FSDPState:
        """The module's own."""


@checked(comm=ANYTHING)
def set_custom_all_gather(self: Communicating, comm: AllGather) -> None:
    """Gather this module's parameters with ``comm``, in buffers that it allocates; everything travels packed.

    Raises:
        FSDPTypeError: it cannot be called, or has no ``allocate``.
        FSDPValueError: the module's parameters are on several meshes.
    """
    self._communication(recurse=False).custom_all_gather(comm)


@checked(comm=ANYTHING)
def set_custom_reduce_scatter(self: Communicating, comm: ReduceScatter) -> None:
    """Reduce this module's gradients with ``comm``, in buffers that it allocates; everything travels packed.

    Raises:
        FSDPTypeError: it cannot be called, or has no ``allocate``.
        FSDPValueError: the module's parameters are on several meshes.
    """
    self._communication(recurse=False).custom_reduce_scatter(comm)


@checked()
def set_all_reduce_hook(self: Communicating, hook: Callable[[Any], None], *, stream: Any = None) -> None:
    """Call ``hook`` with the flat reduced gradients before they are delivered: for an all-reduce of one's own.

    The flat tensor also holds one element per parameter that says whether any rank had a gradient: reduce or scale
    it as a whole.

    Args:
        hook: called after the reduce-scatter, or after the all-reduce over replicas if there is one.
        stream: where it is called; by default on the all-reduce stream. Not with replicas.

    Raises:
        FSDPTypeError: ``hook`` cannot be called.
        FSDPValueError: ``stream`` with replicas, or parameters on several meshes.
    """
    self._communication(recurse=False).all_reduce_hook(hook, stream)


@checked(factor=ANYTHING)
def set_gradient_divide_factor(self: Communicating, factor: float) -> None:
    """Divide the sum of gradients over all ranks by ``factor``, instead of by the number of ranks.

    NCCL multiplies before it sums, where it can; elsewhere the sum is divided.

    Raises:
        FSDPValueError: not a positive number.
    """
    self._communication(recurse=False).gradient_divide_factor(factor)


@checked(reduction=ANYTHING)
def set_gradient_reduction(self: Communicating, reduction: str | float | torch.Tensor, *, recurse: bool = True) -> None:
    """How the gradients of the data-parallel ranks become one, from the next reduction on. On every backend alike.

    Args:
        reduction: ``"mean"``, the default; ``"sum"``; or what the sum is divided by, a number or a tensor of one
            element, such as the number of tokens in the batches of all ranks (the same on every rank; with a loss
            that is the sum over a rank's tokens, every token then counts the same). Set it anew in every step: that
            costs nothing, and a tensor on the device is not waited for. Of this and `set_gradient_divide_factor`
            the last call counts.
        recurse: whether all sharded modules below follow. A parameter on a mesh of its own (an expert's) is summed
            over that mesh, so that the same number is right for it too, unlike a mean.

    Raises:
        FSDPValueError: not one of these, or a number (on the host) that is not positive.
        FSDPRuntimeError: gradients that were scaled otherwise wait for their all-reduce over replicas.
    """
    self._communication(recurse=recurse).gradient_reduction(reduction)


@checked(factor=ANYTHING)
def set_reduce_scatter_divide_factor(self: Communicating, factor: float) -> None:
    """Deprecated: `set_gradient_divide_factor`."""
    _warn_of_old_name("set_reduce_scatter_divide_factor", "set_gradient_divide_factor")
    set_gradient_divide_factor(self, factor)


@checked()
def set_force_sum_reduction_for_comms(self: Communicating, enable: bool) -> None:
    """Let collectives only ever sum, and scale separately: some fast paths of NCCL can do nothing else."""
    self._communication(recurse=False).only_sums(enable)


@checked()
def set_reduce_scatter_unused_params(
    self: Communicating, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Whether parameters without a gradient on any rank get one of zeros; else their ``.grad`` stays as it is.

    Parameters that are used on some ranks only are reduced in any case.
    """
    self._communication(recurse=recurse).zeros_for_unused(reduce_scatter_unused_params)


@checked(max_input_buffers=ANYTHING)
def set_reduce_scatter_max_input_buffers(self: Communicating, max_input_buffers: int, *, recurse: bool = True) -> None:
    """How many reductions may be in flight while backward goes on (default 1); each keeps its input alive.

    The largest number set on any group counts.

    Raises:
        FSDPTypeError: not an int.
        FSDPValueError: less than 1.
    """
    self._communication(recurse=recurse).max_input_buffers(max_input_buffers)


@checked()
def set_separate_reduce_scatter_group(self: Communicating, enable: bool = True, *, recurse: bool = True) -> None:
    """Whether reduce-scatters have a process group of their own, so that they run beside all-gathers.

    Makes process groups, one for each set of ranks: all ranks must call this.
    """
    self._communication(recurse=recurse).separate_reduce_scatter_group(enable)


@checked()
def set_allocate_memory_from_process_group_for_comm(self: Communicating, enable: bool) -> None:
    """Whether communication buffers come from the process group's own allocator, if it has one.

    Raises:
        FSDPRuntimeError: a custom collective is set, which allocates itself.
    """
    self._communication(recurse=False).memory_from_process_group(enable)


@checked()
def set_symm_mem_for_comm(self: Communicating, backend: str = "NCCL") -> None:
    """Put the buffers of all-gathers into symmetric memory, and those of reduce-scatters if they only sum.

    Raises:
        FSDPRuntimeError: a custom collective is set, which allocates itself.
        FSDPValueError: another backend than "NCCL".
    """
    self._communication(recurse=False).symmetric_memory(backend)


@checked()
def set_communication_memory_pool(self: Communicating, enable: bool) -> None:
    """Whether memory for communication is kept from use to use, instead of being allocated and freed each time.

    Of unsharded parameters, staging buffers and reduced gradients. A steady-state step then allocates nothing for
    communication, and its addresses repeat. What is kept is what steps had in use at the same time at most; it stays
    allocated between steps. A tensor on memory that has moved on is as invalid as one on freed memory: it never shows
    another layer's values. Call it on the root, on any ranks, outside of forward and backward. Default: off.

    Raises:
        FSDPTypeError: not a bool.
        FSDPNotImplementedError: torch is older than 2.13, which cannot move memory between storages.
        FSDPRuntimeError: this module is not the root, or an iteration is running.
    """
    if enable and not _torch.can_swap_memory:
        raise FSDPNotImplementedError(
            f"set_communication_memory_pool(True) needs torch 2.13 or later, this is {torch.__version__}: earlier ones "
            "cannot move memory from one storage to another. set_keep_unsharded_storage(True) keeps the memory of "
            "unsharded parameters, at the cost of all of it."
        )
    state = self._get_fsdp_state()
    root = state.root
    if root is not None and not state.is_root:
        raise FSDPRuntimeError(
            f"set_communication_memory_pool() must be called on the root, {root.name}, not on '{state.name}'."
        )
    if root is not None and root.is_running():
        raise FSDPRuntimeError("set_communication_memory_pool() must be called outside of forward and backward.")
    state.settings.pools_memory = enable
    if root is not None:
        root.comm.pool_memory(enable)


def _warn_of_old_name(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; use {new}.", DeprecationWarning, stacklevel=4)
