"""`GroupStorage`: all memory that the parameters of one group lie on, and the gathers that fill it.

Decides how parameters are laid out (by dtype, direct or packed, by an extension of their own); knows nothing of phases,
modules, streams or process groups' collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fsdp2 import _torch
from fsdp2.core.buffers import Allocate, DtypeBuffers, Offloading
from fsdp2.core.gather import Gather, Source, Transfer
from fsdp2.core.layout import BufferLayout
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import FSDPParam, is_subclass
from fsdp2.core.plan import BuffersPlan, ParamPlan
from fsdp2.core.ports import Port, missing
from fsdp2.errors import FSDPRuntimeError


class PostForwardShards(Protocol):
    """Where the parameters of a group rest between forward and backward, if on fewer ranks.

    Attributes:
        mesh: of these ranks.
        gather: from there to the unsharded buffers; None before `prepare`.
    """

    mesh: DataParallelMesh
    gather: Gather | None

    def prepare(self, buffers: Sequence[DtypeBuffers], device: torch.device, allocate: Allocate | None) -> None:
        """Lay out what rests, without memory. The unsharded buffers have memory."""

    def let_go(self) -> None:
        """Forget the buffers, until the next `prepare`. Nothing rests here."""

    def set_allocate(self, allocate: Allocate | None, device: torch.device) -> None:
        """Let the buffers of gathers come from ``allocate`` from now on. The unsharded buffers have memory."""

    def take(self) -> None:
        """Take from the unsharded buffers what is to rest here."""

    def changed(self) -> FSDPParam | None:
        """A parameter that was written while it rested here, if there is one."""

    def free(self) -> None:
        """Free what rests here, once it has been gathered."""


RESTS: Port[Callable[[DataParallelMesh], PostForwardShards]] = Port(missing("reshard_to_fewer"))
"""Makes it, of the mesh of the fewer ranks."""


class ExtensionGather(Protocol):
    """The gather of the tensors of a group that gather themselves.

    Attributes:
        keeps_memory: whether `free` leaves the unsharded tensors their memory.
        allocate: where the buffers come from, if these say it.
    """

    keeps_memory: bool
    allocate: Allocate | None

    def begin(self) -> list[Transfer]:
        """What they send, and where it arrives."""

    def begin_from_rests(self, neighbours: DataParallelMesh) -> list[Transfer]:
        """The same, of what rests on ``neighbours``."""

    def finish(self, neighbours: DataParallelMesh | None) -> None:
        """All has arrived: make the unsharded tensors, and keep what is to rest on ``neighbours``."""

    def finish_from_rests(self) -> None:
        """The same, of what came from there."""

    def free(self) -> None:
        """The unsharded tensors are used no more."""

    def free_rests(self) -> None:
        """What rested is used no more."""

    def storages(self) -> set[int]:
        """The identities of what the unsharded tensors lie on."""


GATHERS_ITSELF: Port[Callable[[torch.Tensor], bool]] = Port(is_subclass)
"""Whether a tensor gathers itself, or lies in no flat buffer."""

EXTENSION_GATHER: Port[Callable[[Sequence[FSDPParam], DataParallelMesh, Allocate | None], ExtensionGather]] = Port(
    missing("tensor_extensions")
)
"""Makes the gather of such parameters."""


class GroupStorage:
    """Where the parameters of one group lie.

    Attributes:
        offloading: where shards live.
        allocate: where the buffers of gathers come from, if these say it; everything then travels packed.
        post_forward: where the parameters rest between forward and backward, if on fewer ranks.
        caches_shards: whether what was copied to be sent is kept for later gathers.
    """

    def __init__(self, params: Sequence[FSDPParam], mesh: DataParallelMesh, offloading: Offloading) -> None:
        self.offloading = offloading
        self.allocate: Allocate | None = None
        self.post_forward: PostForwardShards | None = None
        self.caches_shards = any(param.policy.cache_shards for param in params)
        self._params = tuple(params)
        self._mesh = mesh
        self._keeps_memory = False
        self._buffers: tuple[DtypeBuffers, ...] = ()
        self._extended: tuple[FSDPParam, ...] = ()
        self._extensions: ExtensionGather | None = None
        self._gather: Gather | None = None
        self._unsharded_storages: frozenset[int] = frozenset()

    @property
    def has_extensions(self) -> bool:
        """Whether some tensors gather themselves."""
        return bool(self._extended)

    def lay_out(self) -> None:
        """Move the sharded parameters into one shard buffer per dtype (on meta there is nothing to move).

        Nothing keeps the shard buffers of before alive, although the next gather may be prepared much later.
        """
        self._buffers, self._gather = (), None
        if self.post_forward is not None:
            self.post_forward.let_go()
        self._extended = self._find_extended()
        if any(param.local.is_meta for param in self._params):
            return
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[FSDPParam]] = {}
        for param in self._params:
            if param not in self._extended:
                by_dtype.setdefault((param.dtype, param.param_dtype), []).append(param)
            elif self.offloading.is_host:
                param.move(self.offloading.device)
        self._buffers = tuple(
            DtypeBuffers(
                params,
                BufferLayout.build(
                    [param.sharding.partition for param in params],
                    world_size=self._mesh.shard_size,
                    itemsize=min(dtype.itemsize for dtype in dtypes),
                ),
                rank=self._mesh.shard_rank,
                offloading=self.offloading,
            )
            for dtypes, params in by_dtype.items()
        )

    def _find_extended(self) -> tuple[FSDPParam, ...]:
        return tuple(param for param in self._params if GATHERS_ITSELF.filling(param.local))

    def check_devices(self, name: str) -> None:
        """Refuse parameters on meta, or elsewhere than their shards live.

        Raises:
            FSDPRuntimeError: naming them.
        """
        meta = [param.path for param in self._params if param.local.is_meta]
        if meta:
            raise FSDPRuntimeError(
                f"parameters of '{name}' are still on the meta device: {', '.join(meta)}. Materialize the model "
                "before its first forward: model.to_empty(device=...), then initialize it or load a state dict."
            )
        device = self.offloading.device
        for param in self._params:
            if param.local.device != device:
                why = "with CPU offload it must be on" if self.offloading.is_host else "its mesh is on"
                raise FSDPRuntimeError(
                    f"parameter '{param.path}' is on {param.local.device}, but {why} {device}: move the model back "
                    f"with model.to('{device}')."
                )

    def prepare(self) -> None:
        """Build the unsharded parameters and the gathers, all left without memory."""
        if self._extended != self._find_extended():
            self.lay_out()  # extensions may be given to local tensors until now
        mesh = self._mesh
        for buffers in self._buffers:
            buffers.prepare(mesh.device)
            buffers.keeps_memory = self._keeps_memory
        self._gather = self._make_gather()
        if self.post_forward is not None:
            self.post_forward.prepare(self._buffers, mesh.device, self.allocate)
        self._gather.free()
        for buffers in self._buffers:
            buffers.unsharded.free()
        self._extensions = EXTENSION_GATHER.filling(self._extended, mesh, self.allocate) if self._extended else None
        for param in self._extended:
            param.post_forward = None
        if self._extensions is not None:
            self._extensions.keeps_memory = self._keeps_memory
        self._unsharded_storages = frozenset(buffers.unsharded_storage for buffers in self._buffers)

    def _make_gather(self) -> Gather:
        """The gather from the shards; the unsharded buffers have memory."""
        sources = [
            Source(buffers, buffers.shard, buffers.layout if self.allocate is None else buffers.layout.all_packed())
            for buffers in self._buffers
        ]
        mesh = self._mesh
        return Gather(sources, mesh.shard_size, mesh.shard_rank, mesh.device, self.allocate)

    def set_allocate(self, allocate: Allocate | None) -> None:
        """Let the buffers of gathers come from there from now on. Unsharded parameters stay: none is being gathered."""
        self.allocate = allocate
        if self._gather is None:
            return
        empty = [buffers for buffers in self._buffers if not buffers.unsharded.storage.nbytes()]
        for buffers in empty:
            buffers.unsharded.allocate()
        self._gather = self._make_gather()
        self._gather.free()
        if self.post_forward is not None:
            self.post_forward.set_allocate(allocate, self._mesh.device)
        for buffers in empty:
            buffers.free()
        if self._extensions is not None:
            self._extensions.allocate = allocate

    # -- one gather

    def gather_from(self, *, resumes: bool) -> Gather:
        """The gather from the shards; ``resumes``: from where the parameters rest after forward."""
        gather = self.post_forward.gather if resumes and self.post_forward is not None else self._gather
        assert gather is not None, "prepared"
        return gather

    def copy_in(self, gather: Gather, *, resumes: bool, version: object = None) -> Sequence[Transfer]:
        """Prepare what is sent; ``version`` as in `Gather.copy_in`. Returns what the collective carries."""
        gather.copy_in(version)
        if self._extensions is None:
            return gather.members
        with torch.inference_mode(False), torch.no_grad():  # what they make is used in training as well
            if resumes and self.post_forward is not None:
                return [*gather.members, *self._extensions.begin_from_rests(self.post_forward.mesh)]
            return [*gather.members, *self._extensions.begin()]

    def copy_out(self, *, resumes: bool) -> None:
        """Move what has arrived to where the unsharded parameters lie."""
        if _torch.profiler._is_profiler_enabled:
            with _torch.in_range(f"FSDP::all_gather_copy_out ({self._params[0].group.name})"):
                self.gather_from(resumes=resumes).copy_out()
        else:
            self.gather_from(resumes=resumes).copy_out()
        if self._extensions is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            if resumes:
                self._extensions.finish_from_rests()
            else:
                self._extensions.finish(None if self.post_forward is None else self.post_forward.mesh)

    def free(self) -> None:
        """Free everything but the shards; every unsharded parameter loses its values with it."""
        if self._gather is not None:
            self._gather.free()
        for buffers in self._buffers:
            buffers.free()
        if self._extensions is not None:
            self._extensions.free()

    def forget_sent(self) -> None:
        """Copy shards anew in the next gather, whatever is kept."""
        if self._gather is not None:
            self._gather.forget()

    def free_rests(self) -> None:
        """Free what was kept for a gather in backward; the sharded parameters are all there is then."""
        if self.post_forward is not None:
            self.post_forward.free()
        if self._extensions is not None:
            self._extensions.free_rests()

    def keep_memory(self, keep: bool) -> None:
        """Whether `free` leaves the unsharded parameters their memory."""
        self._keeps_memory = keep
        for buffers in self._buffers:
            buffers.keeps_memory = keep
        if self._extensions is not None:
            self._extensions.keeps_memory = keep

    @property
    def keeps_memory(self) -> bool:
        """What `keep_memory` has set."""
        return self._keeps_memory

    # -- what lies here

    @property
    def buffers(self) -> tuple[DtypeBuffers, ...]:
        """One for each dtype; others after the parameters were laid out anew."""
        return self._buffers

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded buffers while they have memory."""
        return sum(buffers.unsharded_bytes for buffers in self._buffers)

    def lies_on_unsharded(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is, or is a view of, an unsharded parameter."""
        storage = _torch.storage_of(tensor)
        if self._extensions is not None and storage in self._extensions.storages():
            return True
        return storage in self._unsharded_storages

    def changed(self) -> FSDPParam | None:
        """A parameter that was written, or moved off its place, while it was unsharded, if there is one."""
        for buffers in self._buffers:
            changed = buffers.changed()
            if changed is not None:
                return changed
        return None

    def plans(self) -> tuple[tuple[BuffersPlan, ...], tuple[ParamPlan, ...]]:
        """How the parameters lie: those in buffers, and those that gather themselves."""
        buffers_plans = tuple(
            BuffersPlan(
                buffers.shard.dtype,
                buffers.param_dtype,
                tuple(ParamPlan(param.fqn, param.shape, param.requires_grad) for param in buffers.params),
                buffers.layout,
            )
            for buffers in self._buffers
        )
        extended = tuple(ParamPlan(param.fqn, param.shape, param.requires_grad) for param in self._extended)
        return buffers_plans, extended
