"""What users set: one frozen value per group and one per root, which check themselves and are replaced as a whole.

A new setting is a field here and a method of `FSDPModule`. Copies and pickles of modules carry the values, and ranks
compare them when a root forms (`described`). `FSDPParamGroup.configure` says what a change costs.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.arguments import checked_class, is_number
from fsdp2.errors import FSDPRuntimeError, FSDPTypeError, FSDPValueError

if TYPE_CHECKING:
    from fsdp2.core.group import FSDPParamGroup

# Collectives that a user, or a feature, puts in the place of torch.distributed's: the protocols.
#
# A custom collective also decides where its buffers lie, so a group that uses one sends everything packed, through the
# buffer that ``allocate`` returned.


class Comm(ABC):
    """What every custom collective provides: memory for its buffers."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous buffer of ``size`` (one dim) to communicate with, fresh or used again."""


class AllGather(Comm):
    """In the place of the all-gather of parameters; see `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (n,) of every rank into ``output_tensor`` (world_size * n,).

        ``output_tensor`` came from ``allocate``; ``input_tensor`` is this rank's part of it. With ``async_op`` return
        the work to wait for.
        """


class ReduceScatter(Comm):
    """In the place of the reduce-scatter of gradients; see `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (world_size * n,) with ``op``; this rank's part goes to ``output_tensor`` (n,).

        Both came from ``allocate``. With ``async_op`` return the work to wait for.
        """


def check_comm(comm: object, method: str) -> None:
    """Refuse what is no custom collective. (Any class with the two methods will do, torch's base classes as well.)

    Raises:
        FSDPTypeError: it cannot be called, or has no ``allocate``.
    """
    if isinstance(comm, type) or not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise FSDPTypeError(
            f"{method} takes an object that can be called and has allocate(size, *, dtype, device), got {comm!r}."
        )


# What a user may ask of `fully_shard`, as frozen, self-validating data: precision, named mesh dims.


ParamDtypeOverride = Callable[[nn.Parameter], torch.dtype | None]


