"""Views of sharded tensors whose writes reach the shards, and numbers read off sharded tensors.

``weight[1]`` of a tensor that is sharded in dim 0 is, in torch's DTensor, a view of a gathered copy, so
``weight[1].zero_()`` writes into the copy. Here it is a `WrittenView`, which writes into this rank's shard as well:
`nn.Embedding.reset_parameters` and the initialization of many models depend on it. ``bool(tensor.isnan().any())``
reads, in torch, this rank's part of a sum that was never reduced; here it reads the reduced value. ``max()`` of a
tensor of which some rank has nothing is computed on the full tensor. All of this takes a gather or a reduction, so all
ranks of the mesh must do it.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2 import _torch
from fsdp2.core.mesh import SHARDED
from fsdp2.core.trees import map_tensors, tensors_in
from fsdp2.plugs.parameters.whole_operators import chunk_of, is_ours

_aten: Any = torch.ops.aten

_VIEWS = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.diagonal.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
)
"""Views for which DTensor gathers, or which it refuses, along a dim that is cut."""

_EXTREMES = (
    _aten.max.default,
    _aten.min.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.argmax.default,
    _aten.argmin.default,
    _aten.aminmax.default,
    _aten.linalg_vector_norm.default,
)
"""Operators without a result for no elements: on a rank without rows they would raise while other ranks wait."""

_ALL_ROWS = 1 << 62
"""The end of a slice that has none."""


_SET = (_aten.copy_.default, _aten.fill_.Tensor, _aten.fill_.Scalar) if _torch.SETS_ITEMS_AS_DTENSORS else ()
"""The operators by which ``tensor[...] = value`` writes."""


def serve() -> list[_torch.Undo]:
    """Handle these operators from now on, for DTensors on meshes that something is sharded over."""
    handlers = dict.fromkeys((*_VIEWS, *_SET), _run_handled) | dict.fromkeys(_EXTREMES, _extreme)
    one_each = {_aten._local_scalar_dense.default: _number, _aten._foreach_norm.Scalar: _norms}
    return [_torch.handle_operators({**handlers, **one_each})]


class _Whole:
    """A gathered copy of a sharded tensor, on which views lie.

    Attributes:
        origin: the sharded tensor.
        values: the copy, as a plain tensor.
    """

    __slots__ = ("origin", "values")

    def __init__(self, origin: DTensor) -> None:
        self.origin = origin
        self.values = _gathered(origin)

    def read_part(self) -> torch.Tensor:
        """Refresh this rank's part of the copy from the shard, which may have been written. Returns its values."""
        return self._part().copy_(_torch.local_of(self.origin)).clone()

    def write_part(self, before: torch.Tensor) -> None:
        """Write this rank's part back where it differs from ``before``; an operator may write views of two copies."""
        local, part = _torch.local_of(self.origin), self._part()
        local.copy_(torch.where(part != before, part, local))
        torch.autograd.graph.increment_version(self.origin)

    def _part(self) -> torch.Tensor:
        return chunk_of(self.values, _torch.spec_of(self.origin))


