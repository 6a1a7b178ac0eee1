"""`RaggedDTensor`: the DTensor that has a `RaggedShard` or a `BlockShard`.

torch's operators do not know these placements, and never see them (`operators`). Full tensors, copies, pickles and
distributed checkpoints work as for any DTensor. This file knows nothing of modules and groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2 import _torch
from fsdp2.arguments import checked
from fsdp2.core.sharding import CLASSES, OF_ROWS, Partition, contiguous_stride
from fsdp2.errors import FSDPValueError
from fsdp2.plugs.parameters.whole_operators import chunk_of
from fsdp2.ragged import operators
from fsdp2.ragged.placement import BlockShard, Box, RaggedShard, RowsPlacement


def check_placements(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> int:
    """The mesh dim of ``placements`` that has a `RaggedShard` or `BlockShard`, for a tensor of ``shape``.

    Raises:
        FSDPValueError: the placements do not fit the mesh or the shape, or another mesh dim cuts dim 0 too.
    """
    if len(placements) != mesh.ndim:
        raise FSDPValueError(f"{len(placements)} placements, but {mesh} has {mesh.ndim} dims: {list(placements)}.")
    ragged = [axis for axis, each in enumerate(placements) if isinstance(each, RowsPlacement)]
    if len(ragged) != 1:
        raise FSDPValueError(
            f"one mesh dim must have a RaggedShard or a BlockShard, the others none: {list(placements)}."
        )
    placement = placements[ragged[0]]
    assert isinstance(placement, RowsPlacement), "found above"
    placement.rows_of_ranks(shape, mesh.size(ragged[0]))
    if isinstance(placement, BlockShard):
        refuse_beside_blocks(mesh, placements, shape, f"a tensor of shape {tuple(shape)}")
        return ragged[0]
    for axis, each in enumerate(placements):
        if each.is_partial() or (_torch.is_shard(each) and each.dim in (0, -len(shape))):  # type: ignore[attr-defined]
            raise FSDPValueError(
                f"{placement} cannot lie beside {each} (mesh dim {axis} of {mesh}): the rows of a rank would not "
                "follow each other in the whole. Other mesh dims may have Replicate() or Shard(i) with i > 0."
            )
    return ragged[0]


def refuse_beside_blocks(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], where: str) -> None:
    """Refuse placements in other mesh dims that do not go with a `BlockShard` of a tensor of ``shape``.

    Raises:
        FSDPValueError: one is neither Replicate() nor a Shard(0) that splits dim 0 evenly, as of experts.
    """
    left = shape[0]
    for axis, each in enumerate(placements):
        size = mesh.size(axis)
        if isinstance(each, BlockShard) or each.is_replicate() or size == 1:
            continue
        is_first = type(each) is Shard and each.dim in (0, -len(shape))
        if not is_first or left % size:
            raise FSDPValueError(
                f"{where} has placement {each} in mesh dim {axis} of {mesh}, which cannot lie beside a BlockShard: "
                "other mesh dims may have Replicate(), or a Shard(0) that deals out dim 0 evenly, as of experts. Use "
                "Shard(i) in the place of BlockShard."
            )
        left //= size


class RaggedDTensor(_torch.OwnOperators):
    """A DTensor one of whose placements is a `RaggedShard` or a `BlockShard`.

    Made by `fully_shard`, by ``RaggedDTensor.from_local`` or ``RaggedDTensor.from_whole``. Operators that act on each
    element by itself run on the local tensors: arithmetic, copies, and optimizers such as Adam(W), SGD and Adagrad
    (single-tensor, foreach and fused), with numbers and with tensors of the same mesh and placements. Sums and norms
    give a partial DTensor. Random numbers are drawn for the full tensor, of which each rank keeps its rows. Other
    operators raise `FSDPNotImplementedError`; ``full_tensor()``, ``redistribute(placements=...)`` (all ranks of the
    mesh must call these two) and ``to_local()`` lead out. On torch 2.11 and 2.12 autograd differentiates only these.
    """

    @classmethod
    def _over(cls, local: torch.Tensor, spec: Any, requires_grad: bool = False) -> RaggedDTensor:
        return cls(local, spec, requires_grad=requires_grad)  # type: ignore[call-arg,arg-type]

    @classmethod
    def run_operator(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on local tensors, or refuse it."""
        return operators.run(func, args, kwargs, local_part)

    @staticmethod
    @checked()
    def from_local(  # type: ignore[override]
        local_tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], *, shape: Sequence[int]
    ) -> RaggedDTensor:
        """A DTensor over ``local_tensor``, this rank's part of a tensor of ``shape``. Local; not differentiable.

        Raises:
            FSDPValueError: placements, shape and local tensor do not fit each other.
        """
        check_placements(device_mesh, placements, shape)
        spec = _torch.make_spec(device_mesh, placements, shape, contiguous_stride(shape), local_tensor.dtype)
        expected = tuple(local_part(torch.empty(tuple(shape), device="meta"), spec).shape)
        if tuple(local_tensor.shape) != expected:
            raise FSDPValueError(
                f"a local tensor of shape {tuple(local_tensor.shape)} is not this rank's part of a tensor of shape "
                f"{tuple(shape)} with placements {list(placements)}, which has shape {expected}."
            )
        return RaggedDTensor._over(local_tensor.detach(), spec)

    @staticmethod
    @checked()
    def from_whole(whole: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> RaggedDTensor:
        """A DTensor over a copy of this rank's part of ``whole``, which every rank has. Local; not differentiable.

        Raises:
            FSDPValueError: the placements do not fit ``whole``.
        """
        check_placements(device_mesh, placements, whole.shape)
        shape, stride = whole.shape, contiguous_stride(whole.shape)
        spec = _torch.make_spec(device_mesh, placements, shape, stride, whole.dtype)
        local = local_part(whole.detach(), spec).clone(memory_format=torch.contiguous_format)
        return RaggedDTensor._over(local, spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows. Differentiable; the gradient has the tensor's own placements, not ``grad_placements``."""
        if not torch.is_grad_enabled() or not self.requires_grad:
            return _torch.local_of(self)
        return _ToLocal.apply(self)  # type: ignore[no-any-return,no-untyped-call]

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """This tensor with other ``placements``: torch's, a `RaggedShard` or a `BlockShard`. Differentiable.

        Collective: all ranks of the mesh must call it. In between the tensor is replicated over its ragged mesh dim.

        Raises:
            FSDPValueError: another mesh is given, or the placements do not fit.
        """
        mesh = _torch.spec_of(self).mesh
        if placements is None or (device_mesh is not None and device_mesh != mesh):
            raise FSDPValueError(
                f"redistribute needs placements, and no other mesh than the tensor's: {device_mesh}, {placements}."
            )
        wanted = tuple(placements)
        if wanted == self.placements:
            return self
        gathered: DTensor = _Gather.apply(self)  # type: ignore[no-untyped-call]
        if not any(isinstance(each, RowsPlacement) for each in wanted):
            return gathered.redistribute(placements=wanted, **options)
        check_placements(mesh, wanted, self.shape)
        between = _replicated(wanted)
        return _Deal.apply(gathered.redistribute(placements=between, **options), wanted)  # type: ignore[no-any-return,no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"RaggedDTensor(local_tensor={_torch.local_of(self)}, device_mesh={self.device_mesh}, "
            f"placements={self.placements})"
        )

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> RaggedDTensor:
        plain = DTensor.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        return RaggedDTensor._over(_torch.local_of(plain), _torch.spec_of(plain), plain.requires_grad)

    # -- for torch.distributed.checkpoint, which is imported late, as that takes half a second

    def __create_chunk_list__(self) -> list[Any]:
        """Where this rank's rows lie in the full tensor. Without rows nothing: the offset would be another rank's."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if not _torch.local_of(self).numel() and self.numel():
            return []
        return [
            ChunkStorageMetadata(
                offsets=torch.Size([start for start, _ in box]), sizes=torch.Size([stop - start for start, stop in box])
            )
            for box in boxes_of(_torch.spec_of(self))
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(_torch.local_of(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        boxes = boxes_of(_torch.spec_of(self))
        offsets = None if index.offset is None else tuple(index.offset)
        parts = zip(boxes, views_of(_torch.local_of(self), boxes), strict=True)
        return next(view for box, view in parts if offsets in (None, tuple(start for start, _ in box)))


def _placement_of(partition: Partition, world_size: int) -> Placement:
    if partition.leading > 1:
        return BlockShard((partition.row_numel,))
    return RaggedShard(partition.rows_of_ranks(world_size))


CLASSES[RaggedShard] = CLASSES[BlockShard] = RaggedDTensor
OF_ROWS.append(_placement_of)
torch.serialization.add_safe_globals([RaggedShard, BlockShard, RaggedDTensor])


# ---- parts and wholes ----------------------------------------------------------------------------


class _Dealt(NamedTuple):
    """How a spec splits rows.

    Attributes:
        axis: the mesh dim over which they are split.
        placement: the placement in that mesh dim.
        shape: the shape that the other mesh dims leave on this rank, whose rows are split.
        rows: how many rows each rank of the mesh dim has.
    """

    axis: int
    placement: RowsPlacement
    shape: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, spec: Any) -> _Dealt:
        axis, placement = next(pair for pair in enumerate(spec.placements) if isinstance(pair[1], RowsPlacement))
        shape = tuple([stop - start for start, stop in _left_by_others(spec)])
        return cls(axis, placement, shape, placement.rows_of_ranks(shape, spec.mesh.size(axis)))

    def run(self, rank: int) -> tuple[int, int]:
        """The rows [start, stop) of ``rank``."""
        start = sum(self.rows[:rank])
        return start, start + self.rows[rank]


def _left_by_others(spec: Any) -> Box:
    """The part of the full tensor that all mesh dims but the ragged one leave on this rank."""
    box = [(0, size) for size in spec.shape]
    for axis, each in enumerate(spec.placements):
        if isinstance(each, Shard):
            first, last = box[each.dim]
            rows = -(-(last - first) // spec.mesh.size(axis))
            start = min(first + rows * spec.mesh.get_local_rank(axis), last)
            box[each.dim] = (start, min(start + rows, last))
    return tuple(box)


def boxes_of(spec: Any) -> list[Box]:
    """The entries of the full tensor that this rank has: boxes that follow each other in its local tensor, or none."""
    dealt, outer = _Dealt.of(spec), _left_by_others(spec)
    boxes = dealt.placement.boxes(dealt.shape, *dealt.run(spec.mesh.get_local_rank(dealt.axis)))
    return [
        tuple([(first + start, first + stop) for (start, stop), (first, _) in zip(box, outer, strict=True)])
        for box in boxes
    ]


def views_of(local: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Views of ``local``, one for each of ``boxes``, whose entries follow each other there."""
    sizes = [tuple(stop - start for start, stop in box) for box in boxes]
    if len(boxes) == 1 and sizes[0] == tuple(local.shape):
        return [local]
    pieces = local.view(-1).split([math.prod(each) for each in sizes])
    return [piece.view(each) for piece, each in zip(pieces, sizes, strict=True)]


def _replicated(placements: Sequence[Placement]) -> list[Placement]:
    return [Replicate() if isinstance(each, RowsPlacement) else each for each in placements]


def local_part(whole: torch.Tensor, spec: Any) -> torch.Tensor:
    """This rank's part of ``whole`` under ``spec``: a view, if ``whole`` is contiguous."""
    dealt = _Dealt.of(spec)
    start, stop = dealt.run(spec.mesh.get_local_rank(dealt.axis))
    return dealt.placement.in_rows(chunk_of(whole, spec)).narrow(0, start, stop - start)


def _gathered(tensor: DTensor) -> DTensor:
    """``tensor``, replicated over its ragged mesh dim. Collective over that mesh dim.

    One all-gather, in which every rank sends as much as the largest part; one broadcast, if one rank has everything.
    """
    spec, local = _torch.spec_of(tensor), _torch.local_of(tensor)
    dealt = _Dealt.of(spec)
    having = [rank for rank, rows in enumerate(dealt.rows) if rows]
    if len(having) == 1:
        local = _broadcast_rows(local, having[0], spec.mesh, dealt.axis, dealt.rows[having[0]])
    elif len(dealt.rows) > 1:
        local = _gather_rows(local, dealt.rows, spec.mesh, dealt.axis)
    if isinstance(dealt.placement, BlockShard):
        local = local.view(dealt.shape)
    placements = _replicated(spec.placements)
    meta = spec.tensor_meta
    return _torch.make_dtensor(local, _torch.make_spec(spec.mesh, placements, meta.shape, meta.stride, meta.dtype))


def _gather_rows(local: torch.Tensor, rows: Sequence[int], mesh: DeviceMesh, axis: int) -> torch.Tensor:
    device = local.device if local.device.type == mesh.device_type else _mesh_device(mesh)
    room = max(rows)
    sent = torch.zeros((room, *local.shape[1:]), dtype=local.dtype, device=device)
    sent[: local.shape[0]].copy_(local)
    received = torch.empty((len(rows) * room, *local.shape[1:]), dtype=local.dtype, device=device)
    # Bytes travel: backends do not know all dtypes.
    if sent.numel() and not local.is_meta:
        wire = received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8)
        _torch.all_gather_single(*wire, group=mesh.get_group(axis), async_op=False)
    parts = received.split(room) if room else ()
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=False)] or [sent]).to(local.device)


