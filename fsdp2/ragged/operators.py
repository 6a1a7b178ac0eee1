"""Which operators run on DTensors whose placements torch does not know: on the local tensors, or not at all.

Operators that act on each element by itself (arithmetic, optimizers, copies) need only local tensors with the same
mesh and placements. A rule finds them, not a list: torch's own tag, or a name that begins with ``_foreach_`` or
``_fused_``. Norms and sums give a partial result per rank, as DTensor's do. All others are errors that say what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsdp2 import _torch
from fsdp2.core.sharding import contiguous_stride, reduction_groups_of
from fsdp2.core.trees import tensors_in
from fsdp2.errors import FSDPNotImplementedError, FSDPValueError
from fsdp2.plugs.parameters.whole_operators import run_on_whole

_LOCAL = frozenset(
    {
        "_pin_memory",
        "_to_copy",
        "alias",
        "clone",
        "copy",
        "copy_",
        "detach",
        "empty_like",
        "fill",
        "fill_",
        "full_like",
        "is_pinned",
        "lift_fresh",
        "masked_fill",
        "masked_fill_",
        "ones_like",
        "zero",
        "zero_",
        "zeros_like",
    }
)
"""Operators that act on each element by itself, but have no tag that says so."""

_NEW = frozenset(
    {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "view", "_unsafe_view", "expand"}
)
"""Operators that take a shape, of which only the tensor's own is possible."""

_RANDOM_FILLS = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "rand_like",
        "randint_like",
        "randn_like",
        "random_",
        "uniform_",
    }
)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], partition: Callable[[torch.Tensor, Any], Any]) -> Any:
    """Run the ``OpOverload`` ``func`` on tensors some of which are `_torch.OwnOperators`.

    Args:
        partition: ``(full, spec) -> view`` of this rank's part of a full tensor.

    Raises:
        FSDPNotImplementedError: the operator needs more than the local tensors.
        FSDPValueError: the tensors differ in shape, mesh or placements.
    """
    name = _torch.operator_name(func)
    if name == "is_same_size":
        return args[0].shape == args[1].shape
    if name == "_foreach_norm":
        return _norms(func, args, kwargs)
    if name.startswith("_amp_foreach"):
        return _unscale(func, args, kwargs)
    if name.startswith(("_foreach_", "_fused_")) and isinstance(args[0], (list, tuple)):
        return _run_lists(func, args, kwargs)
    if name in _LOCAL or torch.Tag.pointwise in func.tags:
        return _run_local(func, args, kwargs)
    if name in _NEW:
        return _run_new(func, name, args, kwargs)
    if name in _RANDOM_FILLS:
        return _fill_randomly(func, args, kwargs, partition)
    if name in ("sum", "linalg_vector_norm") and _is_of_everything(func, args, kwargs):
        return _reduce(func, name, args, kwargs)
    if name in ("any", "all") and _is_of_everything(func, args, kwargs):
        return _agreed(func, name, args[0])
    raise FSDPNotImplementedError(f"{func} {_IS_NOT_LOCAL} Got {_described(_tensors(args, kwargs))}.")


_IS_NOT_LOCAL = (
    "does not act on each element for itself, and so cannot be computed on rows that are dealt out otherwise than "
    "torch.chunk does. Take the whole with tensor.full_tensor(), or (all ranks must call both) another placement with "
    "tensor.redistribute(placements=...), or this rank's rows with tensor.to_local()."
)


