"""Stands in for torch's own clipping functions (`substitutes`): computes the same bits on local tensors.

torch's functions send every gradient through DTensor's dispatch, once for its norm, once to stack that, once to scale.
Here norms are computed on local tensors, combined as DTensor does it, and the local tensors are scaled. On a CPU the
gradients that lie on buffers of groups, as they were delivered, are read as rows of these buffers, and scaled as one
tensor. Gradients that differ in mesh or placements, or are sharded over several mesh dims, go to torch's functions.
(`fsdp2.clip_grad_norm_` takes those as well, and is faster. Its norm is a sum in float64 over the buffers of groups,
whose last bits differ.)
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import _torch
from fsdp2.optim import clip_grad
from fsdp2.optim.delivered import Delivered, delivered_of

TensorOrTensors = torch.Tensor | Iterable[torch.Tensor]

_torchs_clip_norm = torch.nn.utils.clip_grad_norm_
_torchs_total_norm = torch.nn.utils.get_total_norm
_torchs_clip_with_norm = torch.nn.utils.clip_grads_with_norm_
_torchs_clip_value = torch.nn.utils.clip_grad_value_

_device_number = torch.Tensor.get_device
_dtype = operator.attrgetter("dtype")
_gradient_of = operator.attrgetter("grad")
_is_there = functools.partial(operator.is_not, None)
_FOREACH_DEVICES = ("cpu", "cuda")


def substitutes() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For each of torch's functions that read or scale gradients, one here that gives the same bits and costs less."""
    return {
        _torchs_clip_norm: clip_grad_norm_,
        _torchs_total_norm: get_total_norm,
        _torchs_clip_with_norm: clip_grads_with_norm_,
        _torchs_clip_value: clip_grad_value_,
    }