def _broadcast_rows(local: torch.Tensor, owner: int, mesh: DeviceMesh, axis: int, rows: int) -> torch.Tensor:
    """The rows that ``owner`` has, on all ranks: a broadcast sends no padding."""
    device = local.device if local.device.type == mesh.device_type else _mesh_device(mesh)
    whole = torch.empty((rows, *local.shape[1:]), dtype=local.dtype, device=device)
    if mesh.get_local_rank(axis) == owner:
        whole.copy_(local)
    if mesh.size(axis) > 1 and whole.numel() and not local.is_meta:
        dist.broadcast(whole.view(-1).view(torch.uint8), group=mesh.get_group(axis), group_src=owner)
    return whole.to(local.device)


def _mesh_device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# ---- autograd ------------------------------------------------------------------------------------


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:  # type: ignore[override]
        """The local tensor."""
        ctx.spec = _torch.spec_of(tensor)
        local = _torch.local_of(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:  # type: ignore[override]
        """The gradient, with the placements of the tensor."""
        return RaggedDTensor._over(gradient.contiguous(), _torch.spec_with_dtype(ctx.spec, gradient.dtype))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> DTensor:  # type: ignore[override]
        """The tensor replicated over its ragged mesh dim."""
        ctx.spec = _torch.spec_of(tensor)
        return _gathered(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> DTensor:  # type: ignore[override]
        """This rank's rows of the gradient."""
        return _dealt(gradient.redistribute(placements=_replicated(ctx.spec.placements)), ctx.spec.placements)


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:  # type: ignore[override]
        """This rank's rows of a tensor that is replicated in the mesh dim where ``placements`` are ragged."""
        return _dealt(tensor, placements)

    @staticmethod
    def backward(ctx: Any, gradient: RaggedDTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        """The gradient, replicated over the ragged mesh dim."""
        return _gathered(gradient), None


def _dealt(tensor: DTensor, placements: Sequence[Placement]) -> RaggedDTensor:
    meta = _torch.spec_of(tensor).tensor_meta
    spec = _torch.make_spec(tensor.device_mesh, placements, meta.shape, contiguous_stride(meta.shape), meta.dtype)
    dealt = _Dealt.of(spec)
    start, stop = dealt.run(spec.mesh.get_local_rank(dealt.axis))
    local = dealt.placement.in_rows(_torch.local_of(tensor)).narrow(0, start, stop - start)
    return RaggedDTensor._over(local.clone(memory_format=torch.contiguous_format), spec)