class WrittenView(_torch.OwnOperators):
    """A view of a sharded tensor, replicated; what is written into the view is written into the sharded tensor too.

    When the view is written, it sees what was written into this rank's shard of the tensor meanwhile; not before.
    """

    _whole: _Whole

    @classmethod
    def _of(cls, values: torch.Tensor, whole: _Whole) -> WrittenView:
        mesh = whole.origin.device_mesh
        spec = _torch.make_spec(mesh, [Replicate()] * mesh.ndim, values.shape, values.stride(), values.dtype)
        view = cls(values, spec, requires_grad=False)  # type: ignore[call-arg,arg-type]
        view._whole = whole
        return view

    @classmethod
    def run_operator(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Views of views stay `WrittenView`s, and writes reach the sharded tensor; torch's DTensor does the rest."""
        written = tensors_in(_torch.written_arguments(func, args, kwargs))
        views = [each for each in written if isinstance(each, WrittenView)]
        if not views and not func.is_view:
            return func(*map_tensors(_plain, args), **map_tensors(_plain, kwargs))
        if not views:
            whole = args[0]._whole
            seen = func(*map_tensors(_values, args), **map_tensors(_values, kwargs))
            return map_tensors(lambda values: cls._of(values, whole), seen)
        wholes = {view._whole: view._whole.read_part() for view in views}
        result = func(*map_tensors(_values, args), **map_tensors(_values, kwargs))
        for whole, before in wholes.items():
            whole.write_part(before)
        # In-place operators return their argument: answer with the view itself, not with its local tensor.
        known = {id(_torch.local_of(view)): view for view in views}
        return map_tensors(lambda values: known.get(id(values), values), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return _plain(self).clone()  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).clone().__reduce_ex__(protocol)  # without the rest of the gathered copy


def _plain(value: Any) -> Any:
    """``value`` as a DTensor of torch's own class, if it is a `WrittenView`."""
    if not isinstance(value, WrittenView):
        return value
    return _torch.make_dtensor(_torch.local_of(value), _torch.spec_of(value))


def _values(value: Any) -> Any:
    """``value`` as a plain tensor: of a view the local one, on the gathered copy; any other DTensor is gathered."""
    if isinstance(value, WrittenView):
        return _torch.local_of(value)
    return _gathered(value) if isinstance(value, DTensor) else value


def _gathered(tensor: DTensor) -> torch.Tensor:
    """``tensor``, gathered, without gradients."""
    with torch.no_grad():
        return _detached(tensor).full_tensor()


def _detached(tensor: DTensor) -> DTensor:
    """``tensor`` unknown to autograd. ``detach()`` would not do: below autograd it is an operator like any other."""
    return type(tensor)(_torch.local_of(tensor), _torch.spec_of(tensor), requires_grad=False)  # type: ignore[call-arg,arg-type]


def _run_handled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operator, or a write into a view. Views of dims that are not cut, or not ours, are torch's."""
    tensor = args[0]
    if isinstance(tensor, _torch.OwnOperators):
        return tensor.run_operator(func, args, kwargs)
    # A tensor that is traced is no plain `torch.Tensor` underneath.
    if func in _SET or not is_ours(tensor) or type(_torch.local_of(tensor)) is not torch.Tensor:
        return _torch.run_unhandled(func, args, kwargs)
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    dims = {given[name] % tensor.ndim for name in ("dim", "dim1", "dim2") if name in given} or set(range(tensor.ndim))
    if func in (_aten.squeeze.default, _aten.squeeze.dim):
        dims = {dim for dim in dims if tensor.size(dim) == 1}
    cut = {placement.dim % tensor.ndim for placement in tensor.placements if _torch.is_shard(placement)}  # type: ignore[attr-defined]
    is_all = func is _aten.slice.Tensor and not given["start"] and (given["end"] or _ALL_ROWS) >= tensor.size(*dims)
    if dims.isdisjoint(cut) or (is_all and given["step"] == 1):
        return _torch.run_unhandled(func, args, kwargs)
    whole = _Whole(tensor)
    seen = func(whole.values, *args[1:], **kwargs)
    return map_tensors(lambda values: WrittenView._of(values, whole), seen)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a largest or smallest element on the full tensor, if some rank may have no rows: it is small then."""
    tensor: DTensor = args[0]
    if isinstance(tensor, _torch.OwnOperators):
        return tensor.run_operator(func, args, kwargs)
    if func is _aten.linalg_vector_norm.default and not _is_extreme(*args[1:2]):
        return _torch.run_unhandled(func, args, kwargs)
    mesh = tensor.device_mesh
    parts = dict.fromkeys(range(tensor.ndim), 1)
    for axis, placement in enumerate(tensor.placements):
        if _torch.is_shard(placement):
            parts[placement.dim % tensor.ndim] *= mesh.size(axis)  # type: ignore[attr-defined]
    # With rows = ceil(size / parts), the last of `parts` ranks has some if those before do not take all of them.
    has_all = all((parts[dim] - 1) * -(-size // parts[dim]) < size for dim, size in enumerate(tensor.shape))
    gives_indices = func in (_aten.argmax.default, _aten.argmin.default)  # in torch 2.11 they count a rank's own rows
    if (has_all and not gives_indices) or not tensor.numel() or not is_ours(tensor):
        return _torch.run_unhandled(func, args, kwargs)
    replicated = [Replicate()] * mesh.ndim

    def made(found: torch.Tensor) -> DTensor:
        spec = _torch.make_spec(mesh, replicated, found.shape, found.stride(), found.dtype)
        return _torch.make_dtensor(found, spec)

    return map_tensors(made, func(_gathered(tensor), *args[1:], **kwargs))


def _is_extreme(order: float = 2) -> bool:
    """Whether a norm of this ``order`` is a maximum or minimum, which has no value for no elements."""
    return math.isinf(order) or order < 0


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The norms of many tensors; one by one, if they are maxima or minima, so that `_extreme` handles each."""
    tensors, *rest = args
    if not _is_extreme(*rest[:1]):
        return _torch.run_unhandled(func, args, kwargs)
    return [torch.linalg.vector_norm(tensor, *rest, **kwargs) for tensor in tensors]


def _number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one element of a tensor, as a Python number."""
    tensor: DTensor = args[0]
    spec = _torch.spec_of(tensor)
    if spec.mesh not in SHARDED or all(placement.is_replicate() for placement in spec.placements):
        return _torch.run_unhandled(func, args, kwargs)
    if tensor.dtype is torch.bool:  # a partial bool cannot be summed over ranks
        tensor = cast(DTensor, _detached(tensor).to(torch.int32))
        return bool(_gathered(tensor).item())
    return _gathered(tensor).item()
