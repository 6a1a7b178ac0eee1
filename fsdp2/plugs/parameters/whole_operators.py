"""Operators that are run on the whole of a sharded tensor, of which each rank then keeps its part: random numbers.

torch's DTensor draws random numbers for the local tensor. On CUDA each rank begins elsewhere in the generator's
sequence; on the host, and for the distributions that its tracker does not know, all ranks begin at the same place: rows
repeat from rank to rank, and ranks with fewer rows fall out of step. Here every rank draws for the whole, so that ranks
which were seeded alike stay in step and hold what an unsharded tensor would get. That costs the memory and the time of
a whole tensor, once per initialization.

`serve` lets DTensor's dispatcher call `_run_handled`, for tensors on meshes that something was sharded over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.mesh import SHARDED
from fsdp2.core.trees import map_tensors, tensors_in
from fsdp2.errors import FSDPNotImplementedError

_aten: Any = torch.ops.aten

_TRACKED = (
    _aten.bernoulli.default,
    _aten.bernoulli_.float,
    _aten.native_dropout.default,
    _aten.normal_.default,
    _aten.rand_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
    _aten.randn_like.default,
    _aten.uniform_.default,
)
"""What DTensor gives each rank its own numbers for on CUDA: here for tensors on the host only."""

_UNTRACKED = (
    _aten.bernoulli_.Tensor,
    _aten.cauchy_.default,
    _aten.exponential_.default,
    _aten.geometric_.default,
    _aten.log_normal_.default,
    _aten.normal.Tensor_Tensor,
    _aten.normal.Tensor_float,
    _aten.normal.float_Tensor,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
)
"""Other random numbers, of which each element takes as many as any other, whatever its value."""

_INDEXED = (
    _aten.index_fill_.int_Scalar,
    _aten.index_put_.default,
    _aten.masked_fill_.Scalar,
    _aten.masked_fill_.Tensor,
)
"""What `nn.init` and ``tensor[...] = value`` do with plain indices and masks, the same on all ranks."""

_REFUSED = (_aten.multinomial.default, _aten.rrelu_with_noise.default)
"""Random numbers that DTensor draws anew on each rank, and that depend on the values of others."""

_HANDLED = frozenset((*_TRACKED, *_UNTRACKED, *_INDEXED, *_REFUSED, _aten.eye.m_out))


def serve() -> list[_torch.Undo]:
    """Run these operators on the whole of DTensors on meshes that something is sharded over, from now on."""
    return [
        _torch.handle_operators(dict.fromkeys(_HANDLED, _run_handled)),
        _torch.replace_truncated_normal(_truncated_normal),
    ]


def is_ours(tensor: DTensor) -> bool:
    """Whether ``tensor`` is cut, and lies on a mesh that something was sharded over."""
    spec = _torch.spec_of(tensor)
    partition = any(map(_torch.is_shard, spec.placements))
    return partition and spec.mesh in SHARDED and not _torch.local_of(tensor).is_meta


def _run_handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(tensors_in((*args, *kwargs.values())))
    for each in tensors:
        if isinstance(each, _torch.OwnOperators):
            return each.run_operator(func, args, kwargs)
    dtensors = [each for each in tensors if isinstance(each, DTensor)]
    if not all(is_ours(each) and (func not in _TRACKED or _is_on_host(each)) for each in dtensors):
        return _torch.run_unhandled(func, args, kwargs)
    is_masked = func is _aten.index_put_.default and args[2].numel() == 1 and not isinstance(args[2], DTensor)
    if func in _INDEXED and len(dtensors) > 1 and not is_masked:
        return _torch.run_unhandled(func, args, kwargs)
    if func in _REFUSED:
        raise FSDPNotImplementedError(
            f"{func} draws random numbers that depend on the values of all ranks, of a tensor of shape "
            f"{tuple(dtensors[0].shape)} that is cut ({list(dtensors[0].placements)}): ranks would draw the same ones. "
            "Take the whole with tensor.full_tensor() (all ranks must call it)."
        )
    return run_on_whole(func, args, kwargs, chunk_of)


def _is_on_host(tensor: DTensor) -> bool:
    return _torch.local_of(tensor).device.type == "cpu"


def _truncated_normal(draw: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``draw`` for the whole of ``tensor``: it draws until all elements are in range, which no rank knows of others."""
    if (
        not isinstance(tensor, DTensor)
        or isinstance(tensor, _torch.OwnOperators)
        or not is_ours(tensor)
        or not _is_on_host(tensor)
    ):
        return draw(tensor, *args, **kwargs)
    spec, local = _torch.spec_of(tensor), _torch.local_of(tensor)
    whole = torch.empty_strided(tensor.shape, spec.tensor_meta.stride, dtype=local.dtype, device=local.device)
    drawn = _wrapped(draw(whole, *args, **kwargs), tensor, local, chunk_of)
    with torch.no_grad():
        return tensor.copy_(drawn)


