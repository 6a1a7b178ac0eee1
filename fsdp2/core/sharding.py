"""Where a parameter's shards lie: which dim is cut, over which mesh, and the DTensor placements that say so.

It is pure: meshes and placements go in, and a `Sharding` comes out. Parameters may be plain tensors, or DTensors of
tensor or expert parallelism, whose placements are kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2 import _torch
from fsdp2.arguments import ANYTHING, checked_class
from fsdp2.core.mesh import DataParallelMesh, device_of
from fsdp2.errors import FSDPTypeError, FSDPValueError

# `Partition`: how one parameter is split over the ranks, and where its rows lie. A new way of splitting dim 0 is
# written here, and gathers, reductions and graphs follow. For other dims see docs/explanation/extending.md.


def ceil_div(numerator: int, denominator: int) -> int:
    """ceil(numerator / denominator) for non-negative integers."""
    return -(-numerator // denominator)


def row_range(size: int, rows: int, rank: int) -> tuple[int, int]:
    """The rows [start, stop) of ``rank`` when ``size`` rows are split over ranks, ``rows`` for each."""
    start = min(rows * rank, size)
    return start, min(start + rows, size)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dims of a tensor from the outermost in memory to the innermost; () if it is contiguous, or not dense."""
    if tuple(stride) == contiguous_stride(shape):
        return ()
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))
    step = 1
    for dim in reversed(order):  # dims of size 1 have any stride
        if shape[dim] != 1 and stride[dim] != step:
            return ()
        step *= shape[dim]
    # Only dims of more than one entry tell an order from the contiguous one.
    dims = [dim for dim in order if shape[dim] != 1]
    return () if dims == sorted(dims) or step == 0 else order


class PartitionKey(NamedTuple):
    """The fields that tell ways of splitting apart; `Partition` describes them."""

    dim: int | None
    block_rows: int = 1
    owner: int | None = None
    leading: int = 1


