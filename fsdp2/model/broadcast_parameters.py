"""`broadcast_parameters`: gives one rank's parameters and buffers to all; of sharded ones, one replica's to all.

It knows nothing of groups but which parameters they own, and over which ranks. Tensors travel as bytes, many in one
message. A tensor that is larger than a message is sent in pieces, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp2 import _torch
from fsdp2.arguments import Rule, checked
from fsdp2.core import agreement
from fsdp2.core.layout import PACKED_ALIGNMENT_BYTES, align
from fsdp2.core.mesh import make_process_group
from fsdp2.core.param import FSDPParam, fsdp_param_of, is_subclass, replacement_of
from fsdp2.core.state import state_of, states_below
from fsdp2.errors import FSDPError, FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError

_NAME = "broadcast_parameters()"

MESSAGE_BYTES = 32 * 2**20
"""How many bytes are sent at once, which is also the most memory that is taken for them."""


GROUP = Rule(
    "a process group that this rank is in, or None",
    lambda value: value is None or isinstance(value, dist.ProcessGroup),
    lambda value: value is dist.GroupMember.NON_GROUP_MEMBER,
)


@checked(process_group=GROUP)
def broadcast_parameters(
    module: nn.Module,
    src: int = 0,
    *,
    process_group: dist.ProcessGroup | None = None,
    buffers: bool = True,
    ignored_params: Iterable[torch.Tensor] = (),
) -> None:
    """Give all ranks the parameters and buffers that ``module`` has on the rank ``src``, in place.

    This is for models that ranks have initialized differently, or that one rank has loaded: before `fully_shard`, for
    the full model or unit by unit. Tied tensors travel once. It takes at most `MESSAGE_BYTES` of memory beside them.

    Where parameters are sharded already, every rank has its own rows, which together are one model. If ``module``
    itself is sharded and there are replicas (hybrid sharding, `replicate`), all replicas get the rows of the one that
    ``src`` is in; call it outside of forward and backward. Otherwise the rows of sharded submodules stay: they were
    broadcast before they were sharded.

    Collective: all ranks of ``process_group`` must call it, with modules of the same parameters and buffers: names,
    shapes, dtypes, and types of devices.

    Args:
        module: a module on CPU or a device, or partly on each. Where the process group has no backend for a device,
            tensors travel through one that it has.
        src: a rank of ``process_group``, counted in it: 0 is its first.
        process_group: by default all ranks. With tensor parallelism pass the ranks of the data-parallel mesh,
            ``mesh["dp"].get_group()``: each part of a parameter is then broadcast among the ranks that hold it.
        buffers: whether buffers are broadcast too, persistent or not.
        ignored_params: parameters, and buffers, to leave alone, such as experts that differ between ranks; as in
            `fully_shard`.

    Raises:
        FSDPTypeError: ``module``, ``src`` or ``process_group`` is of another type.
        FSDPValueError: there is no such rank, this one is not in the process group, or its ranks hold different parts
            of a DTensor.
        FSDPRuntimeError: there is no process group; a tensor is on meta, or not initialized; a forward or backward is
            running; the ranks differ. It is raised on all ranks.
        FSDPNotImplementedError: a tensor is a subclass, or sparse.

    Stream: the current one.
    """
    group = group_of(process_group, _NAME)
    size = dist.get_world_size(group)
    if not 0 <= src < size:
        raise FSDPValueError(f"{_NAME}: src={src} is no rank of the process group, which has {size}, counted from 0.")
    error: FSDPError | None = None
    named: dict[str, torch.Tensor] = {}
    replicated: list[FSDPParam] = []
    try:
        named = plain_tensors(module, frozenset(ignored_params), buffers=buffers)
        for name, tensor in named.items():
            _refuse(name, tensor, group)
        replicated = _replicated(module)
        for param in replicated:
            _refuse_sharded(param, group)
    except FSDPError as raised:
        error = raised
    # An error of this rank is raised in there, once the others know: they would wait for a broadcast otherwise.
    _agree(named, replicated, src, group, error)
    with torch.no_grad():
        for message in _messages([_torch.plain_of(tensor.detach()) for tensor in named.values()]):
            _send(message, src, group)
        if replicated:
            _send_shards(replicated, src, group)


def group_of(process_group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """``process_group``, or the group of all ranks, which is made from a launcher's environment if there is none.

    Raises:
        FSDPRuntimeError: there is neither a process group nor such an environment.
    """
    make_process_group(caller)
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None, "it is initialized"
    return group


def plain_tensors(module: nn.Module, ignored: frozenset[torch.Tensor], *, buffers: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each once, without those that `fully_shard` has sharded.

    (Inside of `full_parameters` the full ones count as plain parameters, and are among these.)
    """
    named: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter not in ignored and _owner_of(parameter) is None:
            named[name] = parameter
    if buffers:
        named |= {name: buffer for name, buffer in module.named_buffers() if buffer not in ignored}
    return named


