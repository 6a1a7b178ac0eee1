"""Parameters whose tensors gather themselves: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

A tensor subclass (float8, quantized) may send something else than its values: its first method returns what this rank
sends, its second makes the unsharded tensor of what arrived. The contract is torch's, and looked up on the local tensor
of the sharded parameter at lazy initialization::

    def fsdp_pre_all_gather(self, mesh) -> (inputs, metadata)
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None) -> (unsharded, inner_tensors) | None

Every rank must send inputs of the same sizes: those of short ranks are padded by the extension. The first time
``out`` is None, and the inner tensors are what the unsharded tensor needs to stay alive; their memory is freed and
given back around each use. From then on ``out`` is that unsharded tensor, to be filled in place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2 import _torch
from fsdp2.buffers import Resizable, on_the_wire, storage_alias
from fsdp2.common import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError
from fsdp2.custom_comm import AllGather
from fsdp2.gather import Member
from fsdp2.layout import PACKED_ALIGNMENT_BYTES, Cut, align, contiguous_stride
from fsdp2.mesh import DataParallelMesh
from fsdp2.param import FSDPParam, is_subclass

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` gathers itself, or lies in no flat buffer, as tensor subclasses do."""
    return hasattr(tensor, _PRE) or hasattr(tensor, _POST) or is_subclass(tensor)


def check_extension(tensor: torch.Tensor, cut: Cut, world_size: int, where: str) -> None:
    """Refuse an extension that cannot work.

    Raises:
        FSDPTypeError: one of the two methods is missing, or takes other arguments.
        FSDPNotImplementedError: the parameter is owned, has no dims, is not contiguous, or is cut unevenly behind
            dim 0.
    """
    if cut.owner is not None:
        raise FSDPNotImplementedError(
            f"{where} gathers itself (a tensor subclass, or one with {_PRE}), and one rank is to own it, which is not "
            "supported; shard its dim 0."
        )
    is_uneven = bool(cut.dim) and cut.size % world_size != 0
    if cut.dim is None or cut.order or is_uneven:
        what = "has no dims" if cut.dim is None else "is not contiguous"
        what = f"has {cut.size} entries in dim {cut.dim}, uneven over {world_size} ranks" if is_uneven else what
        raise FSDPNotImplementedError(
            f"{where} gathers itself (a tensor subclass, or one with {_PRE}) and {what}, which is not supported; shard "
            "its dim 0, contiguous, or pass it in ignored_params."
        )
    if not (hasattr(tensor, _PRE) or hasattr(tensor, _POST)):
        return  # a subclass that says nothing: its values are gathered, as copying it to a plain tensor gives them
    if not (hasattr(tensor, _PRE) and hasattr(tensor, _POST)):
        missing = _POST if hasattr(tensor, _PRE) else _PRE
        raise FSDPTypeError(f"{where} has only one of {_PRE} and {_POST}: define {missing} too.")
    signature = inspect.signature(getattr(tensor, _PRE))
    if len(signature.parameters) not in (1, 5):
        raise FSDPTypeError(
            f"{where}: {_PRE}{signature} must take (mesh) or (mesh, outer_size, outer_stride, module, mp_policy)."
        )


def _cut_dim(param: FSDPParam) -> int:
    dim = param.sharding.cut.dim
    assert dim is not None, "an extension without dims is refused"
    return dim


@dataclass(slots=True)
class _Extended:
    """One parameter that gathers itself, and what is known of its gathers.

    Attributes:
        sizes: of the inputs that every rank sends; None before the first gather.
        dtypes: of these inputs.
        outputs: flat, (world_size * n,) for each input; freed between uses.
        inner: what the extension says its unsharded tensor lies on.
        metadata: what it passes from before to after the gather.
        is_made: the unsharded tensor exists.
        releases: the extension needs the outputs no more once it has made the unsharded tensor.
    """

    param: FSDPParam
    sizes: list[torch.Size] | None = None
    dtypes: list[torch.dtype] = field(default_factory=list)
    outputs: list[Resizable] = field(default_factory=list)
    aliases: list[torch.Tensor] = field(default_factory=list)
    inner: list[Resizable] = field(default_factory=list)
    metadata: Any = None
    is_made: bool = False
    releases: bool = False