@dataclass(frozen=True, slots=True)
class Partition:
    """How a parameter lies in memory, and which of its dims is split over the ranks.

    Attributes:
        shape: the shape of the parameter.
        dim: the dim that is cut; None: every rank keeps the whole parameter, as one without dims.
        order: its dims as they follow each other in memory, outermost first; () if contiguous.
        block_rows: rows of ``dim`` are split in blocks of this many (the last may be shorter), so that each block lies
            on one rank.
        owner: the rank that has all rows; None: they are split evenly.
        leading: how many leading dims count as one, whose entries are the rows. It is more than one only for a
            contiguous parameter that is cut in dim 0; a rank's part then has two dims, (rows, row_numel).
        size: the number of rows that are split: entries of ``dim``, or of the leading dims together.
        outer: how many pieces of memory a run of rows lies in: the sizes before ``dim``, multiplied.
        row_numel: elements of a row in one of these pieces: the sizes behind ``dim``, multiplied.
        numel: elements of the parameter.
        memory_dim: the position of ``dim`` in memory order.
        arrives_in_order: whether the ranks' parts, one after the other, are the parameter with padding at its end.
    """

    shape: tuple[int, ...]
    dim: int | None = 0
    order: tuple[int, ...] = ()
    block_rows: int = 1
    owner: int | None = None
    leading: int = 1
    size: int = field(init=False, repr=False, compare=False)
    outer: int = field(init=False, repr=False, compare=False)
    row_numel: int = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    memory_dim: int = field(init=False, repr=False, compare=False)
    arrives_in_order: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the attributes that follow from the others."""
        shape, dim = self.shape, self.dim
        # The sizes in memory order are split by `dim`: those before it make `outer`, those behind it `row_numel`.
        in_memory = tuple(shape[each] for each in self.order) if self.order else shape
        where = 0 if dim is None else self.order.index(dim) if self.order else dim
        behind = in_memory if dim is None else in_memory[where + self.leading :]
        outer = math.prod(in_memory[:where])
        known = {
            "size": 1 if dim is None else math.prod(shape[dim : dim + self.leading]),
            "outer": outer,
            "arrives_in_order": dim is not None and outer == 1,
            "row_numel": math.prod(behind),
            "numel": math.prod(shape),
            "memory_dim": where,
        }
        for name, value in known.items():
            object.__setattr__(self, name, value)

    @property
    def partition_key(self) -> PartitionKey:
        """The fields that tell it apart from other ways of splitting."""
        return PartitionKey(self.dim, self.block_rows, self.owner, self.leading)

    def stride(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of a tensor of ``shape``, dense and in this order."""
        if not self.order:
            return contiguous_stride(shape)
        dense = contiguous_stride([shape[dim] for dim in self.order])
        return tuple(dense[self.order.index(dim)] for dim in range(len(shape)))

    def rows(self, world_size: int) -> int:
        """How many rows each of ``world_size`` ranks keeps room for; if one rank owns all, these."""
        if self.dim is None:
            return 1
        if self.owner is not None:
            return self.size
        # Ranks get equal numbers of whole blocks, rounded up, so that the last ranks may have fewer or none.
        blocks = -(-self.size // self.block_rows)  # `ceil_div`, at no call
        return min(-(-blocks // world_size) * self.block_rows, self.size)

    def is_chunked(self, world_size: int) -> bool:
        """Whether the rows are split as ``torch.chunk`` does. (If dims are merged, these are the rows of `in_rows`.)"""
        if self.owner is not None:
            return world_size == 1
        rows, chunk = self.rows(world_size), ceil_div(self.size, world_size)
        # Both splits agree if they give a rank the same number of rows, or if both give the first rank all of them.
        return self.dim is None or rows == chunk or (rows >= self.size and chunk >= self.size)

    def rows_of_ranks(self, world_size: int) -> tuple[int, ...]:
        """How many rows each rank has."""
        rows = self.rows(world_size)
        parts = [self.part(rows, rank) for rank in range(world_size)]
        return tuple(stop - start for start, stop in parts)

    def part(self, rows: int, rank: int) -> tuple[int, int]:
        """The rows [start, stop) of ``rank``, ``rows`` each; fewer or none on the last ranks."""
        if self.owner is not None:
            return (0, self.size if rank == self.owner else 0)
        return (0, 1) if self.dim is None else row_range(self.size, rows, rank)

    def over_fewer(self, world_size: int, fewer: int) -> Partition:
        """This partition over ``fewer`` ranks, a divisor of ``world_size``: one of them owns what several ranks did."""
        return self if self.owner is None else replace(self, owner=self.owner * fewer // world_size)

    def text(self, rows: int) -> str:
        """A description of the part of a rank that keeps room for ``rows``. Ranks compare it: no two ways share one."""
        memory = f" (in memory {list(self.order)})" if self.order else ""
        if self.owner is not None:
            return f"the whole on rank {self.owner}{memory}"
        if self.dim is None:
            return f"the whole{memory} per rank"
        blocks = f" in blocks of {self.block_rows}" if self.block_rows > 1 else ""
        blocks = f" of the first {self.leading} dims" if self.leading > 1 else blocks
        return f"{rows} rows{f' of dim {self.dim}' if self.dim else ''}{blocks}{memory} per rank"

    def local_shape(self, rows: int, rank: int) -> tuple[int, ...]:
        """The shape of what ``rank`` keeps."""
        if self.dim is None:
            return self.shape
        start, stop = self.part(rows, rank)
        if self.leading > 1:
            return stop - start, self.row_numel
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])


def local_shard(whole: torch.Tensor, partition: Partition, rows: int, rank: int) -> torch.Tensor:
    """The part of ``whole`` that ``rank`` holds if ranks have room for ``rows``; all of it if nothing is cut."""
    if partition.dim is None:
        return whole
    start, stop = partition.part(rows, rank)
    return in_rows(whole, partition).narrow(partition.dim, start, stop - start)


def in_rows(whole: torch.Tensor, partition: Partition) -> torch.Tensor:
    """``whole`` with its rows in one dim: (rows, elements of a row) of merged dims, a view if it is contiguous."""
    return whole.reshape(partition.size, partition.row_numel) if partition.leading > 1 else whole


def in_memory_order(tensor: torch.Tensor, partition: Partition) -> torch.Tensor:
    """``tensor``, which has the parameter's dims, with these permuted to memory order."""
    return tensor.permute(partition.order) if partition.order else tensor


def scatter_rows(whole: torch.Tensor, partition: Partition, rows: int, world_size: int) -> torch.Tensor:
    """``whole``, in memory order, as (world_size, ...) of the elements of each rank, which has room for ``rows``.

    Padded with zeros. Writes into nothing, so that it can be part of a graph.
    """
    if partition.dim is None:
        return whole.reshape(1, -1).expand(world_size, -1)
    size, outer, row_numel = partition.size, partition.outer, partition.row_numel
    width = rows * row_numel
    if rows * world_size == size:  # no padding
        return whole.reshape(outer, world_size, width).transpose(0, 1)
    if outer == 1:  # a rank's rows are one piece of memory, so padding is at the end only
        flat = whole.reshape(-1)
        return torch.cat([flat, flat.new_zeros(world_size * width - flat.numel())]).view(world_size, -1)
    # The first `full` ranks have all `rows` of theirs, the next has the rows that are left, the others have none.
    full = size // rows
    whole = whole.reshape(outer, size * row_numel)
    pieces = [whole[:, : full * width].reshape(outer, full, width).transpose(0, 1).reshape(-1)]
    pieces.append(whole[:, full * width :].reshape(-1))
    lacking = world_size * outer * width - whole.numel()
    return torch.cat([*pieces, whole.new_zeros(lacking)]).view(world_size, -1)


def place_rows(of_ranks: torch.Tensor, partition: Partition, rows: int) -> torch.Tensor:
    """The reverse of `scatter_rows`: the parameter, from (world_size, n) of all ranks. It may be a view of them."""
    if partition.dim is None:
        return in_shape(of_ranks[0], partition)
    if partition.arrives_in_order:
        return in_shape(of_ranks.reshape(-1)[: partition.numel], partition)
    full, rest = divmod(partition.size, rows)
    outer, width = partition.outer, rows * partition.row_numel
    whole = of_ranks[:full].reshape(full, outer, width).transpose(0, 1).reshape(outer, full * width)
    if rest:  # one rank has fewer rows
        width = rest * partition.row_numel
        whole = torch.cat([whole, of_ranks[full, : outer * width].reshape(outer, width)], 1)
    return in_shape(whole.reshape(-1), partition)


def rows_in_place(
    of_ranks: torch.Tensor, flat: torch.Tensor, partition: Partition, rows: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`place_rows` as copies to be made: parts of (world_size, n), each with a view of ``flat`` to copy it to.

    The parameter lies on ``flat``, which has room for padding at the end if the parameter `arrives_in_order`.
    """
    world_size = of_ranks.shape[0]
    if partition.dim is None:  # all ranks have sent the same
        return [(of_ranks[0], flat[: partition.numel])]
    outer, row_numel = partition.outer, partition.row_numel
    if partition.arrives_in_order:
        return [(of_ranks, flat[: world_size * rows * row_numel].view(world_size, -1))]
    full, rest = divmod(partition.size, rows)
    whole = flat[: partition.numel].view(outer, partition.size * row_numel)
    evenly = whole[:, : full * rows * row_numel].unflatten(1, (full, rows * row_numel)).transpose(0, 1)
    copies = [(of_ranks[:full].unflatten(1, (outer, rows * row_numel)), evenly)]
    if rest:  # one rank has fewer rows, so that its pieces are shorter
        last = of_ranks[full, : outer * rest * row_numel].view(outer, rest * row_numel)
        copies.append((last, whole[:, full * rows * row_numel :]))
    return copies


def in_shape(flat: torch.Tensor, partition: Partition) -> torch.Tensor:
    """``flat`` (numel,), in memory order, as a tensor of the parameter's shape."""
    if not partition.order:
        return flat.view(partition.shape)
    inner = [partition.shape[dim] for dim in partition.order]
    return flat.view(inner).permute([partition.order.index(dim) for dim in range(len(partition.shape))])


# DTensors over local tensors that lie in a buffer: their class, and how they are copied and pickled alone.


CLASSES: dict[type[Placement], type[DTensor]] = {}
"""The DTensor class of each placement that torch's own class does not know. It has a method ``_over(local, spec)``."""

OF_ROWS: list[Callable[[Partition, int], Placement]] = []
"""Makes the placement of rows that are split over a number of ranks in another way than torch's ``Shard`` does."""


def class_of(spec: Any) -> type[DTensor]:
    """The class of a tensor of ``spec`` (a DTensorSpec)."""
    return next((CLASSES[type(each)] for each in spec.placements if type(each) in CLASSES), DTensor)


def dtensor_over(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor over ``local`` of the class that ``spec`` asks for."""
    own = class_of(spec)
    return _torch.make_dtensor(local, spec) if own is DTensor else own._over(local, spec)  # type: ignore[attr-defined]


def dtensor_like(sharded: torch.Tensor, local: torch.Tensor) -> DTensor:
    """A DTensor over ``local`` that lies as ``sharded`` does; in the dtype of ``local``."""
    return dtensor_over(local, _torch.spec_with_dtype(_torch.spec_of(sharded), local.dtype))


def dtensor_at_offset(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor over a ``local`` that lies at an offset in shared memory. It is copied and pickled without the rest.

    The wrapper has that offset too: Dynamo (up to torch 2.14) cannot trace one that has another. Its own storage is
    null, and torch would try to copy it from there; so `copy.deepcopy` and `torch.save` are told to copy ``local``.
    """
    dtensor = dtensor_over(local, spec)
    dtensor.__deepcopy__ = _DeepCopy(local, spec)  # type: ignore[method-assign]
    dtensor.__reduce_ex__ = _Reduce(local, spec)  # type: ignore[method-assign,assignment]
    return dtensor


def parameter_at_offset(local: torch.Tensor, spec: Any, *, requires_grad: bool) -> nn.Parameter:
    """A parameter over such a ``local``. It is pickled without the rest; ``__deepcopy__`` is left to the caller."""
    parameter = nn.Parameter(dtensor_over(local, spec), requires_grad=requires_grad)
    # nn.Parameter detaches, and so wraps an alias of `local`: put `local` itself there.
    _torch.set_local(parameter, local)
    parameter.__reduce_ex__ = _ReduceParameter(local, spec)  # type: ignore[method-assign,assignment]
    return parameter


class _OnItsOwn:
    """Makes a DTensor on memory of its own from a local tensor. It is an attribute that does not travel with copies."""

    __slots__ = ("_local", "_spec")

    def __init__(self, local: torch.Tensor, spec: Any) -> None:
        self._local = local
        self._spec = spec

    def _made(self) -> DTensor:
        return dtensor_over(self._local.detach().clone(), self._spec)

    def __reduce__(self) -> Any:
        """Copy and pickle as None."""
        return type(None), ()


class _DeepCopy(_OnItsOwn):
    __slots__ = ()

    def __call__(self, memo: dict[int, Any]) -> DTensor:
        return self._made()


class _Reduce(_OnItsOwn):
    __slots__ = ()

    def __call__(self, protocol: Any) -> Any:
        return self._made().__reduce_ex__(protocol)


class _ReduceParameter(_OnItsOwn):
    __slots__ = ()

    def __call__(self, protocol: Any) -> Any:
        return nn.Parameter(self._made()).__reduce_ex__(protocol)


# `RankGroup`: the process groups over which the data of a DTensor is spread, as its placements say.
#
# This part knows nothing of what is reduced over them.


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group to reduce over; equal to any other of the same ranks.

    Attributes:
        ranks: the ranks in the default group, ascending.
        group: the process group.
        device: the device that tensors must be on.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup = field(compare=False)
    device: torch.device = field(compare=False)

    @classmethod
    def of(cls, mesh: DeviceMesh, axis: int) -> RankGroup:
        """The group of dim ``axis`` of ``mesh``."""
        group = mesh.get_group(axis)
        return cls(tuple(sorted(dist.get_process_group_ranks(group))), group, device_of(mesh))


ReductionGroups = tuple[RankGroup, ...]
"""The process groups over which the elements of a tensor are spread; () if every rank has all of them."""


def reduction_groups_of(mesh: DeviceMesh, placements: Sequence[Any], name: str) -> ReductionGroups:
    """The process groups over which the data of a DTensor is spread, mesh dims left to right.

    Any placement but Replicate says that the ranks of its mesh dim together hold the tensor once. A new kind of
    placement must mean that too, or norms would be wrong. (Padding, if there is any, must not lie in the local tensor.)

    Raises:
        FSDPValueError: a Partial placement, whose norm nobody knows before it is reduced; a mesh without this rank.
    """
    if mesh.get_coordinate() is None:
        raise FSDPValueError(
            f"{name} lies on {mesh}, which rank {dist.get_rank()} is not part of. Pass the parameters of this rank "
            "only, and to mesh= a mesh that joins it with the ranks of the others."
        )
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise FSDPValueError(
                f"{name} has placement {placement!r} in mesh dim {axis} of {mesh}: it is still to be summed over the "
                "ranks there, and the norm of the sum cannot be had from the parts. Reduce it first: parameter.grad = "
                "parameter.grad.redistribute(placements=parameter.placements)."
            )
    # (A mesh dim of one rank spreads nothing.)
    return tuple(
        RankGroup.of(mesh, axis)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


class RowPlacement(ABC):
    """A way of splitting rows that a ``shard_placement_fn`` may return instead of ``Shard(i)``. Each has its own file.

    Attributes:
        form: how users write it, for messages.
    """

    __slots__ = ()
    form: ClassVar[str]

    @property
    @abstractmethod
    def partition_key(self) -> PartitionKey:
        """The fields of the `Partition` that it stands for."""

    @abstractmethod
    def checked_for(self, parameter: nn.Parameter, fqn: str, mesh: DataParallelMesh) -> Wanted:
        """This placement, or the dim to cut if that comes to the same for ``parameter`` over ``mesh``.

        Raises:
            FSDPValueError: it does not fit.
        """

    @abstractmethod
    def refuse_cut(self, parameter: DTensor, where: str) -> None:
        """Raise FSDPValueError if tensor parallelism cuts ``parameter`` in a way that this cannot be combined with."""


@checked_class(placement=ANYTHING)  # checked where it is for a parameter, which the message names
@dataclass
class ShardPlacementResult:
    """What a ``shard_placement_fn`` may return: the dim to shard, and the mesh to shard over.

    Attributes:
        placement: ``Shard(i)``, ``RowBlocks(rows)``, ``BlockShard.split_leading(shape, k)`` or ``Owned(rank)``; None is
            ``Shard(0)``.
        mesh_info: a mesh info such as ``FSDPMeshInfo(mesh, shard_mesh_dim=0)``.
    """

    placement: Placement | RowPlacement | None
    mesh_info: Any


ShardPlacementFn = Callable[[nn.Parameter], Placement | RowPlacement | ShardPlacementResult | None]

OTHER_PLACEMENTS: list[Callable[[Any], RowPlacement | None]] = []
"""Functions that make a `RowPlacement` from other objects that a ``shard_placement_fn`` may return; else None."""

Wanted = int | RowPlacement | None
"""The dim to cut, or another way of splitting rows; None: every rank keeps the whole parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """How one parameter is sharded.

    Attributes:
        mesh: the ranks to shard and replicate over.
        partition: which dim of the local tensor is cut, and how it lies in memory.
        spec: the DTensorSpec of the sharded parameter, over all mesh dims; data-parallel dims that are on a mesh of
            their own come first.
        unsharded_spec: the spec of the DTensor that the module computes with; None if it is a plain tensor.
    """

    mesh: DataParallelMesh
    partition: Partition
    spec: Any
    unsharded_spec: Any


def requested_placement(
    shard_placement_fn: Any, parameter: nn.Parameter, fqn: str, default: DataParallelMesh
) -> tuple[Wanted, DataParallelMesh]:
    """Ask ``shard_placement_fn``, if there is one, how to split a parameter and over which mesh; by default dim 0.

    Returns:
        The answer, with a dim that is not negative, or None for a parameter without dims; and the mesh.

    Raises:
        FSDPValueError: the answer is none of Shard, `RowPlacement`, ShardPlacementResult and None, or names a dim or a
            rank that there is not.
    """
    answer = None if shard_placement_fn is None else shard_placement_fn(parameter)
    mesh, answer = default, _known(answer)
    if answer is not None and not isinstance(answer, (Shard, RowPlacement)):
        if not (hasattr(answer, "placement") and hasattr(answer, "mesh_info")):
            raise FSDPValueError(
                f"shard_placement_fn must return {', '.join(_placements())}, a ShardPlacementResult or None, got "
                f"{answer!r} for parameter '{fqn}'."
            )
        mesh, answer = _mesh_of(answer.mesh_info, fqn, default), _known(answer.placement)
    if answer is None:
        return (0 if parameter.dim() else None), mesh
    if isinstance(answer, RowPlacement):
        return answer.checked_for(parameter, fqn, mesh), mesh
    if not isinstance(answer, Shard):
        *first, last = _placements()
        raise FSDPValueError(
            f"the placement for parameter '{fqn}' must be {', '.join(first)} or {last}, got {answer!r}."
        )
    dim = answer.dim + parameter.dim() if answer.dim < 0 else answer.dim
    if not 0 <= dim < parameter.dim():
        raise FSDPValueError(
            f"parameter '{fqn}' has {parameter.dim()} dims, {answer} shards one that it does not have."
        )
    return dim, mesh


def _known(answer: Any) -> Any:
    """``answer``, or what one of `OTHER_PLACEMENTS` makes of it."""
    if answer is None or isinstance(answer, (Shard, RowPlacement)):
        return answer
    return next((made for make in OTHER_PLACEMENTS if (made := make(answer)) is not None), answer)


def _placements() -> list[str]:
    """The placements that may be asked for, for messages."""
    # A dataclass with slots makes its class twice, and the first one still counts as a subclass: list each form once.
    return ["Shard(i)", *dict.fromkeys(each.form for each in RowPlacement.__subclasses__())]


def _mesh_of(info: Any, fqn: str, default: DataParallelMesh) -> DataParallelMesh:
    if not (hasattr(info, "mesh") and hasattr(info, "shard_mesh_dim")):
        raise FSDPValueError(
            f"the mesh_info for parameter '{fqn}' must be an FSDPMeshInfo or HSDPMeshInfo, got {info!r}."
        )
    mesh = DataParallelMesh.from_info(info)
    if mesh.shard_group is None:
        raise FSDPValueError(f"the mesh_info for parameter '{fqn}' has no dim to shard over (shard_mesh_dim is None).")
    if mesh.device != default.device:
        raise FSDPValueError(
            f"the mesh for parameter '{fqn}' is on {mesh.device}, the module's is on {default.device}; they must agree."
        )
    return mesh


def partition_key_of(wanted: Wanted) -> PartitionKey:
    """The key of the `Partition` for an answer of `requested_placement`."""
    return wanted.partition_key if isinstance(wanted, RowPlacement) else PartitionKey(wanted)


def sharding_of(parameter: nn.Parameter, wanted: Wanted, mesh: DataParallelMesh, where: str) -> Sharding:
    """How ``parameter`` is sharded over ``mesh``. ``wanted``: as `requested_placement` says; ``where``: for errors.

    Raises:
        FSDPValueError: the parameter's own mesh or placements do not fit.
    """
    unsharded_spec = _torch.spec_of(parameter) if isinstance(parameter, DTensor) else None
    local = _torch.local_of(parameter) if unsharded_spec is not None else parameter
    key, order = partition_key_of(wanted), memory_order(local.shape, local.stride())
    partition = Partition(tuple(local.shape), key.dim, order, key.block_rows, key.owner, key.leading)
    if isinstance(wanted, RowPlacement) and isinstance(parameter, DTensor):
        wanted.refuse_cut(parameter, where)
    # Three cases: a DTensor on the whole mesh, replicated in the data-parallel dims (dp_mesh_dims); a plain tensor; and
    # a DTensor of tensor parallelism, in front of whose mesh dims the data-parallel ones are put.
    if mesh.spmd_mesh is not None:
        spmd_mesh, placements = _spmd_placements(unsharded_spec, partition, mesh, where)
    elif unsharded_spec is None:
        spmd_mesh, placements = (
            mesh.device_mesh,
            (*_replicated(mesh), *_cut(mesh, placement_of(partition, mesh.shard_size))),
        )
    else:
        spmd_mesh = _concatenated(mesh.device_mesh, unsharded_spec.mesh, where)
        placement = strided_placement(partition, mesh.shard_size, unsharded_spec.mesh, unsharded_spec.placements)
        placements = (*_replicated(mesh), *_cut(mesh, placement), *unsharded_spec.placements)
    stride = parameter.stride() if unsharded_spec is not None else partition.stride(partition.shape)
    spec = _torch.make_spec(spmd_mesh, placements, parameter.shape, stride, parameter.dtype)
    return Sharding(mesh, partition, spec, unsharded_spec)


def _replicated(mesh: DataParallelMesh) -> tuple[Placement, ...]:
    return () if mesh.replicate_group is None else (Replicate(),)


def _cut(mesh: DataParallelMesh, placement: Placement) -> tuple[Placement, ...]:
    return () if mesh.shard_group is None else (placement,)


def placement_of(partition: Partition, world_size: int) -> Placement:
    """The placement in a mesh dim of ``world_size`` ranks that alone cuts the parameter by ``partition``."""
    if partition.dim is None:
        return Replicate()
    if partition.leading == 1 and partition.is_chunked(world_size):
        return Shard(partition.dim)
    (of_rows,) = OF_ROWS
    return of_rows(partition, world_size)


def strided_placement(
    partition: Partition, world_size: int, mesh: DeviceMesh, placements: tuple[Placement, ...], first: int = 0
) -> Placement:
    """The placement of a data-parallel dim that cuts what the mesh dims from ``first`` on have cut already.

    The other dims have cut first, so this rank's rows are not contiguous in the full parameter. A strided shard says
    so, and into how many parts those dims have cut.
    """
    dim = partition.dim
    if dim is None or partition.leading > 1 or not partition.is_chunked(world_size):
        return placement_of(partition, world_size)
    # The number of parts into which other mesh dims have cut this dim already; with none it is an ordinary shard.
    factor = math.prod(mesh.size(index) for index in range(first, len(placements)) if cuts(placements[index], dim))
    return Shard(dim) if factor == 1 else _torch.strided_shard(dim, factor)


def cuts(placement: Placement, dim: int) -> bool:
    """Whether ``placement`` cuts ``dim``."""
    return _torch.is_shard(placement) and placement.dim == dim  # type: ignore[attr-defined]


def _concatenated(data_parallel: DeviceMesh, model_parallel: DeviceMesh, where: str) -> DeviceMesh:
    # One mesh describes the sharded DTensor, so both must be slices of it. torch's errors say little about the cause.
    try:
        return _torch.concatenate_meshes([data_parallel, model_parallel])
    except Exception as error:
        raise FSDPValueError(
            f"{where} is a DTensor on {model_parallel}, which cannot be combined with the data-parallel "
            f"{data_parallel}. For tensor parallelism both must be slices of one mesh, with different dims: mesh = "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp')); parallelize_module(module, mesh['tp'], ...); "
            "fully_shard(module, mesh=mesh['dp']). A parameter that something else has sharded for data parallelism "
            "already cannot be sharded again."
        ) from error


def _spmd_placements(
    unsharded_spec: Any, partition: Partition, mesh: DataParallelMesh, where: str
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements where the parameter is a DTensor on the whole mesh, replicated in data-parallel dims."""
    spmd_mesh, dims = mesh.spmd_mesh, mesh.dims
    assert spmd_mesh is not None and dims is not None and spmd_mesh.mesh_dim_names is not None, "named dims"
    if unsharded_spec is None:
        raise FSDPValueError(
            f"{where} is a plain tensor; with dp_mesh_dims every parameter must be a DTensor on the whole mesh, "
            "replicated in its data-parallel dims: torch.distributed.tensor.distribute_module(module, mesh) first."
        )
    if unsharded_spec.mesh != spmd_mesh:
        raise FSDPValueError(
            f"{where} is a DTensor on {unsharded_spec.mesh}; with dp_mesh_dims it must be on the mesh that is passed "
            f"to fully_shard, {spmd_mesh}."
        )
    names, placements = spmd_mesh.mesh_dim_names, list(unsharded_spec.placements)
    for name in dims.shard_names + dims.replicate_names:
        if not isinstance(placements[names.index(name)], Replicate):
            raise FSDPValueError(
                f"{where} has placement {placements[names.index(name)]} in the data-parallel mesh dim '{name}'; it "
                "must be Replicate() there."
            )
    # Each of several dims to shard over cuts what the dims to the right of it have cut already.
    for name in dims.shard_names:
        index = names.index(name)
        others = tuple(unsharded_spec.placements)
        placements[index] = strided_placement(partition, mesh.shard_size, spmd_mesh, others, first=index + 1)
    if len(dims.shard_names) < 2:
        return spmd_mesh, tuple(placements)
    return _with_flattened_shards(mesh, dims.shard_names, dims.replicate_names, placements)


def _with_flattened_shards(
    mesh: DataParallelMesh, shard_names: tuple[str, ...], replicate_names: tuple[str, ...], placements: list[Placement]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh in which the dims that are sharded over together are one, in the place of the first of them."""
    spmd_mesh = mesh.spmd_mesh
    assert spmd_mesh is not None and spmd_mesh.mesh_dim_names is not None, "named dims"
    parts: list[DeviceMesh] = []
    flattened: list[Placement] = []
    # The data-parallel dims, replicate and flattened shard, take the place of the first shard dim; others stay.
    for index, name in enumerate(spmd_mesh.mesh_dim_names):
        if name == shard_names[0]:
            parts.append(mesh.device_mesh)
            flattened += [*_replicated(mesh), placements[index]]
        elif name not in shard_names and name not in replicate_names:
            parts.append(spmd_mesh[name])
            flattened.append(placements[index])
    return (parts[0] if len(parts) == 1 else _torch.concatenate_meshes(parts)), tuple(flattened)


def check_policy_callable(shard_placement_fn: object) -> None:
    """Refuse a ``shard_placement_fn`` that is no function.

    Raises:
        FSDPTypeError: it cannot be called.
    """
    if shard_placement_fn is not None and (not callable(shard_placement_fn) or isinstance(shard_placement_fn, type)):
        raise FSDPTypeError(f"shard_placement_fn must be a function of a parameter, got {shard_placement_fn!r}.")