def _replicated(module: nn.Module) -> list[FSDPParam]:
    """The sharded parameters that have replicas, after they came to rest; none if ``module`` itself is not sharded.

    (In that case the modules below were given the values of one rank before they were sharded.)
    """
    if state_of(module) is None:
        return []
    states = states_below(module)
    # Parameters that `full_parameters` has lent are among the plain ones, and it writes them back.
    lent = {group for state in states for group in state.unit if group.loan is not None}
    for state in states:
        if not lent.intersection(state.unit):
            state.quiesce()
    groups = dict.fromkeys(group for state in states for group in state.unit)
    replicated = [group for group in groups if group.mesh.replicate_group is not None and group not in lent]
    return [param for group in replicated for param in group.params]


def _refuse_sharded(param: FSDPParam, group: dist.ProcessGroup) -> None:
    _refuse(param.path, param.local, group)
    replicas = param.group.mesh.replicate_group
    assert replicas is not None, "there are replicas"
    missing = set(dist.get_process_group_ranks(replicas)).difference(dist.get_process_group_ranks(group))
    if missing:
        raise FSDPValueError(
            f"replicas of '{param.path}' are also on the ranks {sorted(missing)}, which are not in the process group "
            f"that {_NAME} was given: leave it out, or pass one of all ranks of the mesh that the parameter is on."
        )


def _send_shards(params: list[FSDPParam], src: int, group: dist.ProcessGroup) -> None:
    """Give all replicas the rows of the replica that the rank ``src`` is in. Collective."""
    meshes = {param.group.mesh.key: param.group.mesh for param in params}
    device = device_that_travels(torch.device("cpu"), group)
    places = [mesh.device_mesh.get_local_rank(0) for mesh in meshes.values()]
    where = torch.tensor(places, dtype=torch.int64, device=device)
    # `where`: the replica that `src` is in, in each mesh. Within a column of a mesh, ranks hold the same rows.
    dist.broadcast(where, group=group, group_src=src)
    for mesh, place in zip(meshes.values(), where.tolist(), strict=True):
        replicas = mesh.replicate_group
        assert replicas is not None, "there are replicas"
        column = mesh.device_mesh.mesh if mesh.device_mesh.ndim == 1 else mesh.device_mesh.mesh[:, mesh.shard_rank]
        source = dist.get_group_rank(replicas, int(column[place]))
        mine = [param for param in params if param.group.mesh.key == mesh.key]
        for message in _messages([param.local for param in mine]):
            _send(message, source, replicas)
        for param in mine:
            param.write_counter.writes += 1  # unsharded parameters that were gathered before are stale


def _owner_of(parameter: nn.Parameter) -> FSDPParam | None:
    successor = replacement_of(parameter)
    return fsdp_param_of(parameter if successor is None else successor)


