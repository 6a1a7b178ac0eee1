"""Operators that run on the full tensor of which each rank has a shard, and then keeps its part: random numbers.

torch's DTensor draws random numbers for the local tensor. On CUDA each rank begins elsewhere in the generator's
sequence. On the host, and for the distributions that its tracker does not know, all ranks begin at the same place: rows
repeat from rank to rank, and ranks with fewer rows fall out of step. Here every rank draws for the full tensor, so
ranks that were seeded alike stay in step and hold what an unsharded tensor would get. That costs the memory and time
of a full tensor, once per initialization.

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
"""Operators for which DTensor gives each rank its own numbers on CUDA; handled here for tensors on the host only."""

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
"""Other random operators. Each element draws as many random numbers as any other, whatever its value."""

_INDEXED = (
    _aten.index_fill_.int_Scalar,
    _aten.index_put_.default,
    _aten.masked_fill_.Scalar,
    _aten.masked_fill_.Tensor,
)
"""What `nn.init` and ``tensor[...] = value`` run, handled for plain indices and masks, which are equal on all ranks."""

_REFUSED = (_aten.multinomial.default, _aten.rrelu_with_noise.default)
"""Random operators that depend on values of other ranks' elements, and that DTensor draws anew on each rank."""

_HANDLED = frozenset((*_TRACKED, *_UNTRACKED, *_INDEXED, *_REFUSED, _aten.eye.m_out))


def serve() -> list[_torch.Undo]:
    """Run these operators on full tensors from now on, for DTensors on meshes that something was sharded over."""
    return [
        _torch.handle_operators(dict.fromkeys(_HANDLED, _run_handled)),
        _torch.replace_truncated_normal(_truncated_normal),
    ]


def is_ours(tensor: DTensor) -> bool:
    """Whether ``tensor`` is sharded, and lies on a mesh that something was sharded over."""
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
    # A second DTensor is an index or a mask, which DTensor handles itself, except for ``tensor[mask] = number``.
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
    """``draw`` for the full ``tensor``: it redraws until all elements are in range, also those of other ranks."""
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
    """Run ``func``, which acts on every element by itself, on full tensors in which only this rank's part is set.

    No communication: only the shape of the other ranks' parts counts.

    Args:
        part_of: ``(full, spec) -> view`` of this rank's part of a full tensor.

    Raises:
        FSDPNotImplementedError: the DTensors differ in shape or placements.
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
        # Other ranks' parts are zeros here: what becomes of them is dropped.
        whole.zero_()
        part_of(whole, spec).copy_(under)
        return whole

    wholes = map_tensors(whole_of, list(args))
    named = map_tensors(whole_of, kwargs)
    result = func(*wholes, **named)
    # What `func` has written into a full tensor goes back into the DTensor's local one; it then returns that DTensor.
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
    """A DTensor with the placements of ``like``, over a copy of this rank's part of ``whole``."""
    spec = _torch.spec_of(like)
    part = part_of(whole, spec)
    values = torch.empty_strided(part.shape, local.stride(), dtype=part.dtype, device=part.device).copy_(part)
    return type(like)(values, _torch.spec_with_dtype(spec, part.dtype), requires_grad=False)  # type: ignore[call-arg,arg-type]


def chunk_of(whole: torch.Tensor, spec: Any) -> torch.Tensor:
    """A view of this rank's part of ``whole``, for placements that split dims into chunks as ``torch.chunk`` does.

    A strided placement splits what the placements right of it have split, so it comes last; each part is one range.
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
