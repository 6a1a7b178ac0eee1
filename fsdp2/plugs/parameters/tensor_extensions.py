"""Parameters whose tensors gather themselves: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

A tensor subclass (float8, quantized) may send something else than its values. Its first method returns what this rank
sends, its second makes the unsharded tensor from what has arrived. The contract is torch's. The methods are looked up
on the local tensor of the sharded parameter at lazy initialization::

    def fsdp_pre_all_gather(self, mesh) -> (inputs, metadata)
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None) -> (unsharded, inner_tensors) | None

An input is a tensor, which is joined with the other ranks' along the dim that the parameter is sharded in, or an
`AllGatherInput`, which has a dim and a size of its own. Every rank must send inputs of the same sizes, so an extension
pads those of ranks with fewer rows. The first time ``out`` is None, and ``inner_tensors`` are the tensors that the
unsharded tensor lies on; their memory is freed and given back around each use. Later ``out`` is that unsharded tensor,
to be filled in place.

Where a group reshards to fewer ranks after forward, each of them keeps a slice of what has arrived (a "rest") and the
metadata. Before backward the rests are gathered among these ranks, and the second method is called again. The first
is not called, so backward computes with the values of the forward, whatever was written in between.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2 import _torch
from fsdp2.core.buffers import Allocate, Resizable, on_the_wire, storage_alias
from fsdp2.core.gather import EXTENSION_GATHER, GATHERS_ITSELF, Transfer
from fsdp2.core.layout import byte_start, padded_row
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import FSDPParam, is_subclass
from fsdp2.core.places import label
from fsdp2.core.sharding import Partition, contiguous_stride
from fsdp2.core.transport import is_alone, of_backend
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, FSDPValueError

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@dataclass(frozen=True, eq=False)
class AllGatherInput:
    """An input that ``fsdp_pre_all_gather`` returns, if it is not joined along the dim that the parameter is cut in.

    torch's class of this name (after 2.15) is accepted in its place.

    Attributes:
        tensor: what this rank sends, of the same shape and dtype on every rank. Its shape may change from call to call
            (backward may need another layout than forward), its number of elements may not.
        dim: the dim of ``tensor`` along which the ranks' inputs are joined, in rank order; negative dims count from the
            end. A tensor of no dims counts as one of one element.
        output_size: the size in which ``fsdp_post_all_gather`` sees the joined tensor, of as many elements; None: as
            joined.

    Raises:
        FSDPTypeError: ``tensor`` is not a tensor.
        FSDPValueError: ``tensor`` does not have this ``dim``.
    """

    tensor: torch.Tensor
    dim: int = field(default=0, kw_only=True)
    output_size: Sequence[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            raise FSDPTypeError(f"AllGatherInput takes the tensor to send, got {type(self.tensor).__name__}.")
        dims = max(self.tensor.dim(), 1)
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or not -dims <= self.dim < dims:
            raise FSDPValueError(f"AllGatherInput of a tensor of {dims} dims cannot be joined along dim {self.dim!r}.")


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of an input, the same on every rank. All calls have as many elements, of the same dtype.

    Attributes:
        size: the size of what one rank sends.
        dtype: its dtype.
        dim: the dim along which the ranks' inputs are joined.
        output_size: the size in which the extension sees the joined tensor; None: as joined.
    """

    size: torch.Size
    dtype: torch.dtype
    dim: int
    output_size: torch.Size | None = None

    def __str__(self) -> str:
        whole = "" if self.output_size is None else f", joined as {tuple(self.output_size)}"
        return f"{tuple(self.size)} in {self.dtype}, along dim {self.dim}{whole}"

    def is_as_large_as(self, other: _Form) -> bool:
        """Whether an input of this form fits the memory that was made for ``other``."""
        return self.dtype == other.dtype and self.size.numel() == other.size.numel()

    def joined(self, world_size: int) -> torch.Size:
        """The size of the joined tensor."""
        if self.output_size is not None:
            return self.output_size
        size = self.size
        return torch.Size([*size[: self.dim], world_size * size[self.dim], *size[self.dim + 1 :]])


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` gathers itself, or cannot lie in a flat buffer: any tensor subclass."""
    return hasattr(tensor, _PRE) or hasattr(tensor, _POST) or is_subclass(tensor)


def check_extension(tensor: torch.Tensor, partition: Partition, world_size: int, where: str) -> None:
    """Refuse an extension that cannot work.

    Raises:
        FSDPTypeError: one of the two methods is missing, or takes other arguments.
        FSDPNotImplementedError: the parameter is owned, has merged dims or no dims, is not contiguous, or is cut
            unevenly in another dim than 0.
    """
    if partition.owner is not None or partition.leading > 1:
        how = (
            f"its first {partition.leading} dims are to be merged" if partition.leading > 1 else "one rank is to own it"
        )
        raise FSDPNotImplementedError(
            f"{where} gathers itself (a tensor subclass, or one with {_PRE}), and {how}, which is not supported; shard "
            "its dim 0."
        )
    is_uneven = bool(partition.dim) and partition.size % world_size != 0
    if partition.dim is None or partition.order or is_uneven:
        what = "has no dims" if partition.dim is None else "is not contiguous"
        what = (
            f"has {partition.size} entries in dim {partition.dim}, uneven over {world_size} ranks"
            if is_uneven
            else what
        )
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
    dim = param.sharding.partition.dim
    assert dim is not None, "an extension without dims is refused"
    return dim


@dataclass(slots=True)
class _Extended:
    """One parameter that gathers itself, and the state of its gathers.

    Attributes:
        forms: the forms of the inputs that every rank has sent last; None before the first gather.
        outputs: a flat (world_size * n,) buffer for each input, freed between uses.
        aliases: the same memory as tensors through which the engine writes.
        inner: the tensors that the unsharded tensor lies on, as the extension says.
        metadata: what the first method has returned for the second one.
        is_made: whether the unsharded tensor exists.
        rests: this rank's slice, among its neighbours, of each output; freed when the group is sharded again.
        rest_metadata: the metadata that belongs to the rests.
        releases: whether the extension can do without the outputs once it has made the unsharded tensor.
    """

    param: FSDPParam
    forms: list[_Form] | None = None
    outputs: list[Resizable] = field(default_factory=list)
    aliases: list[torch.Tensor] = field(default_factory=list)
    inner: list[Resizable] = field(default_factory=list)
    metadata: Any = None
    is_made: bool = False
    rests: list[Resizable] = field(default_factory=list)
    rest_metadata: Any = None
    releases: bool = False


class _Staged:
    """Tensors of any dtypes, copied into one buffer, which one member of a collective sends.

    Attributes:
        members: this member; empty if there is nothing to send.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], mesh: DataParallelMesh, allocate: Allocate | None) -> None:
        self._places, offset = [], 0
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            offset = byte_start(offset, nbytes, tensor.element_size())
            self._places.append((offset, nbytes))
            offset += nbytes
        # One dtype travels as it is, several as bytes.
        dtypes = {tensor.dtype for tensor in tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        world_size, numel = mesh.shard_size, padded_row(offset, 1) // dtype.itemsize
        if allocate is not None:
            staging = allocate((world_size * numel,), dtype=dtype, device=mesh.device)
            send = staging[mesh.shard_rank * numel : (mesh.shard_rank + 1) * numel]
        else:
            staging = torch.empty(world_size * numel, dtype=dtype, device=mesh.device)
            send = torch.empty(numel, dtype=dtype, device=mesh.device)
        send_bytes = send.view(torch.uint8)
        for tensor, (start, nbytes) in zip(tensors, self._places, strict=True):
            if nbytes:
                send_bytes[start : start + nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        self._arrived = staging.view(torch.uint8).view(world_size, -1)
        self.members: list[Transfer] = [(on_the_wire(staging), on_the_wire(send))] if numel else []

    def copy_out(self, outputs: Sequence[torch.Tensor], outers: Sequence[int]) -> None:
        """Copy what has arrived to the flat ``outputs``. Where a later dim is cut, ranks alternate ``outer`` times."""
        world_size = self._arrived.shape[0]
        for output, outer, (start, nbytes) in zip(outputs, outers, self._places, strict=True):
            if nbytes:
                piece = self._arrived[:, start : start + nbytes].view(output.dtype)
                output.view(outer, world_size, -1).transpose(0, 1).copy_(piece.unflatten(1, (outer, -1)))


def _without_padding(unsharded: torch.Tensor, param: FSDPParam) -> torch.Tensor:
    """The parameter without the padding in the dim that is cut."""
    if unsharded.is_contiguous():  # subclasses know this operator, as torch's own calls it
        return torch.as_strided(unsharded, param.shape, contiguous_stride(param.shape), 0)
    dim = _cut_dim(param)
    return unsharded.narrow(dim, 0, param.shape[dim])


def _listed(forms: Sequence[_Form]) -> str:
    return f"{len(forms)} inputs ({'; '.join(map(str, forms))})"


def _take_as_it_is(
    outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """In place of ``fsdp_post_all_gather``: what has arrived is the parameter, always in the same memory."""
    return (outputs[0], ()) if out is None else None


class ExtensionGather:
    """The all-gather of those parameters of a group that gather themselves: one more packed member of its collective.

    Attributes:
        params: these parameters.
        allocate: allocates the buffers of a custom all-gather; None: torch does.
        keeps_memory: whether `free` leaves the unsharded tensors their memory.
    """

    def __init__(self, params: Sequence[FSDPParam], mesh: DataParallelMesh, allocate: Allocate | None) -> None:
        self.params = tuple(params)
        self.keeps_memory = False
        self._mesh = mesh
        self.allocate = allocate
        self._extended = [_Extended(param) for param in params]
        self._staged: _Staged | None = None
        for each in self._extended:
            where = f"parameter '{each.param.path}'"
            check_extension(each.param.local, each.param.sharding.partition, mesh.shard_size, where)
            release = getattr(each.param.local, _RELEASES, None)
            each.releases = bool(release()) if release is not None else False

    def begin(self) -> list[Transfer]:
        """Ask the extensions for their inputs, and copy them into one buffer. Collective the first time.

        Raises:
            FSDPRuntimeError: raised on every rank, if the ranks would send different sizes.
        """
        inputs = [self._inputs_of(each) for each in self._extended]
        # Before anything is sent: a rank with other sizes would let the others wait, or receive garbage.
        self._refuse_other_forms(inputs)
        self._staged = _Staged([tensor for given in inputs for tensor, _ in given], self._mesh, self.allocate)
        return self._staged.members

    def begin_from_rests(self, neighbours: DataParallelMesh) -> list[Transfer]:
        """Give the outputs memory, and gather the rests right into it: no extension is asked, and nothing is copied."""
        for each in self._extended:
            for output in each.outputs:
                output.allocate()
        rests = [rest.flat for each in self._extended for rest in each.rests]
        if self.allocate is not None:  # a custom all-gather works in memory of its own, so there are copies
            self._staged = _Staged(rests, neighbours, self.allocate)
            return self._staged.members
        pairs = zip(self._aliases(), rests, strict=True)
        return [(on_the_wire(alias), on_the_wire(rest)) for alias, rest in pairs if rest.numel()]

    def _aliases(self) -> list[torch.Tensor]:
        return [alias for each in self._extended for alias in each.aliases]

    def _inputs_of(self, each: _Extended) -> list[tuple[torch.Tensor, _Form]]:
        param, mesh = each.param, self._mesh
        local: Any = param.local
        if not hasattr(local, _PRE):
            return [self._input(each, self._plain_values(param))]
        # An offloaded shard: the extension computes on the device.
        if local.device != mesh.device:
            local = local.to(mesh.device, non_blocking=True)
        # The copy may be of a class that does not have the method.
        before = getattr(local, _PRE, None) or getattr(param.local, _PRE)
        if len(inspect.signature(before).parameters) == 1:
            inputs, each.metadata = before(mesh.shard_mesh)
        else:
            size = torch.Size(param.shape)
            module = param.uses[0][0]
            inputs, each.metadata = before(mesh.shard_mesh, size, contiguous_stride(size), module, param.policy)
        return [self._input(each, given) for given in inputs]

    def _input(self, each: _Extended, given: Any) -> tuple[torch.Tensor, _Form]:
        """The tensor that is sent, and its form."""
        if not isinstance(given, torch.Tensor) and type(given).__name__ != AllGatherInput.__name__:
            raise FSDPTypeError(
                f"{_PRE} of parameter '{each.param.path}' must return tensors or AllGatherInput records, got "
                f"{type(given).__name__}."
            )
        if isinstance(given, torch.Tensor):
            return given, _Form(given.size(), given.dtype, _cut_dim(each.param))
        tensor = given.tensor.view(1) if given.tensor.dim() == 0 else given.tensor
        dim = given.dim % tensor.dim()
        whole = None if given.output_size is None else torch.Size(given.output_size)
        form = _Form(tensor.size(), tensor.dtype, dim, whole)
        numel = self._mesh.shard_size * tensor.numel()
        if whole is not None and whole.numel() != numel:
            raise FSDPValueError(
                f"{_PRE} of parameter '{each.param.path}' returned an AllGatherInput of {tuple(tensor.size())} with "
                f"output_size={tuple(whole)}, and {self._mesh.shard_size} ranks send {numel} elements together."
            )
        return tensor, form

    def _plain_values(self, param: FSDPParam) -> torch.Tensor:
        """What a subclass without extension sends: its values as a plain tensor, padded to the shard of rank 0."""
        partition, dim = param.sharding.partition, _cut_dim(param)
        shape = list(param.shape)
        shape[dim] = partition.rows(self._mesh.shard_size)
        values = torch.zeros(shape, dtype=param.param_dtype, device=self._mesh.device)
        if param.local.numel():
            values.narrow(dim, 0, param.local.shape[dim]).copy_(param.local)
        return values

    def _refuse_other_forms(self, inputs: list[list[tuple[torch.Tensor, _Form]]]) -> None:
        known = [each.forms for each in self._extended]
        # The first time all ranks compare; later each compares with its own first time, without communication.
        if all(before is None for before in known):
            self._refuse_disagreement([[tensor for tensor, _ in given] for given in inputs])
        for each, given, before in zip(self._extended, inputs, known, strict=True):
            now = [form for _, form in given]
            fits = before is None or (len(before) == len(now) and all(map(_Form.is_as_large_as, now, before)))
            if not fits:
                raise FSDPRuntimeError(
                    f"{_PRE} of parameter '{each.param.path}' returned {_listed(now)}, the first time "
                    f"{_listed(before or ())}; their number, dtypes and numbers of elements must stay the same."
                )
            each.forms = now

    def _refuse_disagreement(self, inputs: list[list[torch.Tensor]]) -> None:
        group = self._mesh.shard_group
        if group is None or is_alone(group):
            return
        transport = of_backend(group, self._mesh.device)
        for each, tensors in zip(self._extended, inputs, strict=True):
            transport.label = label(f"the comparison of what {_PRE} of '{each.param.path}' returns")
            with _torch.unobserved():
                mine = torch.tensor(
                    [len(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors)],
                    device=self._mesh.device,
                )
                everyone = mine.new_empty(2 * group.size())
                transport.compare(everyone, mine)
                of_ranks = everyone.view(-1, 2).tolist()
            if any(of_rank != of_ranks[0] for of_rank in of_ranks):
                raise FSDPRuntimeError(
                    f"{_PRE} of parameter '{each.param.path}' (shape {each.param.shape}) returned (tensors, bytes) "
                    f"{of_ranks} on the ranks; all must send the same: short ones pad their inputs to the shard of "
                    f"rank 0, {each.param.sharding.partition.rows(group.size())} rows."
                )

    def finish(self, neighbours: DataParallelMesh | None) -> None:
        """Let the extensions make or fill their unsharded tensors from what has arrived.

        With ``neighbours`` this rank first keeps its slice: extensions may write into the outputs, or release them.
        """
        assert self._staged is not None, "a gather is under way"
        for each in self._extended:
            self._allocate(each)
        outers = [math.prod(form.size[: form.dim]) for each in self._extended for form in each.forms or ()]
        self._staged.copy_out(self._aliases(), outers)
        self._staged = None
        for each in self._extended:
            if neighbours is not None:
                self._keep_rests(each, neighbours)
            # Metadata belongs to one gather, and may hold tensors.
            metadata, each.metadata = each.metadata, None
            self._make_unsharded(each, metadata)

    def finish_from_rests(self) -> None:
        """Let the extensions fill their unsharded tensors again, from the rests."""
        for each in self._extended:
            self._allocate(each)
        if self._staged is not None:
            aliases = self._aliases()
            self._staged.copy_out(aliases, [1] * len(aliases))
            self._staged = None
        for each in self._extended:
            self._make_unsharded(each, each.rest_metadata)

    def _keep_rests(self, each: _Extended, neighbours: DataParallelMesh) -> None:
        if not each.rests:
            each.rests = [Resizable(alias.new_empty(alias.numel() // neighbours.shard_size)) for alias in each.aliases]
        for rest, alias in zip(each.rests, each.aliases, strict=True):
            rest.allocate()
            rest.flat.copy_(alias.view(neighbours.shard_size, -1)[neighbours.shard_rank])
        each.rest_metadata = each.metadata

    def free_rests(self) -> None:
        """Free the slices that were kept for a gather among neighbours."""
        for each in self._extended:
            each.rest_metadata = None
            for rest in each.rests:
                rest.free()

    def _allocate(self, each: _Extended) -> None:
        if not each.outputs:
            assert each.forms is not None, "inputs were asked for"
            for form in each.forms:
                numel = self._mesh.shard_size * form.size.numel()
                output = torch.empty(numel, dtype=form.dtype, device=self._mesh.device)
                each.outputs.append(Resizable(output))
                # The engine writes through an alias, so that the output's version stays: these are no changes of it.
                each.aliases.append(storage_alias(output, 0, (numel,), (1,)))
        for buffer in (*each.outputs, *each.inner):
            buffer.allocate()

    def _make_unsharded(self, each: _Extended, metadata: Any) -> None:
        param, local = each.param, each.param.local
        assert each.forms is not None, "inputs were asked for"
        outputs = tuple(
            output.flat.view(form.joined(self._mesh.shard_size))
            for output, form in zip(each.outputs, each.forms, strict=True)
        )
        after: Any = getattr(local, _POST, _take_as_it_is)
        if each.is_made:
            after(outputs, metadata, param.param_dtype, out=param.unsharded)
        else:
            # What the extension makes the first time stays the unsharded parameter, and is filled again from then on.
            unsharded, inner = after(outputs, metadata, param.param_dtype)
            # An inner tensor on an output is freed with that output.
            lying = {output.storage.data_ptr() for output in each.outputs}
            each.inner = [Resizable(tensor) for tensor in inner if tensor.untyped_storage().data_ptr() not in lying]
            if tuple(unsharded.shape) != param.shape:
                unsharded = _without_padding(unsharded, param)
            param.take_unsharded(unsharded, is_extended=True)
            each.is_made = True
        if each.releases:
            for output in each.outputs:
                output.free()

    def outdate(self) -> None:
        """Let autograd refuse a backward that has saved earlier values, as others arrive in their place."""
        made = [each.param.unsharded for each in self._extended if each.param.unsharded is not None]
        torch.autograd.graph.increment_version(made)

    def storages(self) -> set[int]:
        """The identities of the storages that the unsharded tensors lie on."""
        return {_torch.storage_of(buffer.flat) for each in self._extended for buffer in (*each.outputs, *each.inner)}

    def free(self) -> None:
        """Free the memory of the unsharded tensors, unless ``keeps_memory``."""
        self._staged = None
        if self.keeps_memory:
            return
        for each in self._extended:
            for buffer in (*each.outputs, *each.inner):
                buffer.free()


GATHERS_ITSELF.fill(is_extended)
EXTENSION_GATHER.fill(ExtensionGather)
