"""What a user may ask of `fully_shard`, as frozen, self-validating data: precision, offload, named mesh dims.

Objects of torch's own classes of these names are accepted wherever ours are: `mixed_precision` and `offload` translate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp2.common import FSDPTypeError, FSDPValueError

ParamDtypeOverride = Callable[[nn.Parameter], torch.dtype | None]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes that a module computes and communicates in. Sharded parameters keep their original dtype.

    Attributes:
        param_dtype: of the unsharded parameters, hence of their all-gather, of forward and of backward. None: the
            original dtype. Parameters that are not floating point are never cast.
        reduce_dtype: in which gradients are reduced over the ranks, and accumulated while reduction is disabled. None:
            up to torch 2.14 they are reduced in ``param_dtype``, from 2.15 on as each parameter's ``grad_dtype`` says
            (unset: its original dtype; None: as gradients arrive); they accumulate as ``grad_dtype`` says on all
            versions. Gradients of different dtypes in one group are reduced in their promoted dtype.
        output_dtype: to which floating-point outputs of forward are cast. None: left alone.
        cast_forward_inputs: whether floating-point inputs of forward are cast to ``param_dtype``. In
            ``fully_shard([a, b])`` both casts apply to each module and each of its calls.
        param_dtype_override_fn: called with each parameter when `fully_shard` is; returns its own ``param_dtype``: its
            original dtype, or ``param_dtype``, or None for the latter. Must return the same on every rank.

    Raises:
        FSDPTypeError: a dtype that is none, or an override that cannot be called.
        FSDPValueError: a dtype that is not floating point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: ParamDtypeOverride | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise FSDPTypeError(f"MixedPrecisionPolicy.{name} must be a torch.dtype or None, got {dtype!r}.")
            if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
                raise FSDPValueError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point dtype, got {dtype}; parameters, gradients "
                    "and activations lose their values in any other."
                )
        if not isinstance(self.cast_forward_inputs, bool):
            raise FSDPTypeError(f"cast_forward_inputs must be a bool, got {self.cast_forward_inputs!r}.")
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise FSDPTypeError(
                "param_dtype_override_fn must be a function of a parameter that returns a dtype or None, got "
                f"{self.param_dtype_override_fn!r}."
            )

    def for_parameter(self, parameter: nn.Parameter, fqn: str) -> MixedPrecisionPolicy:
        """The policy of one parameter: the override asked, and a cast dropped that changes nothing.

        Raises:
            FSDPValueError: the override returned anything but None, ``param_dtype`` or the parameter's own dtype.
        """
        override = self.param_dtype_override_fn
        dtype = self.param_dtype
        if override is not None:
            chosen = override(parameter)
            if chosen is not None and chosen not in (self.param_dtype, parameter.dtype):
                raise FSDPValueError(
                    f"param_dtype_override_fn returned {chosen!r} for parameter '{fqn}'; expected None, param_dtype "
                    f"({self.param_dtype}) or the parameter's own dtype ({parameter.dtype})."
                )
            dtype = chosen if chosen is not None else dtype
        return MixedPrecisionPolicy(dtype, self.reduce_dtype, self.output_dtype, self.cast_forward_inputs)


def mixed_precision(policy: Any) -> MixedPrecisionPolicy:
    """``policy`` as ours; torch's own is translated.

    Raises:
        FSDPTypeError: it is neither.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in names):
        raise FSDPTypeError(f"mp_policy must be a MixedPrecisionPolicy, got {policy!r}.")
    return MixedPrecisionPolicy(
        *(getattr(policy, name) for name in names),
        param_dtype_override_fn=getattr(policy, "param_dtype_override_fn", None),
    )


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: the default."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, their gradients, and so the optimizer's state, live in host memory.

    Shards are copied to the device before they are gathered, reduced gradients back to the host in backward; the
    optimizer steps on CPU.

    Attributes:
        pin_memory: whether that host memory is pinned, which lets the copies overlap with compute. No effect where
            there is no accelerator to copy to.
    """

    pin_memory: bool = True


def offload(policy: Any) -> OffloadPolicy:
    """``policy`` as ours; torch's own is translated.

    Raises:
        FSDPTypeError: it is neither.
    """
    if isinstance(policy, OffloadPolicy):
        return policy
    known = {"OffloadPolicy", "CPUOffloadPolicy"} & {each.__name__ for each in type(policy).__mro__}
    if not known:
        raise FSDPTypeError(f"offload_policy must be an OffloadPolicy or a CPUOffloadPolicy, got {policy!r}.")
    return CPUOffloadPolicy(policy.pin_memory) if "CPUOffloadPolicy" in known else OffloadPolicy()


MeshDimNames = str | tuple[str, ...] | None


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
        if self.shard is None and self.replicate is None:
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