def wrapped(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor over ``local`` with the class and placements of ``like``.

    Raises:
        FSDPNotImplementedError: ``local`` does not have the shape of the local tensor of ``like``.
    """
    spec, under = _torch.spec_of(like), _torch.local_of(like)
    if local.shape != under.shape:
        raise FSDPNotImplementedError(
            f"an operator that makes a tensor of shape {tuple(local.shape)} of rows of shape {tuple(under.shape)} "
            f"{_IS_NOT_LOCAL} Got {_described([like])}."
        )
    stride = like.stride() if local.stride() == under.stride() else contiguous_stride(like.shape)
    if stride != like.stride() or local.dtype != spec.tensor_meta.dtype:
        spec = _torch.make_spec(spec.mesh, spec.placements, like.shape, stride, local.dtype)
    return type(like)(local, spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


# ---- one tensor ----------------------------------------------------------------------------------


def _run_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = _checked_alike(func, _tensors(args, kwargs))
    result = func(*map(_local, args), **{name: _local(value) for name, value in kwargs.items()})
    written = _torch.written_arguments(func, args, kwargs)
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    if isinstance(result, (tuple, list)):
        return type(result)(wrapped(each, like) for each in result)
    return wrapped(result, like) if isinstance(result, torch.Tensor) else result


def _checked_alike(func: Any, tensors: Sequence[torch.Tensor]) -> DTensor:
    """The first of ``tensors`` that is ours and no number, if all others have its shape, mesh and placements.

    Raises:
        FSDPValueError: they have not.
    """
    large = [each for each in tensors if each.dim()]
    like = next((each for each in large if isinstance(each, _torch.OwnOperators)), large[0] if large else tensors[0])
    for each in large:
        if each is like or (not isinstance(each, DTensor) and not isinstance(like, DTensor)):
            continue
        if _lies_like(each, like):
            continue
        raise FSDPValueError(
            f"{func} got tensors that do not lie alike: {_described(tensors)}. Rows that are dealt out otherwise than "
            "torch.chunk does can be combined only with numbers and with tensors of the same shape, mesh and "
            "placements. Take the whole of each with tensor.full_tensor() (all ranks must call it)."
        )
    return like  # type: ignore[return-value]


def _lies_like(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    if not (isinstance(tensor, DTensor) and isinstance(like, DTensor)) or tensor.shape != like.shape:
        return False
    one, other = _torch.spec_of(tensor), _torch.spec_of(like)
    if one is other:
        return True
    return bool(one.placements == other.placements and one.mesh == other.mesh) and not any(
        placement.is_partial() for placement in one.placements
    )


def _local(value: Any) -> Any:
    """The argument that the operator gets in place of ``value``: the local tensor of a DTensor."""
    if not isinstance(value, DTensor):
        return value
    if any(placement.is_partial() for placement in value.placements):
        raise FSDPValueError(
            f"a DTensor of shape {tuple(value.shape)} with placements {list(value.placements)} is still to be reduced "
            "over the ranks, and cannot be combined with one whose rows are dealt out otherwise than torch.chunk does: "
            "take its full_tensor() first (all ranks must call it)."
        )
    return _torch.local_of(value)


def _run_new(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, size, *rest = args
    if not isinstance(tensor, _torch.OwnOperators) or tuple(size) != tuple(tensor.shape):
        raise FSDPNotImplementedError(f"{func} of another shape {_IS_NOT_LOCAL} Got {_described(_tensors(args, {}))}.")
    local = _torch.local_of(tensor)
    if name == "new_empty_strided":
        rest = [local.stride()]
    return wrapped(func(local, local.shape, *rest, **kwargs), tensor)


def _fill_randomly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], partition: Callable[..., Any]) -> Any:
    """Draw random numbers for the full tensor, of which this rank keeps its rows, as an unsharded tensor would get."""
    tensors = _tensors(args, kwargs)
    if not isinstance(args[0], _torch.OwnOperators) or len(tensors) > 1:
        raise FSDPNotImplementedError(f"{func} {_IS_NOT_LOCAL} Got {_described(tensors)}.")
    return run_on_whole(func, args, kwargs, partition)


# ---- sums and norms ------------------------------------------------------------------------------


def _is_of_everything(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    position = 2 if _torch.operator_name(func) == "linalg_vector_norm" else 1
    dim, keepdim = (
        kwargs.get(name, args[at] if len(args) > at else None)
        for name, at in (("dim", position), ("keepdim", position + 1))
    )
    is_all = dim is None or (not isinstance(dim, int) and not dim)
    return is_all and not keepdim and kwargs.get("out") is None


def _reduce(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """A partial DTensor of shape (): the sum or norm that is still to be reduced over the ranks, as DTensor's own."""
    tensor = args[0]
    if name == "sum":
        return _partial(func(_local(tensor), *args[1:], **kwargs), tensor, Partial("sum"))
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return _partial(_norm_of(func, _local(tensor), args[1:], kwargs), tensor, _norm_placement(order))


def _agreed(func: Any, name: str, tensor: torch.Tensor) -> DTensor:
    """Whether any element is true, or all are: a replicated DTensor of shape (). Collective over the mesh."""
    there, device_type = func(_local(tensor)).to(torch.int32), _torch.spec_of(tensor).mesh.device_type
    if there.device.type not in ("meta", device_type):  # the tensor is offloaded: collectives run on the mesh's device
        there = there.to(device_type)
    number = _partial(there, tensor, Partial("max" if name == "any" else "min"))  # type: ignore[arg-type]
    return number.redistribute(placements=[Replicate()] * number.device_mesh.ndim).to(torch.bool)  # type: ignore[return-value]


def _norm_placement(order: Any) -> Any:
    if order < 0:
        raise FSDPNotImplementedError(f"a norm of order {order} {_IS_NOT_LOCAL}")
    return _torch.norm_partial(float(order))


def _norm_of(func: Any, local: torch.Tensor, rest: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    if local.numel():
        return func(local, *rest, **kwargs)  # type: ignore[no-any-return]
    return func(local.new_zeros(1), *rest, **kwargs)  # type: ignore[no-any-return]  # nothing has no largest element


def _partial(number: torch.Tensor, tensor: DTensor, placement: Any) -> DTensor:
    spec = _torch.spec_of(tensor)
    placements = [each if each.is_replicate() else placement for each in spec.placements]
    return _torch.make_dtensor(number, _torch.make_spec(spec.mesh, placements, (), (), number.dtype))


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The norm of each tensor: a partial DTensor for ours, torch's result for others."""
    tensors, *rest = args
    order = rest[0] if rest else kwargs.get("ord", 2)
    placement = _norm_placement(order)
    norms = []
    for tensor in tensors:
        if not isinstance(tensor, _torch.OwnOperators):
            norms += func([tensor], *rest, **kwargs)
            continue
        local = _torch.local_of(tensor)
        (number,) = func([local if local.numel() else local.new_zeros(1)], *rest, **kwargs)
        norms.append(_partial(number, tensor, placement))
    return norms


# ---- lists ---------------------------------------------------------------------------------------


def _run_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists: element i of one meets element i of every other, so only these must fit each other."""
    values = [*args, *kwargs.values()]
    lists = [value for value in values if _is_list(value) and value]
    if len({len(each) for each in lists}) > 1:
        raise FSDPValueError(f"{func} got lists of lengths {[len(each) for each in lists]}; they must be equal.")
    numbers = [value for value in values if isinstance(value, torch.Tensor)]
    like = [_checked_alike(func, [*lane, *numbers]) for lane in zip(*lists, strict=True)]
    result = func(*map(_locals, args), **{name: _locals(value) for name, value in kwargs.items()})
    if result is None:
        return None
    return [wrapped(each, lane) if isinstance(lane, DTensor) else each for each, lane in zip(result, like, strict=True)]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, torch.Tensor) for each in value)


def _locals(value: Any) -> Any:
    return [_local(each) for each in value] if _is_list(value) else _local(value)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients as ``GradScaler`` does, and tell every rank whether any is not finite. Collective."""
    tensors, found, *rest = args
    groups = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            spec = _torch.spec_of(tensor)
            for group in reduction_groups_of(spec.mesh, spec.placements, "a gradient"):
                groups[group] = group
    func(_locals(tensors), _local(found), *map(_local, rest), **kwargs)
    for group in groups:
        there = _local(found).to(group.device)
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group.group)
        _local(found).copy_(there)


# ---- messages ------------------------------------------------------------------------------------


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return list(tensors_in([*args, *kwargs.values()]))


def _described(tensors: Sequence[torch.Tensor]) -> str:
    return "; ".join(
        f"{type(each).__name__} of shape {tuple(each.shape)}"
        + (f", {list(each.placements)} on {each.device_mesh}" if isinstance(each, DTensor) else "")
        for each in tensors
    )
