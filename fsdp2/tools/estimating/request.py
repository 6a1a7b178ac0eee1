"""`Request`: what is to be estimated, checked before anything is made; and the batch of one rank and microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.api.policies import OffloadChoice, offload_choice
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.state import Strategy
from fsdp2.errors import FSDPTypeError, FSDPValueError
from fsdp2.model.accumulation import Kept
from fsdp2.tools.estimating.hardware import Hardware

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[..., torch.optim.Optimizer]
Shard = Callable[[nn.Module, DeviceMesh], object]
Checkpointing = Literal["none", "selective", "blocks"]

CHECKPOINTING = ("none", "selective", "blocks")
SAME_SAMPLES = ("tp", "cp", "pp")
"""Names of mesh dims whose ranks compute on the same samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `fsdp2.estimate` is asked. Fields are its arguments.

    Raises:
        FSDPTypeError: the batch holds no tensor, or the optimizer cannot be called.
        FSDPValueError: samples cannot be divided, or fields contradict each other or the hardware.
    """

    make_model: MakeModel | nn.Module
    mesh_shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]
    batch: Any
    optimizer: MakeOptimizer | None
    hardware: Hardware
    mp_policy: MixedPrecisionPolicy
    strategy: Strategy | None = None
    offload_policy: OffloadChoice | None = None
    blocks: Any = None
    shard: Shard | None = None
    checkpointing: Checkpointing = "none"
    accumulation: int = 1
    kept: Kept = "unsharded"
    loss: Callable[..., torch.Tensor] | None = None
    activation_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        self._check_mesh()
        if self.checkpointing not in CHECKPOINTING:
            raise FSDPValueError(
                f"checkpointing must be one of {', '.join(map(repr, CHECKPOINTING))}, got {self.checkpointing!r}."
            )
        if self.accumulation < 1:
            raise FSDPValueError(f"accumulation is a number of microbatches, 1 or more, got {self.accumulation}.")
        if self.activation_bytes is not None and self.activation_bytes < 0:
            raise FSDPValueError(f"activation_bytes must be 0 or more, got {self.activation_bytes}.")
        if self.shard is not None and self.strategy is not None:
            raise FSDPValueError("shard and strategy contradict each other: let the function shard by that strategy.")
        if self.optimizer is not None and not callable(self.optimizer):
            raise FSDPTypeError(
                "optimizer is an optimizer's class, a function of the list of parameters that makes one, or None, got "
                f"{type(self.optimizer).__name__}."
            )
        offload_choice(self.offload_policy)
        self.hardware.refuse_more_ranks(self.ranks)
        self._check_batch()

    def _check_mesh(self) -> None:
        shape, names = self.mesh_shape, self.mesh_dim_names
        if not shape or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
            raise FSDPValueError(f"mesh_shape is a number of ranks, or a tuple of them, 1 or more each, got {shape}.")
        if len(names) != len(shape):
            raise FSDPValueError(f"mesh_dim_names={names} and mesh_shape={shape} are of different lengths.")
        if len(shape) > 2 and self.shard is None:
            raise FSDPValueError(
                f"mesh_shape={shape} has {len(shape)} dims, and only (shard,) and (replicate, shard) are known by "
                "themselves; pass shard=, a function (model, mesh) that shards as your program does."
            )

    def _check_batch(self) -> None:
        parts = self.data_parallel * self.accumulation
        if self.samples % parts or not self.samples:
            raise FSDPValueError(
                f"the batch has {self.samples} samples, which {self.data_parallel} data-parallel ranks and "
                f"{self.accumulation} microbatches ({parts} parts) do not divide. Samples lie in dim 0 of its first "
                "tensor, of all ranks together; change the batch, the mesh or accumulation."
            )

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.mesh_shape)

    @property
    def data_parallel(self) -> int:
        """How many ranks have samples of their own."""
        pairs = zip(self.mesh_shape, self.mesh_dim_names, strict=True)
        return math.prod(size for size, name in pairs if name not in SAME_SAMPLES)

    @property
    def offloading(self) -> OffloadChoice:
        """``offload_policy``, as one of our own classes."""
        return offload_choice(self.offload_policy)

    @property
    def samples(self) -> int:
        """How many samples all ranks together have in a step.

        Raises:
            FSDPTypeError: the batch holds no tensor.
        """
        tensors = [each for each in _values(self.batch) if isinstance(each, torch.Tensor) and each.dim()]
        if not tensors:
            raise FSDPTypeError(
                "batch is what all ranks together train on in a step: a tensor, a tuple of positional arguments or a "
                f"dict of keyword arguments, with samples in dim 0; got {type(self.batch).__name__} without a tensor "
                "that has dims."
            )
        return tensors[0].shape[0]

    def local_batch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New tensors as arguments of one forward of one rank; in a simulation they have no memory."""
        samples, parts = self.samples, self.data_parallel * self.accumulation
        batch = self.batch
        if isinstance(batch, Mapping):
            return (), {name: _part(value, samples, parts) for name, value in batch.items()}
        positional = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        return tuple(_part(value, samples, parts) for value in positional), {}


def _values(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]


def _part(value: Any, samples: int, parts: int) -> Any:
    """The part of ``value`` for one rank and microbatch, if it is a tensor of samples."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = list(value.shape)
    if shape and shape[0] == samples:
        shape[0] //= parts
    return torch.empty(shape, dtype=value.dtype, requires_grad=value.requires_grad)
