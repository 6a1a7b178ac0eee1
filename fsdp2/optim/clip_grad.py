"""Gradient clipping over any mix of parameters: `clip_grad_norm_` and its two halves.

The functions have the arguments of those in `torch.nn.utils`, but their parameters need not lie on one mesh. They work
on local tensors and send a few numbers. This file knows DTensors and process groups, but nothing of the engine except
which sharded parameter replaced which.

[Note: which collectives]
    The norm is a sum of p-th powers (a maximum, if p is infinite) over all elements. The *spread* of a parameter are
    the process groups over which its elements are sharded: those of the mesh dims in which its placement is not
    Replicate, except dims of size 1. Parameters of one spread share a *slot*, one number. Each process group in any
    spread has one all-reduce of the slots that it is part of; process groups come in the order in which a walk of the
    parameters meets them, mesh dims left to right. With ``a`` sharded over (dp, tp), ``b`` over dp, ``c`` replicated:

        slots               a: {dp, tp}    b: {dp}    c: {}
        all-reduce over dp  a              b                      2 numbers
        all-reduce over tp  a                                     1 number

    A *slice* (`optim/slices.py`) lies on a part of the ranks of its module; the other ranks have another slice in its
    place. Its spread are the dims of the module's mesh, and only the first of its replicas within its own mesh counts.
    So it shares the slot of parameters that are sharded over the module's mesh, and nothing depends on how many slices
    a rank has.

    The norm of order 0 is torch's: how many tensors have an element that is not zero. There a slot has one number for
    each of its parameters: 1 if this rank has such an element. Their maximum over the spread holds for the full
    parameter. (For slices it is taken over their own mesh, and then the numbers are added up over the spread.)

    All of this depends on the parameters, never on which of them have a gradient. Process groups of the same ranks
    count as one. Numbers are float64 (where the device has it): an all-reduce is free to choose the order of a sum, and
    this keeps the choice out of the float32 result.
"""

from __future__ import annotations

import math
import operator
import types
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.arguments import ANYTHING, at_least, checked, is_number
from fsdp2.core.mesh import device_of
from fsdp2.core.param import fsdp_param_of, replacement_of
from fsdp2.core.sharding import RankGroup, ReductionGroups, reduction_groups_of
from fsdp2.errors import FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.optim.delivered import delivered_of
from fsdp2.optim.model_parameters import parameters_below
from fsdp2.optim.slices import SLICES

TensorOrTensors = torch.Tensor | Iterable[torch.Tensor]

# ---- public --------------------------------------------------------------------------------------