def _refuse(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if is_lazy(tensor):
        raise FSDPRuntimeError(f"'{name}' is not initialized: run a forward of the lazy module before {_NAME}.")
    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            ranks = set(dist.get_process_group_ranks(tensor.device_mesh.get_group(dim)))
            if not placement.is_replicate() and len(ranks.intersection(dist.get_process_group_ranks(group))) > 1:
                raise FSDPValueError(
                    f"'{name}' is a DTensor with {placement} over mesh dim {dim}, so that ranks of the process group "
                    f"hold different parts of it: pass {_NAME} the group of ranks that hold the same part, "
                    "process_group=mesh['dp'].get_group()."
                )
    plain = _torch.plain_of(tensor)
    if plain.is_meta:
        raise FSDPRuntimeError(
            f"'{name}' is on the meta device, and has no memory to receive values: call "
            f"module.to_empty(device=...) before {_NAME}, also on ranks that only receive."
        )
    if is_subclass(plain) or plain.layout is not torch.strided:
        raise FSDPNotImplementedError(
            f"'{name}' is a {type(plain).__name__} of layout {plain.layout}; {_NAME} takes dense tensors of no "
            "subclass. Load the same state dict on every rank instead."
        )


def _agree(
    named: dict[str, torch.Tensor],
    replicated: list[FSDPParam],
    src: int,
    group: dist.ProcessGroup,
    error: FSDPError | None,
) -> None:
    """Compare with the other ranks what each would send, and raise on all if one cannot.

    Raises:
        FSDPError: ``error``; or, on the other ranks, that another one has it.
    """
    lines = [f"{_NAME} with src={src}" if error is None else f"refused: {error}"]
    if error is None:
        for name, tensor in named.items():
            plain = _torch.plain_of(tensor)
            lines.append(f"{name} {list(plain.shape)} {plain.dtype} on {plain.device.type}")
        for param in replicated:
            lines.append(f"{param.path} {list(param.shape)} {param.dtype} over {param.group.mesh}")
    difference = agreement.disagreement("\n".join(lines), group, device_that_travels(torch.device("cpu"), group))
    if error is not None:
        raise error
    if difference is not None:
        raise FSDPRuntimeError(f"the ranks differ in what {_NAME} is to send. Difference:\n{difference}")


def device_that_travels(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """``device``, if ``group`` has a backend for it, else a device that it has one for."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    others = [torch.device("cpu")]
    if accelerator is not None:
        others.append(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    for each in (device, *others):
        if _torch.backend_name(group, each):
            return each
    return device  # a process group written in Python does not say


class _Piece(NamedTuple):
    """A part of a message: a tensor, or some rows of a large one, with its first byte and its size in the message."""

    tensor: torch.Tensor
    start: int
    nbytes: int


def _messages(tensors: list[torch.Tensor]) -> Iterator[list[_Piece]]:
    """Pieces of ``tensors`` that are sent together: as many as fit, in order, all on one type of device.

    Only shapes, dtypes and types of devices decide, which are the same on all ranks.
    """
    limit = MESSAGE_BYTES
    message: list[_Piece] = []
    end, device = 0, None
    for tensor in tensors:
        for piece in _cut(tensor, limit):
            if message and (end + piece.nbytes > limit or piece.device.type != device):
                yield message
                message, end = [], 0
            message.append(_Piece(piece, end, piece.nbytes))
            end, device = align(end + piece.nbytes, PACKED_ALIGNMENT_BYTES), piece.device.type
    if message:
        yield message


def _cut(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """``tensor`` in runs of rows that fit into a message; a row that does not is cut the same way."""
    if not tensor.numel():
        return
    if tensor.nbytes <= limit or not tensor.dim():
        yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > limit:
        for row in tensor.unbind():
            yield from _cut(row, limit)
        return
    yield from tensor.split(limit // row_bytes)


def _send(message: list[_Piece], src: int, group: dist.ProcessGroup) -> None:
    """Broadcast one message: a single contiguous piece without a copy, others packed into one buffer."""
    first, device = message[0].tensor, device_that_travels(message[0].tensor.device, group)
    if len(message) == 1 and first.is_contiguous() and first.device.type == device.type:
        dist.broadcast(first.view(-1).view(torch.uint8), group=group, group_src=src)
        return
    packed = torch.empty(message[-1].start + message[-1].nbytes, dtype=torch.uint8, device=device)
    is_source = dist.get_rank(group) == src
    slots = [packed[start : start + n].view(piece.dtype).view(piece.shape) for piece, start, n in message]
    if is_source:
        for slot, piece in zip(slots, message, strict=True):
            slot.copy_(piece.tensor)
    dist.broadcast(packed, group=group, group_src=src)
    if not is_source:
        for slot, piece in zip(slots, message, strict=True):
            piece.tensor.copy_(slot)
