"""`FSDPParamGroup`: the parameters of one `fully_shard` call, and the three operations on them.

Unshard, reshard and reduce, as a phase machine over the group's flat buffers. Knows streams and collectives through
the layers below; does not know modules' hooks, order or prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from fsdp2 import _torch, collectives
from fsdp2.buffers import DtypeBuffers, Member
from fsdp2.comm_context import FSDPCommContext, PendingReduce, Ticket
from fsdp2.common import (
    GRAD_TRANSITIONS,
    PARAM_TRANSITIONS,
    FSDPRuntimeError,
    GradPhase,
    ParamPhase,
)
from fsdp2.gradients import DtypeGradients, PackedGradients
from fsdp2.layout import BufferLayout, GradientLayout
from fsdp2.mesh import ShardMesh
from fsdp2.param import Freshness, FSDPParam, succeed
from fsdp2.plan import BuffersPlan, GroupPlan, ParamPlan

_Swap = tuple[Any, str, FSDPParam]


class FSDPParamGroup:
    """The parameters that are gathered together and whose gradients are reduced together.

    Attributes:
        name: of the module, below the root once that is known.
        requires_gradient_sync: whether the end of this group's backward reduces gradients; else they stay unsharded.
        accumulated: unsharded gradients of earlier backwards wait for a reduction.
    """

    def __init__(self, params: Sequence[FSDPParam], mesh: ShardMesh, *, freshness: Freshness, name: str) -> None:
        self.name = name
        self.params = tuple(params)
        self.mesh = mesh
        self.requires_gradient_sync = True
        self.accumulated = False
        self._freshness = freshness
        self.comm: FSDPCommContext | None = None
        self.plan: GroupPlan | None = None
        self._param_phase = ParamPhase.SHARDED
        self._grad_phase = GradPhase.IDLE
        self._ticket: Ticket | None = None
        self._issuing = False
        self._buffers: tuple[DtypeBuffers, ...] = ()
        self._gradients: tuple[DtypeGradients, ...] = ()
        self._members: tuple[Member, ...] = ()
        self._unsharded_storages: frozenset[int] = frozenset()
        self._sharded = tuple(param.sharded for param in self.params)
        self._gathered_version = 0
        self._swaps: tuple[_Swap, ...] = tuple(
            (mapping, name, param) for param in self.params for mapping, name in param.registrations
        )
        self._lay_out()

    # -- what the group is made of

    def _lay_out(self) -> None:
        """Move the sharded parameters into one shard buffer per dtype (on meta there is nothing to move)."""
        self._buffers = ()
        self.plan = None
        if any(param.local.is_meta for param in self.params):
            return
        by_dtype: dict[torch.dtype, list[FSDPParam]] = {}
        for param in self.params:
            by_dtype.setdefault(param.dtype, []).append(param)
        self._buffers = tuple(
            DtypeBuffers(
                params,
                BufferLayout.build(
                    [param.shape for param in params], world_size=self.mesh.world_size, itemsize=dtype.itemsize
                ),
                rank=self.mesh.rank,
            )
            for dtype, params in by_dtype.items()
        )

    def prepare(self, comm: FSDPCommContext) -> None:
        """Freeze the plan and build everything that the hot path uses. Nothing is communicated.

        Raises:
            FSDPRuntimeError: a parameter is still on meta, or not on the mesh's device.
        """
        self.adopt_replaced()
        self._check_devices()
        self.comm = comm
        # Buffers made under inference mode could never take part in training.
        with torch.inference_mode(False), torch.no_grad():
            for buffers in self._buffers:
                buffers.prepare()
        self._gradients = self._make_gradients()
        self._unsharded_storages = frozenset(buffers.unsharded_storage for buffers in self._buffers)
        self._members = tuple(member for buffers in self._buffers for member in buffers.members)
        self.plan = self._make_plan()

    def _check_devices(self) -> None:
        meta = [param.path for param in self.params if param.local.is_meta]
        if meta:
            raise FSDPRuntimeError(
                f"parameters of '{self.name}' are still on the meta device: {', '.join(meta)}. Materialize the model "
                "before its first forward: model.to_empty(device=...), then initialize it or load a state dict."
            )
        for param in self.params:
            if param.local.device != self.mesh.device:
                raise FSDPRuntimeError(
                    f"parameter '{param.path}' is on {param.local.device}, but its mesh is on "
                    f"{self.mesh.device}: move the model back with model.to('{self.mesh.device}')."
                )

    def _make_gradients(self) -> tuple[DtypeGradients, ...]:
        made = map(self._gradients_of, self._buffers)
        return tuple(gradients for gradients in made if gradients is not None)

    def _gradients_of(self, buffers: DtypeBuffers) -> DtypeGradients | None:
        # Gradients that were accumulated before a parameter was frozen are still due.
        due = {param for one in self._gradients for param in one.params} if self.accumulated else set()
        trainable = [index for index, param in enumerate(buffers.params) if param.requires_grad or param in due]
        if not trainable:
            return None
        layout = GradientLayout.build(
            [buffers.layout.slots[index] for index in trainable],
            world_size=self.mesh.world_size,
            itemsize=buffers.shard.element_size(),
        )
        params = [buffers.params[index] for index in trainable]
        return DtypeGradients(params, layout, world_size=self.mesh.world_size, rank=self.mesh.rank)

    def _make_plan(self) -> GroupPlan:
        layouts = {gradients.params[0].dtype: gradients.layout for gradients in self._gradients}
        return GroupPlan(
            self.name,
            self.mesh.world_size,
            tuple(
                BuffersPlan(
                    buffers.shard.dtype,
                    tuple(ParamPlan(param.fqn, param.shape, param.requires_grad) for param in buffers.params),
                    buffers.layout,
                    layouts.get(buffers.shard.dtype),
                )
                for buffers in self._buffers
            ),
        )

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded buffers while the group is unsharded."""
        return sum(buffers.unsharded_bytes for buffers in self._buffers)

    @property
    def can_gather_ahead(self) -> bool:
        """Whether a gather for a backward that is only expected would get the values of its forward."""
        return not self._is_stale()

    def _version(self) -> int:
        """Changes with writes to the sharded parameters, alike on all ranks."""
        return sum(map(_torch.version_of, self._sharded))

    def _is_stale(self) -> bool:
        """Whether the sharded parameters were written since they were gathered, as far as that can be seen."""
        return self._freshness.stale or self._gathered_version != self._version()

    def lies_on_unsharded(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is, or is a view of, an unsharded parameter."""
        return _torch.storage_of(tensor) in self._unsharded_storages

    # -- replaced parameters

    def _is_as_planned(self) -> bool:
        """Whether the modules still hold the sharded parameters that the plan was made for."""
        local_of = _torch.local_of
        for mapping, name, param in self._swaps:
            found = mapping.get(name)
            if (
                found is not param.sharded
                or local_of(found) is not param.local
                or found.requires_grad is not param.requires_grad
            ):
                return False
        return True

    def adopt_replaced(self) -> None:
        """Take over sharded parameters that the user replaced, moved, converted, froze or unfroze.

        Only while the sharded parameters are registered. The buffers are rebuilt, and the plan if there was one.

        Raises:
            FSDPRuntimeError: a replacement is not a DTensor parameter of the same shape, mesh and placements.
        """
        if self._param_phase is not ParamPhase.SHARDED or self._is_as_planned():
            return
        if self._grad_phase is GradPhase.REDUCING and self.comm is not None:
            self.comm.retire_reduces(0)  # what is in flight was packed by the old plan
        # Look at all of them before changing any.
        replacements = [param.registered() for param in self.params]
        in_place = all(param.lies_under(found) for param, found in zip(self.params, replacements, strict=True))
        for param, found in zip(self.params, replacements, strict=True):
            if found is not param.sharded:
                succeed(param.sharded, found)
            param.adopt(found)
        self._sharded = tuple(param.sharded for param in self.params)
        if in_place:  # converted to what they were, as by model.to(device): only the wrappers are new
            self._gathered_version = self._version()
            self._gradients = self._make_gradients()
            return
        self._freshness.stale = True
        with torch.inference_mode(False):
            self._lay_out()
        if self.comm is not None:
            self.comm.gathers_follow_compute()  # which has just written the new shard buffers
        if self.comm is not None and all(param.local.device == self.mesh.device for param in self.params):
            self.prepare(self.comm)  # else when it is needed: the parameters may be on their way somewhere

    # -- unshard and reshard

    @property
    def phase(self) -> ParamPhase:
        """Where the parameters stand."""
        return self._param_phase

    def _enter(self, phase: ParamPhase) -> None:
        assert (self._param_phase, phase) in PARAM_TRANSITIONS, f"{self.name}: {self._param_phase} -> {phase}"
        self._param_phase = phase

    def unshard(self, *, for_backward: bool = False) -> None:
        """Issue the all-gather, unless the parameters are unsharded or about to be. Collective, asynchronous.

        Stale unsharded parameters are gathered again, but not ``for_backward``, which needs those of its forward.

        Raises:
            FSDPRuntimeError: ``for_backward``, and the values of the forward are gone.

        Stream: allocates, gathers and copies out on the all-gather stream.
        """
        if self._param_phase is not ParamPhase.SHARDED:
            if for_backward or not self._is_stale():
                return
            self.reshard()
        if for_backward and self._is_stale():
            raise FSDPRuntimeError(
                f"parameters of '{self.name}' were changed between a forward and its backward, which needs the "
                "values of before. Run all backwards before the optimizer steps, or anything else writes them."
            )
        if not self._is_as_planned():
            self.adopt_replaced()
        if self.plan is None and self.comm is not None:
            self.prepare(self.comm)
        # First of all, so that `reshard` cleans up if an exception (out of memory) interrupts the rest.
        self._enter(ParamPhase.UNSHARDING)
        self._freshness.stale = False
        self._gathered_version = self._version()
        if _torch.profiler_is_running():
            with record_function(f"fsdp2::all_gather {self.name}"):
                self._issue_all_gather()
        else:
            self._issue_all_gather()

    def _issue_all_gather(self) -> None:
        assert self.comm is not None, "unshard follows lazy initialization"
        device, stream = self.comm.device, self.comm.all_gather_stream
        with device.use(stream):
            for buffers in self._buffers:
                buffers.allocate()
            self._ticket = Ticket([])
            self._issuing = True
            collectives.all_gather(self._members, self.mesh.group, None if device.has_streams else self._ticket.works)
            self._issuing = False
            if device.has_streams:
                self._copy_out()
            self._ticket.event = device.record(stream)

    def _copy_out(self) -> None:
        for buffers in self._buffers:
            buffers.copy_out()

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather and register the unsharded parameters. Nothing to do if they are.

        Stream: the current stream waits; on CPU the host does.
        """
        if self._param_phase is not ParamPhase.UNSHARDING:
            return
        self._finish_all_gather()
        for mapping, name, param in self._swaps:
            mapping[name] = param.unsharded
        self._enter(ParamPhase.UNSHARDED)

    def _finish_all_gather(self) -> None:
        assert self.comm is not None and self._ticket is not None, "an all-gather is under way"
        self.comm.compute_follows_gather(self._ticket)
        self._ticket = None
        if not self.comm.device.has_streams:
            self._copy_out()

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded ones. Nothing to do if they are sharded.

        Stream: the all-gather stream waits for the current stream, which may still be reading.

        Raises:
            FSDPRuntimeError: the user changed a parameter while it was unsharded.
        """
        if self._param_phase is ParamPhase.SHARDED:
            return
        assert self.comm is not None, "resharding follows unsharding"
        if self._ticket is not None and not self._issuing:
            self._finish_all_gather()
        elif self._ticket is not None:
            self._ticket.wait_for_works()
        self._ticket = None
        replaced: FSDPParam | None = None
        if self._param_phase is ParamPhase.UNSHARDED:
            replaced = next(filter(None, (buffers.changed() for buffers in self._buffers)), None)
        for mapping, name, param in self._swaps:
            found, unsharded = mapping.get(name), param.unsharded
            if unsharded is not None and found is unsharded:
                if unsharded.requires_grad is not param.requires_grad:
                    param.sharded.requires_grad_(unsharded.requires_grad)
                mapping[name] = param.sharded
            elif found is not param.sharded:
                replaced = param
                mapping[name] = param.sharded
        self.comm.gathers_follow_readers()
        if self._issuing:
            # An exception (Ctrl-C) came while collectives were issued, and one may run that nothing here can wait for:
            # leave it the buffers, and lay out others.
            self._issuing = False
            self.plan = None
        else:
            for buffers in self._buffers:
                buffers.free()
        self._enter(ParamPhase.SHARDED)
        if replaced is not None:
            self.plan = None  # the unsharded parameters are laid out anew
            raise FSDPRuntimeError(
                f"parameter '{replaced.path}' was replaced, converted or written while it was unsharded; the new "
                "value is lost, the sharded parameter is registered again. Change parameters only while they are "
                "sharded: call reshard() on the module that fully_shard was called on first."
            )

    # -- reduce

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter is reduced."""
        return bool(self._gradients)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the sharded parameters' gradients, which `nn.Module.zero_grad` misses while they are not registered."""
        for param in self.params:
            gradient = param.sharded.grad
            if gradient is not None and set_to_none:
                param.sharded.grad = None
            elif gradient is not None:
                gradient.zero_()
        self.accumulated = self.accumulated and self.has_gradients()

    def refuse_lost_gradients(self) -> None:
        """Between iterations: raise if a backward left gradients that no hook noticed.

        Raises:
            FSDPRuntimeError: naming the group and the remedy.
        """
        if self.requires_gradient_sync and not self.accumulated and self.has_gradients():
            raise FSDPRuntimeError(
                f"a backward left gradients in '{self.name}' that were not reduced over the ranks, because it was not "
                "noticed: no tensor was found in what the sharded modules returned. Return tensors, or tuples, lists, "
                "dicts or dataclasses of them."
            )

    def release_gradients(self) -> None:
        """Free the memory of sharded gradients that have been cleared."""
        for gradients in self._gradients:
            gradients.release()

    def has_gradients(self) -> bool:
        """Whether autograd has left a gradient on any unsharded parameter."""
        return any(
            param.unsharded is not None and param.unsharded.grad is not None
            for gradients in self._gradients
            for param in gradients.params
        )

    def reduce(self) -> None:
        """Issue the mean of the gradients over all ranks. Collective, asynchronous; `.grad` is set when it is retired.

        What travels is fixed by the plan: parameters without a gradient on this rank contribute zeros.

        Stream: packs and reduces on the reduce-scatter stream.
        """
        if not self._gradients:
            return
        assert self.comm is not None, "reducing follows lazy initialization"
        self.comm.retire_reduces(self.comm.max_pending_reduces - 1)
        if self._grad_phase is GradPhase.REDUCING:
            self.comm.retire_reduces(0)
        if _torch.profiler_is_running():
            with record_function(f"fsdp2::reduce_scatter {self.name}"):
                self._issue_reduce()
        else:
            self._issue_reduce()
        self.accumulated = False

    def _enter_grad(self, phase: GradPhase) -> None:
        assert (self._grad_phase, phase) in GRAD_TRANSITIONS, f"{self.name}: {self._grad_phase} -> {phase}"
        self._grad_phase = phase

    def _issue_reduce(self) -> None:
        assert self.comm is not None, "reducing follows lazy initialization"
        self.comm.reduces_follow_compute()
        taken = [gradients.take() for gradients in self._gradients]
        try:
            packed, ticket = self._pack_and_reduce(taken, self.comm)
        except BaseException:
            self.comm.compute_follows_reduces()  # which may be reading what is freed now
            raise
        self._enter_grad(GradPhase.REDUCING)
        self.comm.add_pending(PendingReduce(ticket, partial(self._deliver, packed), packed))

    def _pack_and_reduce(
        self, taken: list[list[torch.Tensor | None]], comm: FSDPCommContext
    ) -> tuple[list[PackedGradients], Ticket]:
        device, stream = comm.device, comm.reduce_scatter_stream
        with _torch.without_grad(), device.use(stream):
            packed = [gradients.pack(each) for gradients, each in zip(self._gradients, taken, strict=True)]
            members = [member for one in packed for member in one.members]
            ticket = Ticket([])
            collectives.reduce_scatter_mean(members, self.mesh.group, None if device.has_streams else ticket.works)
            ticket.event = device.record(stream)
            return packed, ticket

    def _deliver(self, packed: list[PackedGradients]) -> None:
        self._enter_grad(GradPhase.IDLE)
        with _torch.without_grad():
            for gradients, one in zip(self._gradients, packed, strict=True):
                gradients.deliver(one)

    # -- after an exception

    def abandon(self) -> bool:
        """Drop what an iteration that failed left behind: sharded again, without unsharded gradients.

        The reductions in flight have been dropped before.

        Returns:
            Whether gradients of earlier microbatches, accumulated without communication, were lost.
        """
        lost = self.accumulated
        self.accumulated = False
        self._grad_phase = GradPhase.IDLE  # whatever the interrupted one was
        for gradients in self._gradients:
            gradients.take()
        self.reshard()
        return lost