@checked(max_norm=at_least(0), norm_type=ANYTHING, mesh=ANYTHING)
def clip_grad_norm_(
    parameters: TensorOrTensors | nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Scale the gradients of ``parameters`` in place so that their norm, as of one vector, is at most ``max_norm``.

    Parameters may be DTensors on different meshes (1D, HSDP, with tensor or expert parallelism, offloaded) beside plain
    tensors, of several dtypes. Plain tensors, and mesh dims in which a DTensor is replicated, count once: their
    gradients are expected to be the same on every rank. Where ``shard_placement_fn`` has put parameters on a part of
    their module's ranks, such as experts, other ranks have others: all of them count. Parameters without gradient count
    as zeros. Parameters from before `fully_shard`, and unsharded ones, stand for the sharded ones that replaced them.

    Collective: all ranks that hold shards of ``parameters`` must call this with the same parameters in the same order,
    also where some or all gradients are None. There is one all-reduce of a few numbers for each process group over
    which something is sharded; replicated dims communicate nothing. See [Note: which collectives].

    Args:
        parameters: an iterable of tensors, or a single one. Or a module: all of its parameters, found faster than by
            ``parameters()`` if it is a root.
        max_norm: the largest norm that the scaled gradients may have.
        norm_type: a number > 0, inf for the largest absolute value, 0 for how many gradients are not all zeros.
        error_if_nonfinite: raise if the norm is NaN or infinite, on every rank alike. Waits for the device.
        foreach: False for one operation per tensor; else one for all tensors of a device and dtype.
        mesh: further ranks, with other parameters (pipeline stages) or other values of the plain ones: the result is
            summed over every dim of this mesh as well, one number in each all-reduce. Dims over which a parameter is
            sharded already do not count it twice. All ranks of ``mesh`` must call, if need be with no parameters. For a
            process group without a mesh: ``DeviceMesh.from_group(group, device_type)``.

    Returns:
        The norm before clipping: (), a plain tensor on the device of the meshes, the same on every rank; float64 if a
        parameter is, else float32.

    Raises:
        FSDPValueError: a negative ``norm_type``; a gradient that is Partial, or sharded otherwise than its parameter.
        FSDPRuntimeError: the norm is not finite, with ``error_if_nonfinite``. Nothing is scaled then.
    """
    every: Sequence[torch.Tensor]
    if isinstance(parameters, nn.Module):
        every = parameters_below(parameters)
    else:
        every = _sharded_parameters(_as_list(parameters, warn_if_empty=True))
    slots = _Slots.of_parameters(every)
    total = _total_norm(slots, norm_type, error_if_nonfinite, foreach, mesh)
    _scale(slots.groups_to_scale(total), max_norm, total, foreach)
    # Gradients were scaled through one tensor that lies on all of them, which their own versions do not show.
    if slots.written_unseen:
        torch.autograd.graph.increment_version(slots.written_unseen)
    return total


@checked(norm_type=ANYTHING, mesh=ANYTHING)
def get_total_norm(
    tensors: TensorOrTensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """The norm of ``tensors``, as of one vector: the first half of `clip_grad_norm_`, for gradients themselves.

    Collective: the tensors decide which collectives are issued, so all ranks must pass those of the same parameters.

    Args:
        tensors: gradients, or anything else. Other arguments, the result and errors are those of `clip_grad_norm_`.
    """
    every = _as_list(tensors)
    if not all(map(torch.is_floating_point, every)) and not all(each.dtype.is_complex for each in every):
        found = ", ".join(dict.fromkeys(str(each.dtype) for each in every))
        raise FSDPTypeError(f"get_total_norm() takes floating-point tensors, got {found}.")
    return _total_norm(_Slots.of(every, every), norm_type, error_if_nonfinite, foreach, mesh)


def norm_on_own_meshes(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """`get_total_norm` as DTensor computes it: without slices that other ranks of the module have."""
    return _total_norm(_Slots.of(tensors, tensors, apart=True), norm_type, False, None, None)


@checked(max_norm=at_least(0))
def clip_grads_with_norm_(
    parameters: TensorOrTensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """Multiply the gradients of ``parameters`` by ``min(1, max_norm / (total_norm + 1e-6))``, in place.

    This is the second half of `clip_grad_norm_`, whose norm may differ from `get_total_norm`'s in the last bit: it adds
    up gradients on one buffer as one tensor. No communication, unless ``total_norm`` is a DTensor.

    Args:
        parameters: as for `clip_grad_norm_`.
        max_norm: the largest norm that the scaled gradients may have.
        total_norm: (), on any device; the same on every rank.
        foreach: False for one operation per tensor.
    """
    every = _sharded_parameters(_as_list(parameters))
    gradients = [_local_tensor(gradient) for each in every if (gradient := each.grad) is not None]
    _scale(_by_device_and_dtype(gradients), max_norm, total_norm, foreach)


# ---- what is passed ------------------------------------------------------------------------------


def _as_list(tensors: TensorOrTensors, *, warn_if_empty: bool = False) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    every = list(tensors)
    if warn_if_empty and not every and isinstance(tensors, types.GeneratorType):
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=4)
    return every


def _sharded_parameters(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """``parameters``, in which sharded ones replace their predecessors, which receive no gradients."""
    try:  # in a loop of C: all are sharded parameters
        if all(map(operator.is_, map(_own_sharded, parameters), parameters)):
            return parameters
    except AttributeError:
        pass
    return [_sharded_parameter(each) for each in parameters]


def _sharded_parameter(parameter: torch.Tensor) -> torch.Tensor:
    successor = replacement_of(parameter)
    return parameter if successor is None or fsdp_param_of(parameter) is not None else successor


def _name_of(tensor: torch.Tensor, index: int) -> str:
    owner = fsdp_param_of(tensor)
    return f"'{owner.path}'" if owner is not None else f"number {index} of those passed, of shape {tuple(tensor.shape)}"


# ---- gradients by spread -------------------------------------------------------------------------


_Groups = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
"""Local tensors by device and dtype, as a foreach call takes them."""

_device_number = torch.Tensor.get_device
_dtype = operator.attrgetter("dtype")
_own_sharded = operator.attrgetter("_fsdp_param.target.sharded")


def _by_device_and_dtype(tensors: list[torch.Tensor]) -> _Groups:
    if len(set(map(_dtype, tensors))) == len(set(map(_device_number, tensors))) == 1:  # the usual case, in loops of C
        return {(tensors[0].device, tensors[0].dtype): tensors}
    groups: _Groups = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


_Where = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its dims over which something is sharded."""


class _Alike(NamedTuple):
    """What is known of parameters that all have one spread: fields of `_Slots`, and of its only slot.

    Attributes:
        changes: `SLICES.changes` when none of them was a slice.
    """

    spread: ReductionGroups
    where: _Where | None
    changes: int
    device: torch.device
    dtype: torch.dtype

    def slots(self, slices: list[torch.Tensor], below: tuple[torch.Tensor, ...]) -> _Slots:
        """The slots for their gradients: ``below`` are the local tensors, and ``slices`` the tensors they lie on."""
        found = _Slots(())
        groups = _by_device_and_dtype(slices) if slices else {}
        found.slots = [_Slot(self.spread, self.where, of_each=[*below], gradients=slices, groups=groups)]
        found.device, found.dtype, found.written_unseen = self.device, self.dtype, below
        return found


@dataclass(slots=True)
class _Slot:
    """The local gradients of one spread: the sum of their powers is one number.

    Attributes:
        where: the spread as dims of a mesh; None for plain tensors.
        own: for slices, the process groups of their own mesh over which each is sharded; else None.
        counts: whether this rank's gradients count: only those of the first replica within the spread do.
        of_each: the local gradient of each parameter in turn; None without one.
        gradients: the gradients that have elements on this rank; those of one buffer as one tensor, zeros in between.
        groups: ``gradients`` by device and dtype.
    """

    spread: ReductionGroups
    where: _Where | None
    own: ReductionGroups | None = None
    counts: bool = True
    of_each: list[torch.Tensor | None] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    groups: _Groups = field(default_factory=dict)

    def inside(self, further: Sequence[RankGroup]) -> list[RankGroup]:
        """The groups among ``further`` that contain all ranks over which these gradients are sharded."""
        if self.where is None or not further:
            return []
        mesh, dims = self.where
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is part of it"
        # The ranks that share these gradients: all along the sharded dims, at this rank's place in the others.
        index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(coordinate))
        ranks = set(mesh.mesh[index].flatten().tolist())
        return [group for group in further if ranks.issuperset(group.ranks)]