@checked_class()
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes that a module computes and communicates in. Sharded parameters keep their original dtype.

    Attributes:
        param_dtype: of the unsharded parameters, hence of their all-gather, of forward and of backward. None: the
            original dtype. Parameters that are not floating point are never cast.
        reduce_dtype: in which gradients are reduced over the ranks, and accumulated while reduction is disabled. None:
            up to torch 2.14 they are reduced in ``param_dtype``, from 2.15 on as each parameter's ``grad_dtype`` says
            (unset: its original dtype; None: as gradients arrive); they accumulate as ``grad_dtype`` says on all
            versions. Gradients of different dtypes in one group are reduced in their promoted dtype. On gloo those of
            1 MiB and more travel in ``param_dtype`` where this holds it exactly, and are cast as they are added: the
            same sums; one that arrives in a wider dtype is rounded, unless its parameter has a ``grad_dtype``.
        output_dtype: to which floating-point outputs of forward are cast. None: left alone.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``; or the names of the
            arguments that are (with all tensors inside), the others are left alone. In ``fully_shard([a, b])`` both
            casts apply to each module and each of its calls.
        param_dtype_override_fn: called with each parameter when `fully_shard` is; returns its own ``param_dtype``: its
            original dtype, or ``param_dtype``, or None for the latter. Must return the same on every rank.
        buffer_dtype: to which the floating-point buffers of the module are cast, once, when `fully_shard` is called.
            None: left alone.
        cache_shards: whether what a rank has cast of its shards, to send it in an all-gather, is kept and sent again
            until a write to the sharded parameters is seen: one cast for all microbatches of a step. Costs as many
            bytes on the device as the shards have in ``param_dtype``. One parameter that asks for it is enough for all
            of its group. Not with a custom all-gather, whose buffers are borrowed for one gather, nor of tensors that
            gather themselves.
        grad_dtype: of the sharded parameters' ``.grad``, and in which gradients accumulate; where ``reduce_dtype`` is
            None they are reduced in it as well. It is set as each floating-point parameter's ``Tensor.grad_dtype``,
            unless that is set already. Parameters keep their dtype, at rest and where they compute. None: as
            ``Tensor.grad_dtype`` says.

    Raises:
        FSDPTypeError: a dtype that is none, an override that cannot be called, a ``cache_shards`` that is no bool.
        FSDPValueError: a dtype that is not floating point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool | Collection[str] = True
    param_dtype_override_fn: ParamDtypeOverride | None = field(default=None, kw_only=True)
    buffer_dtype: torch.dtype | None = field(default=None, kw_only=True)
    cache_shards: bool = field(default=False, kw_only=True)
    grad_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise FSDPValueError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point dtype, got {dtype}; parameters, gradients "
                    "and activations lose their values in any other, or their kind."
                )
        casts = self.cast_forward_inputs
        if not isinstance(casts, bool):
            if not casts:
                raise FSDPValueError("cast_forward_inputs must be a bool or names of arguments, got none; pass False.")
            object.__setattr__(self, "cast_forward_inputs", tuple(sorted(casts)))

    def for_parameter(self, parameter: nn.Parameter, fqn: str) -> MixedPrecisionPolicy:
        """The policy of one parameter: the override asked, and no ``grad_dtype`` of what is no real number.

        Raises:
            FSDPValueError: the override returned anything but None, ``param_dtype`` or the parameter's own dtype.
        """
        if self.grad_dtype is not None and not parameter.is_floating_point():
            return replace(self, grad_dtype=None).for_parameter(parameter, fqn)
        override = self.param_dtype_override_fn
        if override is None:
            return self
        chosen = override(parameter)
        if chosen is not None and chosen not in (self.param_dtype, parameter.dtype):
            raise FSDPValueError(
                f"param_dtype_override_fn returned {chosen!r} for parameter '{fqn}'; expected None, param_dtype "
                f"({self.param_dtype}) or the parameter's own dtype ({parameter.dtype})."
            )
        dtype = chosen if chosen is not None else self.param_dtype
        return replace(self, param_dtype=dtype, param_dtype_override_fn=None)

    @property
    def input_cast(self) -> InputCast | None:
        """What is done to the inputs of forward."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return None
        names = self.cast_forward_inputs
        return InputCast(self.param_dtype, None if isinstance(names, bool) else tuple(names))


@dataclass(frozen=True)
class InputCast:
    """The dtype that floating-point inputs of a forward are cast to, and the names of those that are; None: all."""

    dtype: torch.dtype
    names: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return str(self.dtype) if self.names is None else f"{self.dtype} ({', '.join(self.names)})"


PolicyFunction = Callable[[str, nn.Parameter], MixedPrecisionPolicy | None]
"""A policy for each parameter: called with its name below the module, and the parameter."""


@dataclass(frozen=True)
class ModulePolicy:
    """What precision a module's policies amount to: for its forward as a whole, and for each of its parameters.

    Attributes:
        inputs: what is done to the inputs of forward.
        output_dtype: to which its floating-point outputs are cast; None: left alone.
        buffer_dtype: to which its floating-point buffers are cast; None: left alone.
        of_parameters: in the order that they were asked for.
    """

    inputs: InputCast | None
    output_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    of_parameters: tuple[MixedPrecisionPolicy, ...]


MeshDimNames = str | tuple[str, ...] | None


@checked_class()
@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which named dims of an N-D mesh are data parallel: those to shard over and those to replicate over.

    Attributes:
        shard: one name, or several that are flattened into one dim.
        replicate: the same, for HSDP; without ``shard`` parameters are only replicated (DDP).

    Raises:
        FSDPValueError: neither is given.
    """

    shard: MeshDimNames = None
    replicate: MeshDimNames = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise FSDPValueError("DataParallelMeshDims needs at least one of shard and replicate.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dims to shard over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dims to replicate over."""
        return _names(self.replicate)


def _names(names: MeshDimNames) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


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
        full_precision: parameters are gathered in their original dtype, whatever the policy's ``param_dtype``.
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
    full_precision: bool = False

    @property
    def has_user_reduction(self) -> bool:
        """Whether a user's function writes what is reduced as a whole, padding included."""
        return self.custom_reduce_scatter is not None or self.all_reduce_hook is not None

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

    @property
    def packs_gathers(self) -> bool:
        """Whether everything that is gathered travels packed, whatever its size."""
        return self.custom_all_gather is not None

    @property
    def packs_reductions(self) -> bool:
        """The same of gradients."""
        return self.custom_reduce_scatter is not None

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
            or self.full_precision is not other.full_precision
        )


DEFAULT = GroupSettings()
"""Groups that are set alike share one value, so that changing many of them makes one new one."""

FREE = frozenset({"requires_gradient_sync", "requires_all_reduce", "max_pending"})
"""What is only looked at when a backward begins or ends: changed from microbatch to microbatch, at no cost."""