def _take_as_it_is(
    outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """In the place of ``fsdp_post_all_gather``: what has arrived is the parameter, and lies where it lay before."""
    return (outputs[0], ()) if out is None else None


class ExtensionGather:
    """The all-gather of those parameters of a group that gather themselves: one more packed member.

    Attributes:
        params: these parameters.
        custom: takes the place of the all-gather, and allocates its buffers.
        keeps_memory: whether `free` leaves the unsharded tensors their memory.
    """

    def __init__(self, params: Sequence[FSDPParam], mesh: DataParallelMesh, custom: AllGather | None) -> None:
        self.params = tuple(params)
        self.keeps_memory = False
        self._mesh = mesh
        self.custom = custom
        self._extended = [_Extended(param) for param in params]
        self._staging: torch.Tensor | None = None
        self._send: torch.Tensor | None = None
        self._pieces: list[tuple[_Extended, int, int, int]] = []
        for each in self._extended:
            where = f"parameter '{each.param.path}'"
            check_extension(each.param.local, each.param.sharding.cut, mesh.world_size, where)
            release = getattr(each.param.local, _RELEASES, None)
            each.releases = bool(release()) if release is not None else False

    def begin(self) -> list[Member]:
        """Ask the extensions what to send, and lay it out in one buffer. Collective the first time.

        Raises:
            FSDPRuntimeError: on every rank, if the ranks would send different sizes.
        """
        world_size, rank = self._mesh.world_size, self._mesh.rank
        inputs = [self._inputs_of(each) for each in self._extended]
        self._refuse_other_sizes(inputs)
        self._pieces, offset = [], 0
        for each, tensors in zip(self._extended, inputs, strict=True):
            for index, tensor in enumerate(tensors):
                offset = align(offset, PACKED_ALIGNMENT_BYTES)
                self._pieces.append((each, index, offset, tensor.numel() * tensor.element_size()))
                offset += tensor.numel() * tensor.element_size()
        offset = align(offset, PACKED_ALIGNMENT_BYTES)
        flat = [tensor for tensors in inputs for tensor in tensors]
        dtypes = {tensor.dtype for tensor in flat}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        numel = offset // dtype.itemsize
        if self.custom is not None:
            staging = self.custom.allocate((world_size * numel,), dtype=dtype, device=self._mesh.device)
            send = staging[rank * numel : (rank + 1) * numel]
        else:
            staging = torch.empty(world_size * numel, dtype=dtype, device=self._mesh.device)
            send = torch.empty(numel, dtype=dtype, device=self._mesh.device)
        send_bytes = send.view(torch.uint8)
        for tensor, (_, _, start, nbytes) in zip(flat, self._pieces, strict=True):
            if nbytes:
                send_bytes[start : start + nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        self._staging, self._send = staging, send
        return [(on_the_wire(staging), on_the_wire(send))] if numel else []

    def _inputs_of(self, each: _Extended) -> list[torch.Tensor]:
        param, mesh = each.param, self._mesh
        local: Any = param.local
        if not hasattr(local, _PRE):
            return [self._plain_values(param)]
        if local.device != mesh.device:
            local = local.to(mesh.device, non_blocking=True)
        before = getattr(local, _PRE, None) or getattr(param.local, _PRE)
        if len(inspect.signature(before).parameters) == 1:
            inputs, each.metadata = before(mesh.shard_mesh)
        else:
            size = torch.Size(param.shape)
            module = param.uses[0][0]
            inputs, each.metadata = before(mesh.shard_mesh, size, contiguous_stride(size), module, param.policy)
        return list(inputs)

    def _plain_values(self, param: FSDPParam) -> torch.Tensor:
        """What a subclass without extension sends: its values as a plain tensor, padded like the shard of rank 0."""
        cut, dim = param.sharding.cut, _cut_dim(param)
        shape = list(param.shape)
        shape[dim] = cut.rows(self._mesh.world_size)
        values = torch.zeros(shape, dtype=param.param_dtype, device=self._mesh.device)
        if param.local.numel():
            values.narrow(dim, 0, param.local.shape[dim]).copy_(param.local)
        return values

    def _refuse_other_sizes(self, inputs: list[list[torch.Tensor]]) -> None:
        sizes = [[tensor.size() for tensor in tensors] for tensors in inputs]
        known = [each.sizes for each in self._extended]
        if all(before is None for before in known):
            self._refuse_disagreement(inputs)
        for each, before, now in zip(self._extended, known, sizes, strict=True):
            if before is not None and before != now:
                raise FSDPRuntimeError(
                    f"{_PRE} of parameter '{each.param.path}' returned sizes {list(map(tuple, now))}, the first time "
                    f"{list(map(tuple, before))}; they must stay the same."
                )
            each.sizes = now
        for each, tensors in zip(self._extended, inputs, strict=True):
            each.dtypes = [tensor.dtype for tensor in tensors]

    def _refuse_disagreement(self, inputs: list[list[torch.Tensor]]) -> None:
        group = self._mesh.group
        if group is None or group.size() == 1:
            return
        for each, tensors in zip(self._extended, inputs, strict=True):
            mine = torch.tensor(
                [len(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors)],
                device=self._mesh.device,
            )
            everyone = mine.new_empty(2 * group.size())
            _torch.gather_unobserved(everyone, mine, group)
            of_ranks = everyone.view(-1, 2).tolist()
            if any(of_rank != of_ranks[0] for of_rank in of_ranks):
                raise FSDPRuntimeError(
                    f"{_PRE} of parameter '{each.param.path}' (shape {each.param.shape}) returned (tensors, bytes) "
                    f"{of_ranks} on the ranks; all must send the same: short ones pad their inputs to the shard of "
                    f"rank 0, {each.param.sharding.cut.rows(group.size())} rows."
                )

    def finish(self) -> None:
        """Give the extensions what has arrived, to make or fill their unsharded tensors."""
        assert self._staging is not None, "a gather is under way"
        staged = self._staging.view(torch.uint8).view(self._mesh.world_size, -1)
        for each in self._extended:
            self._allocate(each)
        for each, index, start, nbytes in self._pieces:
            if nbytes:
                alias, world_size = each.aliases[index], self._mesh.world_size
                assert each.sizes is not None, "inputs were asked for"
                outer = math.prod(each.sizes[index][: _cut_dim(each.param)])
                piece = staged[:, start : start + nbytes].view(alias.dtype)
                # In dim 0 rank order is the order of the output; else ranks alternate.
                alias.view(outer, world_size, -1).transpose(0, 1).copy_(piece.unflatten(1, (outer, -1)))
        self._staging = self._send = None
        for each in self._extended:
            self._make_unsharded(each)

    def _allocate(self, each: _Extended) -> None:
        if not each.outputs:
            assert each.sizes is not None, "inputs were asked for"
            for size, dtype in zip(each.sizes, each.dtypes, strict=True):
                numel = self._mesh.world_size * size.numel()
                output = torch.empty(numel, dtype=dtype, device=self._mesh.device)
                each.outputs.append(Resizable(output))
                # Through an alias, whose writes do not count as changes of what lies on the output.
                each.aliases.append(storage_alias(output, 0, (numel,), (1,)))
        for buffer in (*each.outputs, *each.inner):
            buffer.allocate()

    def _make_unsharded(self, each: _Extended) -> None:
        param, local = each.param, each.param.local
        assert each.sizes is not None, "inputs were asked for"
        dim, world_size = _cut_dim(param), self._mesh.world_size
        outputs = tuple(
            output.flat.view(*size[:dim], world_size * size[dim], *size[dim + 1 :])
            for output, size in zip(each.outputs, each.sizes, strict=True)
        )
        after: Any = getattr(local, _POST, _take_as_it_is)
        metadata, each.metadata = each.metadata, None
        if each.is_made:
            after(outputs, metadata, param.param_dtype, out=param.unsharded)
        else:
            unsharded, inner = after(outputs, metadata, param.param_dtype)
            lying = {output.storage.data_ptr() for output in each.outputs}
            each.inner = [Resizable(tensor) for tensor in inner if tensor.untyped_storage().data_ptr() not in lying]
            if tuple(unsharded.shape) != param.shape:  # padded
                unsharded = torch.as_strided(unsharded, param.shape, contiguous_stride(param.shape), 0)
            param.take_unsharded(unsharded)
            each.is_made = True
        if each.releases:
            for output in each.outputs:
                output.free()

    def storages(self) -> set[int]:
        """The identities of the storages that unsharded tensors lie on."""
        return {_torch.storage_of(buffer.flat) for each in self._extended for buffer in (*each.outputs, *each.inner)}

    def free(self) -> None:
        """Free the unsharded tensors' memory."""
        self._staging = self._send = None
        if self.keeps_memory:
            return
        for each in self._extended:
            for buffer in (*each.outputs, *each.inner):
                buffer.free()