class _Slots:
    """Gradients by their spread, in the order in which the parameters were passed.

    Attributes:
        slots: one slot for each spread.
        device: the device on which numbers are added up: that of the first mesh, else of the first parameter; None
            without parameters.
        dtype: the dtype of the norm. The parameters decide it, as all ranks have those.
        written_unseen: the local gradients, if tensors on all of them are scaled in their place: their versions stay.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.slots: list[_Slot] = []
        first = next((each for each in tensors if isinstance(each, DTensor)), None)
        self.device = device_of(first.device_mesh) if first is not None else tensors[0].device if tensors else None
        self.dtype = torch.float32
        self.written_unseen: tuple[torch.Tensor, ...] = ()
        # The slots by mesh and placements, which parameters share: to look at each of them would cost microseconds.
        self._known: dict[tuple[int, Sequence[Any], int] | None, _Slot] = {}
        self._roots = SLICES.meshes()

    @classmethod
    def of_parameters(cls, parameters: Sequence[torch.Tensor]) -> _Slots:
        """`of` their gradients. If all are as they were delivered, what was found in an earlier call is used again."""
        delivered = delivered_of(parameters)
        slices = None if delivered is None else delivered.slices()
        with _torch.plain_attributes():
            if delivered is not None and slices is not None:
                known: _Alike | None = delivered.known.get(_Alike)
                if known is not None and known.changes == SLICES.changes:
                    return known.slots(slices, delivered.locals())
            self = cls.of(parameters, [each.grad for each in parameters], slices)
        # Worth remembering only if all gradients were delivered, and have one spread.
        if delivered is not None and self.written_unseen and self.device is not None:
            slot = self.slots[0]
            delivered.known[_Alike] = _Alike(slot.spread, slot.where, SLICES.changes, self.device, self.dtype)
        return self

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        slices: list[torch.Tensor] | None = None,
        *,
        apart: bool = False,
    ) -> _Slots:
        """Sort the local tensors of ``gradients`` (None for a missing one) by the spread of ``tensors``.

        Args:
            tensors: parameters, or gradients.
            gradients: the gradients of ``tensors``.
            slices: the tensors that the gradients lie on, if all are as they were delivered.
            apart: treat slices like any other parameter, as if no other rank of the module had others.

        Raises:
            FSDPValueError: a gradient is sharded otherwise than its tensor (`reduction_groups_of`), or is Partial.
        """
        self = cls(tensors)
        if apart:
            self._roots = {}
        if not self._take_alike(tensors, gradients, slices):
            self._widen_for(tensors)
            for index, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
                slot = self._slot_of(tensor, tensor, index)
                local = None
                if gradient is not None:
                    self._check_spread(tensor, gradient, slot, index)
                    local = _local_tensor(gradient)
                    if local.numel():
                        slot.gradients.append(local)
                slot.of_each.append(local)
        for each in self.slots:
            each.groups = _by_device_and_dtype(each.gradients)
        return self

    def _take_alike(
        self,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        slices: list[torch.Tensor] | None,
    ) -> bool:
        """Take all at once, in loops of C: the usual case, where all have one spread, and gradients with their specs.

        Returns:
            Whether it was that case; else nothing is taken.
        """
        if self._roots and not self._roots.keys().isdisjoint(map(id, tensors)):
            return False
        try:
            specs = list(map(_torch.spec_of, tensors))
            if not all(map(operator.is_, map(_torch.spec_of, gradients), specs)):  # type: ignore[arg-type]
                return False
        except AttributeError:  # None or a plain tensor has no spec
            return False
        # Specs are shared, so few parameters have to be looked at: one for each spec.
        examples = list(dict(zip(map(id, specs), range(len(specs)), strict=True)).values())
        slots = [self._slot_of(tensors[index], tensors[index], index) for index in examples]
        below = list(map(_torch.local_of, gradients))  # type: ignore[arg-type]
        # A local tensor of another class is a subclass, or the result of a collective that must be waited for.
        if len({id(slot) for slot in slots}) != 1 or set(map(type, below)) != {torch.Tensor}:
            self.slots, self._known = [], {}  # start over: slots come in the order of the parameters
            return False
        self._widen_for([tensors[index] for index in examples])
        slots[0].of_each = [*below]
        slots[0].gradients = list(filter(torch.Tensor.numel, below)) if slices is None else slices
        self.written_unseen = () if slices is None else tuple(below)
        return True

    def _widen_for(self, tensors: Sequence[torch.Tensor]) -> None:
        if not {torch.float64, torch.complex128}.isdisjoint(map(_dtype, tensors)):
            self.dtype = torch.float64

    def _check_spread(self, tensor: torch.Tensor, gradient: torch.Tensor, slot: _Slot, index: int) -> None:
        if not _share_spec(tensor, gradient) and self._slot_of(gradient, tensor, index) is not slot:
            raise FSDPValueError(
                f"the gradient of parameter {_name_of(tensor, index)} is spread over other ranks than the "
                f"parameter: {_describe(gradient)}, not {_describe(tensor)}. Give it the parameter's placements: "
                "parameter.grad = parameter.grad.redistribute(placements=parameter.placements)."
            )

    def groups(self) -> _Groups:
        """All gradients by device and dtype."""
        if len(self.slots) == 1:
            return self.slots[0].groups
        return _by_device_and_dtype([each for slot in self.slots for each in slot.gradients])

    def groups_to_scale(self, total: torch.Tensor) -> _Groups:
        """`groups`, but without what lies between gradients if the norm is NaN, which would turn it into NaN for good.

        Zeros lie between them, and finite factors leave these alone. On a CPU to look at ``total`` costs nothing.
        """
        is_seen = total.is_cpu and not _torch.is_fake(total)
        if not self.written_unseen or (is_seen and math.isfinite(_torch.on_host(total))):
            return self.groups()
        return _by_device_and_dtype(list(filter(torch.Tensor.numel, self.written_unseen)))

    def _slot_of(self, tensor: torch.Tensor, parameter: torch.Tensor, index: int) -> _Slot:
        spec = _torch.spec_of(tensor) if isinstance(tensor, DTensor) else None
        root = self._roots.get(id(parameter))
        # Plain tensors have no spec, and share one slot. Meshes are known by `id`, as the tensors hold them meanwhile.
        key = None if spec is None else (id(spec.mesh), spec.placements, id(root))
        slot = self._known.get(key)
        if slot is not None:
            return slot
        what = "parameter" if tensor is parameter else "the gradient of parameter"
        name = f"{what} {_name_of(parameter, index)}"
        own = () if spec is None else reduction_groups_of(spec.mesh, spec.placements, name)
        made = _Slot(own, None) if spec is None else _slot_on(spec.mesh, spec.placements, own, root)
        slot = next((each for each in self.slots if _are_one(each, made)), None)
        if slot is None:
            slot = made
            self.slots.append(slot)
        self._known[key] = slot
        return slot


def _slot_on(mesh: DeviceMesh, placements: Sequence[Any], own: ReductionGroups, root: DeviceMesh | None) -> _Slot:
    """An empty slot for a DTensor that is sharded over ``own``; ``root``: its module's mesh if it is a slice."""
    cut = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    if root is None:
        return _Slot(own, (mesh, cut))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "else there were no groups"
    # Replicas of a slice within its own mesh hold the same: only the one at coordinate 0 of each such dim counts.
    is_first = all(dim in cut or at == 0 for dim, at in enumerate(coordinate))
    dims = tuple(range(root.ndim))
    spread = tuple(RankGroup.of(root, dim) for dim in dims if root.size(dim) > 1)
    return _Slot(spread, (root, dims), own, is_first)