def run_on_whole(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], part_of: Callable[[torch.Tensor, Any], torch.Tensor]
) -> Any:
    """Run ``func``, in which every element acts for itself, on whole tensors in which this rank's part is set.

    No communication: of the others' parts only the shape counts.

    Args:
        part_of: a view of this rank's part of a whole tensor, for a spec.

    Raises:
        FSDPNotImplementedError: the DTensors do not all lie alike.
    """
    dtensors: list[Any] = [each for each in tensors_in((*args, *kwargs.values())) if isinstance(each, DTensor)]
    like = dtensors[0]
    spec, local = _torch.spec_of(like), _torch.local_of(like)
    if any(each.shape != like.shape or each.placements != like.placements for each in dtensors):
        raise FSDPNotImplementedError(
            f"{func} got tensors of shapes {[tuple(each.shape) for each in dtensors]} and placements "
            f"{[list(each.placements) for each in dtensors]}; random numbers are drawn only for tensors that lie "
            "alike. Take the whole of each with tensor.full_tensor() (all ranks must call it)."
        )

    def whole_of(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        under = _torch.local_of(value)
        whole = torch.empty_strided(like.shape, spec.tensor_meta.stride, dtype=under.dtype, device=under.device)
        whole.zero_()
        part_of(whole, spec).copy_(under)
        return whole

    wholes = map_tensors(whole_of, list(args))
    named = map_tensors(whole_of, kwargs)
    result = func(*wholes, **named)
    written = _torch.written_arguments(func, args, kwargs)
    for value, whole in zip((*args, *kwargs.values()), (*wholes, *named.values()), strict=True):
        if any(value is each for each in written):
            _torch.local_of(value).copy_(part_of(whole, spec))
    if written and not isinstance(result, tuple) and any(result is each for each in (*wholes, *named.values())):
        return written[0]
    if isinstance(result, tuple):
        return tuple(_wrapped(each, like, local, part_of) for each in result)
    return _wrapped(result, like, local, part_of)


def _wrapped(whole: torch.Tensor, like: Any, local: torch.Tensor, part_of: Callable[..., torch.Tensor]) -> Any:
    """A DTensor over this rank's part of ``whole``, which lies as ``like`` does."""
    spec = _torch.spec_of(like)
    part = part_of(whole, spec)
    values = torch.empty_strided(part.shape, local.stride(), dtype=part.dtype, device=part.device).copy_(part)
    return type(like)(values, _torch.spec_with_dtype(spec, part.dtype), requires_grad=False)  # type: ignore[call-arg,arg-type]


def chunk_of(whole: torch.Tensor, spec: Any) -> torch.Tensor:
    """A view of this rank's part of ``whole``, as the placements of ``spec`` say that deal out dims in chunks.

    A strided placement cuts what those right of it have cut: they come first. Each part is then one range.
    """
    axes = [axis for axis, placement in enumerate(spec.placements) if _torch.is_shard(placement)]
    axes.sort(key=lambda axis: hasattr(spec.placements[axis], "split_factor"))
    for axis in axes:
        dim, count = spec.placements[axis].dim, spec.mesh.size(axis)
        size = whole.size(dim)
        rows = -(-size // count)
        start = min(rows * spec.mesh.get_local_rank(axis), size)
        whole = whole.narrow(dim, start, min(rows, size - start))
    return whole