@torch.no_grad()
def clip_grad_norm_(
    parameters: TensorOrTensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`. Collective over the mesh of the gradients, as torch's, if they are DTensors."""
    every = _as_list(parameters)
    alike = None if foreach is False else _Alike.of_parameters(every)
    total = None if alike is None else alike.total_norm(norm_type, error_if_nonfinite)
    if alike is None or total is None:
        # A generator that was empty is passed on, as torch warns of it; another one has been used up.
        given = parameters if isinstance(parameters, types.GeneratorType) and not every else every
        return _torchs_clip_norm(given, max_norm, norm_type, error_if_nonfinite, foreach)
    alike.scale(max_norm, total)
    return total


@torch.no_grad()
def get_total_norm(
    tensors: TensorOrTensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """`torch.nn.utils.get_total_norm`. Collective over the mesh of ``tensors``, as torch's, if they are DTensors."""
    every = _as_list(tensors)
    alike = None if foreach is False else _Alike.of(every)
    total = None if alike is None else alike.total_norm(norm_type, error_if_nonfinite)
    return _torchs_total_norm(every, norm_type, error_if_nonfinite, foreach) if total is None else total


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: TensorOrTensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """`torch.nn.utils.clip_grads_with_norm_`. Not collective."""
    every = _as_list(parameters)
    alike = None if foreach is False else _Alike.of_parameters(every)
    if alike is None or not alike.is_whole(total_norm):
        _torchs_clip_with_norm(every, max_norm, total_norm, foreach)
    else:
        alike.scale(max_norm, total_norm)


@torch.no_grad()
def clip_grad_value_(parameters: TensorOrTensors, clip_value: float, foreach: bool | None = None) -> None:
    """`torch.nn.utils.clip_grad_value_`. Not collective."""
    every = _as_list(parameters)
    alike = None if foreach is False else _Alike.of_parameters(every)
    if alike is None:
        _torchs_clip_value(every, clip_value, foreach)
    else:
        _torch.foreach_clamp(alike.below, -float(clip_value), float(clip_value))


def _as_list(tensors: TensorOrTensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with _torch.plain_attributes():
        return list(filter(_is_there, map(_gradient_of, parameters)))


class _Alike:
    """DTensors of one device and dtype, all sharded over one and the same mesh dim, and replicated over all others.

    Attributes:
        below: their local tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], below: list[torch.Tensor], mesh: Any, dim: int) -> None:
        self.below = below
        self._tensors = tensors
        self._mesh = mesh
        self._dim = dim  # the mesh dim that they are sharded over

    @classmethod
    def of_parameters(cls, parameters: list[torch.Tensor]) -> _Alike | None:
        """`of` the gradients of ``parameters``, or what an earlier call has found out about delivered ones."""
        # Only on a CPU the norm of a row has the bits of that of a single tensor: [Note: norms of rows] in `delivered`.
        is_here = bool(parameters) and parameters[0].is_cpu and not torch.compiler.is_compiling()
        delivered = delivered_of(parameters) if is_here else None
        slices = None if delivered is None else delivered.slices()
        if delivered is None or not slices or not _are_plain_numbers(slices):
            return cls.of(_gradients_of(parameters))
        if _Where not in delivered.known:
            alike = cls.of(_gradients_of(parameters))
            if alike is None:
                return None
            delivered.known[_Where] = _Where(alike._mesh, alike._dim)
        return _AsDelivered(parameters, delivered, slices, delivered.known[_Where])

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Alike | None:
        """None if ``tensors`` are anything else, or there are none, or the call is being traced into a graph."""
        if torch.compiler.is_compiling():
            return None
        try:
            specs = list(map(_torch.spec_of, tensors))
        except AttributeError:  # a plain tensor has no spec
            return None
        below = list(map(_torch.local_of, tensors))
        if set(map(type, below)) != {torch.Tensor} or len(set(map(_dtype, below))) > 1:
            return None
        if len(set(map(_device_number, below))) > 1 or below[0].device.type not in _FOREACH_DEVICES:
            return None
        examples = dict(zip(map(id, specs), specs, strict=True)).values()  # few, as specs are shared
        mesh, dims = specs[0].mesh, {_sharded_dim(spec.placements) for spec in examples}
        dim = dims.pop() if len(dims) == 1 else None
        if dim is None or any(spec.mesh != mesh for spec in examples) or mesh.get_coordinate() is None:
            return None
        return cls(tensors, below, mesh, dim)

    def gradients(self) -> Sequence[torch.Tensor]:
        """The DTensors."""
        return self._tensors

    def total_norm(self, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor | None:
        """The norm (), the same on all ranks of the mesh; None if torch's function must compute or refuse it.

        Collective over the mesh.
        """
        order = float(norm_type)
        if order == math.inf:  # torch's own raises on a rank without elements, and the other ranks wait for it
            # The norm is on the mesh's device, also for gradients in host memory.
            found = clip_grad.norm_on_own_meshes(self.gradients(), order).to(self.below[0].device, self.below[0].dtype)
        elif 0 < order < math.inf:  # the arithmetic of DTensor, without its dispatch
            norms = self.norms(order)
            if self._mesh.size(self._dim) > 1:
                powers, there = norms**order, self._mesh.device_type
                if powers.device.type != there:  # gradients in host memory: collectives run on the mesh's device
                    powers = powers.to(there)
                dist.all_reduce(powers, group=self._mesh.get_group(self._dim))
                norms = (powers ** (1.0 / order)).to(self.below[0].device)
            found = torch.linalg.vector_norm(norms, order)
        else:
            return None
        if error_if_nonfinite and not math.isfinite(found.item()):
            return None
        # torch's function returns a DTensor for DTensors, so this one does.
        spec = _torch.make_spec(self._mesh, [Replicate()] * self._mesh.ndim, (), (), found.dtype)
        return _torch.make_dtensor(found, spec)

    def norms(self, order: float) -> torch.Tensor:
        """(n,): the norm of this rank's part of each gradient."""
        return torch.stack(_torch.foreach_norm(self.below, order, None))

    def scale(self, max_norm: float, total_norm: torch.Tensor) -> None:
        """Clip them in place. The host does not wait for the device to see whether this is needed."""
        total = _torch.plain_of(total_norm).to(self.below[0].device)
        self.multiply(torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply them by ``factor`` (), in place."""
        _torch.foreach_mul(self.below, factor)

    def is_whole(self, total_norm: torch.Tensor) -> bool:
        """Whether every rank of the mesh has all of ``total_norm``."""
        return (
            isinstance(total_norm, DTensor)
            and total_norm.device_mesh == self._mesh
            and all(each.is_replicate() for each in total_norm.placements)
        )


class _Where(NamedTuple):
    """The mesh, and its dim, over which delivered gradients are sharded."""

    mesh: Any
    dim: int


class _AsDelivered(_Alike):
    """Gradients on a CPU that lie on buffers of groups, as they were delivered there."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], delivered: Delivered, slices: list[torch.Tensor], where: _Where
    ) -> None:
        super().__init__(parameters, list(delivered.locals()), where.mesh, where.dim)
        self._delivered = delivered
        self._slices = slices

    def gradients(self) -> Sequence[torch.Tensor]:
        return _gradients_of(self._tensors)

    def norms(self, order: float) -> torch.Tensor:
        return self._delivered.norms(order)

    def multiply(self, factor: torch.Tensor) -> None:
        if not math.isfinite(_torch.on_host(factor.double())):  # padding between gradients must stay zeros
            super().multiply(factor)
            return
        _torch.foreach_mul(self._slices, factor)
        # The gradients were written through slices of the buffers, which their own versions do not show.
        torch.autograd.graph.increment_version(self.below)


def _are_plain_numbers(tensors: list[torch.Tensor]) -> bool:
    """Whether they are real, on the CPU, of one dtype, and no subclass such as a fake tensor."""
    first = tensors[0]
    return (
        first.is_cpu
        and first.is_floating_point()
        and set(map(type, tensors)) == {torch.Tensor}
        and len(set(map(_dtype, tensors))) == len(set(map(_device_number, tensors))) == 1
    )


def _sharded_dim(placements: Sequence[Any]) -> int | None:
    """The only mesh dim that is sharded over; None if there is none, or several."""
    if any(type(each) not in (Shard, Replicate) for each in placements):
        return None
    dims = [dim for dim, each in enumerate(placements) if type(each) is Shard]
    return dims[0] if len(dims) == 1 else None