def _are_one(slot: _Slot, other: _Slot) -> bool:
    return (slot.spread, slot.own, slot.counts) == (other.spread, other.own, other.counts)


def _share_spec(tensor: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether both have the very same spec. If not, they may still have the same placements."""
    if isinstance(tensor, DTensor) and isinstance(gradient, DTensor):
        return _torch.spec_of(tensor) is _torch.spec_of(gradient)
    return tensor is gradient


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.placements} on {tensor.device_mesh}" if isinstance(tensor, DTensor) else "a plain tensor"


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return _torch.wait_for_tensor(_torch.plain_of(tensor))


# ---- norms ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Norm:
    """How the norm of some order is computed from parts.

    A *value* is a tensor (k,) that an all-reduce can combine. k is 1 for the sum of p-th powers. For the maximum it is
    2: (largest, 1 if there is a NaN), since a maximum over ranks may lose a NaN. For order 0 it is 1 for the number of
    tensors; while it is not known yet which of n tensors have an element that is not zero, it is n.
    """

    order: float

    @classmethod
    def of(cls, norm_type: Any) -> _Norm:
        try:
            order = float(norm_type) if is_number(norm_type) or isinstance(norm_type, str) else math.nan
        except ValueError:
            order = math.nan
        if math.isnan(order) or order < 0:
            raise FSDPValueError(f"norm_type must be a number >= 0 or inf, got {norm_type!r}.")
        return cls(order)

    @property
    def op(self) -> Any:
        """How an all-reduce combines values."""
        return dist.ReduceOp.MAX if math.isinf(self.order) else dist.ReduceOp.SUM

    def of_nothing(self, device: torch.device) -> torch.Tensor:
        """The value of no tensors."""
        return torch.zeros(2 if math.isinf(self.order) else 1, dtype=_widest_dtype(device), device=device)

    def value(self, norms: torch.Tensor) -> torch.Tensor:
        """The value (k,) of tensors whose norms are ``norms`` (n,)."""
        if math.isinf(self.order):
            largest = norms.amax()
            is_nan = largest.isnan()
            return torch.stack((torch.where(is_nan, 0.0, largest), is_nan.to(norms.dtype)))
        return norms.pow(self.order).sum().reshape(1)

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        """The value (k,) of everything in ``values`` (n, k)."""
        return values.amax(0) if math.isinf(self.order) else values.sum(0)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The norm () that a ``value`` (k,) stands for."""
        if math.isinf(self.order):
            return torch.where(value[1] > 0, math.nan, value[0])
        return value[0] if self.order == 0 else value[0].pow(1.0 / self.order)


def _widest_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


@torch.no_grad()
def _total_norm(
    slots: _Slots, norm_type: float, error_if_nonfinite: bool, foreach: bool | None, mesh: DeviceMesh | None
) -> torch.Tensor:
    """The norm () of all slots. Collective, see [Note: which collectives]; `mesh` is reduced over last, one number."""
    norm, further = _Norm.of(norm_type), _axes_of(mesh)
    device = slots.device or (torch.device("cpu") if mesh is None else device_of(mesh))
    every = slots.slots
    if norm.order == 0:
        # Whether a parameter counts must be known for all of its shards before parameters are counted.
        found = [_found_in_each(slot.of_each, device) for slot in every]
        found = _reduced(found, [slot.spread if slot.own is None else slot.own for slot in every], dist.ReduceOp.MAX)
        counted = [(slot, _counted_once(slot, value, further)) for slot, value in zip(every, found, strict=True)]
        values = [value for slot, value in counted if slot.own is None]
        values += _added_up([each for each in counted if each[0].own is not None], norm, further)
    else:
        here = [_local_value(slot.groups if slot.counts else {}, norm, foreach, device) for slot in every]
        values = _added_up(list(zip(every, here, strict=True)), norm, further)
    value = norm.combine(torch.stack(values)) if values else norm.of_nothing(device)
    # One number by now, whichever slots there are: other ranks of ``mesh`` may have other parameters.
    for group in further:
        value = _all_reduce(value, norm.op, group)
    total = norm.total(value).to(slots.dtype)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise FSDPRuntimeError(
            f"the total norm of order {norm.order} of the gradients is {total.item()}, so they cannot be clipped to a "
            "finite one. error_if_nonfinite=False scales them by it anyway."
        )
    return total


def _reduced(values: list[torch.Tensor], spreads: Sequence[Sequence[RankGroup]], op: Any) -> list[torch.Tensor]:
    """``values``, (k,) each, reduced over their ``spreads``: one all-reduce for each process group. Collective."""
    values = list(values)
    for group in dict.fromkeys(group for spread in spreads for group in spread):
        members = [index for index, spread in enumerate(spreads) if group in spread]
        there = [values[index] for index in members]
        reduced = _all_reduce(torch.cat(there), op, group).split([len(value) for value in there])
        for index, value in zip(members, reduced, strict=True):
            values[index] = value
    return values


def _found_in_each(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """(n,) on ``device``: 1 for each of ``tensors`` that has an element other than zero on this rank."""
    found = [torch.zeros((), device=device) if each is None else each.any().to(device) for each in tensors]
    return torch.stack([each.to(_widest_dtype(device)) for each in found])


def _counted_once(slot: _Slot, found: torch.Tensor, further: Sequence[RankGroup]) -> torch.Tensor:
    """How many of ``found`` (n,) count, (1,), on one of the ranks that know them, so that a sum counts them once.

    All ranks of the spread know ``found``, and ``further`` sums it. For slices the ranks of their own mesh know it, and
    the spread sums it.
    """
    counts = slot.counts and _is_first(slot.inside(further) if slot.own is None else slot.own)
    return found.sum().reshape(1) if counts else found.new_zeros(1)


def _is_first(groups: Sequence[RankGroup]) -> bool:
    return all(group.ranks[0] == dist.get_rank() for group in groups)


def _added_up(found: list[tuple[_Slot, torch.Tensor]], norm: _Norm, further: Sequence[RankGroup]) -> list[torch.Tensor]:
    """The values (k,) of slots, reduced over their spreads so that ``further`` adds up each of them once. Collective.

    Slots of one spread become one value. Slices come last, sorted by their spread: a rank may have other slices than
    the next, so the order in which it meets them must not matter.
    """
    ordered = sorted(found, key=lambda each: [] if each[0].own is None else [group.ranks for group in each[0].spread])
    together: dict[ReductionGroups, tuple[_Slot, list[torch.Tensor]]] = {}
    for slot, value in ordered:
        together.setdefault(slot.spread, (slot, []))[1].append(value)
    values, spreads, kept = [], [], []
    for slot, of_slots in together.values():
        inside = slot.inside(further)
        # Where the spread has all of `inside`, `further` reduces over these later, and the spread leaves them out. Else
        # the spread reduces first, and one rank passes the result on to `further`, as all of them have it.
        is_left = all(group in slot.spread for group in inside)
        spreads.append([group for group in slot.spread if not is_left or group not in inside])
        kept.append(is_left or _is_first(inside))
        values.append(of_slots[0] if len(of_slots) == 1 else norm.combine(torch.stack(of_slots)))
    reduced = _reduced(values, spreads, norm.op)
    return [value if keeps else torch.zeros_like(value) for value, keeps in zip(reduced, kept, strict=True)]


def _axes_of(mesh: DeviceMesh | None) -> list[RankGroup]:
    if mesh is None:
        return []
    if not isinstance(mesh, DeviceMesh):
        raise FSDPTypeError(
            f"mesh must be a DeviceMesh, got {type(mesh).__name__}; of a process group: "
            "DeviceMesh.from_group(group, device_type)."
        )
    if mesh.get_coordinate() is None:
        raise FSDPValueError(f"mesh must be one that this rank is part of; rank {dist.get_rank()} is not on {mesh}.")
    return [RankGroup.of(mesh, axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def _local_value(gradients: _Groups, norm: _Norm, foreach: bool | None, device: torch.device) -> torch.Tensor:
    """The value (k,) of this rank's gradients, on ``device``. No communication."""
    if not gradients:
        return norm.of_nothing(device)
    dtype = _widest_dtype(device)
    norms = [torch.stack(_norms_of(group, norm.order, foreach)).to(device, dtype) for group in gradients.values()]
    return norm.value(norms[0] if len(norms) == 1 else torch.cat(norms))


def _norms_of(tensors: list[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    """The norm () of each of ``tensors``, in float32 or wider. They have one device and dtype, and none is empty."""
    # In half precision a sum of squares would overflow, or lose small terms.
    dtype = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    if foreach is False:
        return [torch.linalg.vector_norm(each, order, dtype=dtype) for each in tensors]
    return _torch.foreach_norm(tensors, order, dtype)


def _all_reduce(value: torch.Tensor, op: Any, group: RankGroup) -> torch.Tensor:
    """``value`` reduced over the ranks of ``group``, which all must call; in place if it is on the group's device."""
    # Gradients of an offloaded model are on the host, while its process groups communicate from the device.
    sent = value.to(group.device)
    dist.all_reduce(sent, op=op, group=group.group)
    return sent.to(value.device)


# ---- scaling -------------------------------------------------------------------------------------


@torch.no_grad()
def _scale(gradients: _Groups, max_norm: float, total_norm: torch.Tensor, foreach: bool | None) -> None:
    """Multiply local ``gradients`` in place. The host does not wait for the device to see whether this is needed."""
    total = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for (device, _), group in gradients.items():
        there = factor.to(device)
        if foreach is False:
            for gradient in group:
                gradient.mul_(there)
        else:
            _torch.foreach_mul(group, there)