def refuse_settings(group: FSDPParamGroup, settings: GroupSettings) -> None:
    """Refuse what ``group`` cannot do, or not now.

    Raises:
        FSDPRuntimeError: gradients that were scaled or laid out otherwise wait for a later backward; a captured
            graph uses memory that would be freed.
        FSDPValueError: it could not work.
    """
    if not settings.scales_like(group.settings):
        group.reducer.refuse_rescaling(group.comm)
    if settings.packs_reductions is not group.settings.packs_reductions:
        group.reducer.refuse_another_layout()
    frees = group.settings.keeps_unsharded_storage and not settings.keeps_unsharded_storage
    if frees and group.comm is not None and group.comm.was_captured:
        raise FSDPRuntimeError(
            f"set_keep_unsharded_storage(False) on '{group.name}': a graph was captured that writes and reads the "
            "storage, which would be given to others. Leave it as it is for as long as that graph is replayed."
        )
    if settings.all_reduce_hook_stream is not None and group.mesh.replicate_group is not None:
        raise FSDPValueError(
            "set_all_reduce_hook: stream cannot be set when using native HSDP, a (replicate, shard) mesh, "
            "whose all-reduce has a stream already; the hook runs there."
        )
    if group.is_shared and not settings.unshards_in_backward:
        raise FSDPValueError(
            f"set_unshard_in_backward(False) on '{group.name}', whose weights are tied to those of another "
            "module: that one's backward may need them."
        )
    if settings.zeros_for_unused:
        group.reducer.refuse_zeros_of_any_dtype()


@dataclasses.dataclass(frozen=True, slots=True)
class RootSettings:
    """How iterations go, on the outermost sharded module.

    Attributes:
        is_last_backward: whether the end of the next backward waits for all reductions.
        finalizes_manually: the user says when a backward has ended, with ``finalize_backward``.
        prefetch_bytes: how many bytes of unsharded parameters may be gathered ahead; None: one unit's.
        backward_prefetch: when a unit's backward gathers ahead what comes next: before, after, or never.
        pools_memory: memory for communication is kept from use to use; None: as the communication context has it.
        compares_parameters: of replicas, when training begins.
        compares_buffers: the same of buffers.
        on_error: what a failed pass leaves of the gradients of its step: "keep_accumulated" or "drop_step".
        aborts_together: if an exception leaves a step on one rank, all ranks leave it.
        divergence: what ranks that run different modules do: "error" or "join".
        divergence_order: the sharded modules by name, in the order in which they "join"; None: as learned, or as they
            lie in the model.
    """

    is_last_backward: bool = True
    finalizes_manually: bool = field(default=False, metadata={"setter": "set_manual_backward_finalization"})
    prefetch_bytes: int | None = field(default=None, metadata={"setter": "set_prefetch_budget"})
    backward_prefetch: str = field(default="before", metadata={"setter": "set_backward_prefetch"})
    pools_memory: bool | None = field(default=None, metadata={"setter": "set_communication_memory_pool"})
    compares_parameters: bool = field(default=True, metadata={"setter": "set_replica_check"})
    compares_buffers: bool = field(default=True, metadata={"setter": "set_replica_check"})
    on_error: str = field(default="keep_accumulated", metadata={"setter": "set_recovery"})
    aborts_together: bool = field(default=False, metadata={"setter": "set_recovery"})
    divergence: str = field(default="error", metadata={"setter": "set_divergence"})
    divergence_order: tuple[str, ...] | None = field(default=None, metadata={"setter": "set_divergence"})

    def __post_init__(self) -> None:
        nbytes = self.prefetch_bytes
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
            raise FSDPValueError(f"the prefetch budget must be a number of bytes >= 0 or None, got {nbytes!r}.")
        if self.backward_prefetch not in ("before", "after", "never"):
            raise FSDPValueError(
                f"set_backward_prefetch takes 'before', 'after' or 'never', got {self.backward_prefetch!r}."
            )
        if self.on_error not in ("keep_accumulated", "drop_step"):
            raise FSDPValueError(
                f"set_recovery takes on_error='keep_accumulated' or 'drop_step', got {self.on_error!r}."
            )

        if self.divergence not in ("error", "join"):
            raise FSDPValueError(f"set_divergence takes 'error' or 'join', got {self.divergence!r}.")

    def setter_called(self) -> str | None:
        """The method that was called here, though it means nothing but on the root, if any was."""
        for each in dataclasses.fields(self):
            if "setter" in each.metadata and not _is_default(self, each):
                return str(each.metadata["setter"])
        return None


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
        if field.name not in without and not _is_default(settings, field)
    }


def _is_default(settings: Any, field: dataclasses.Field[Any]) -> bool:
    value = getattr(settings, field.name)
    return value is field.default or (isinstance(value, str) and value == field.default)  # equal ones need not be one


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, Comm) or (callable(value) and hasattr(value, "allocate")):
        return type(value).__name__
    return str(value) if value is None or isinstance(value, (bool, int, float, str)) else "set"
