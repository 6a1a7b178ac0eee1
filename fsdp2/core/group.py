"""`FSDPParamGroup`: the parameters of one `fully_shard` call on one mesh, and the three operations on them.

Unshard, reshard and reduce are transitions of a phase machine over flat buffers. A group knows nothing of hooks on
modules, of their order, or of when to prefetch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2.core.buffers import ALLOCATOR, Offloading
from fsdp2.core.gather import Gather, GroupStorage, Transfer
from fsdp2.core.gradients import GradientBuffer
from fsdp2.core.mesh import DataParallelMesh, is_part_of
from fsdp2.core.options import DEFAULT, GroupSettings
from fsdp2.core.param import FSDPParam, Registration, Registrations, WriteCounter, mark_replaced
from fsdp2.core.places import UNNAMED, label
from fsdp2.core.plan import GroupPlan, ParamPlan, Waiting
from fsdp2.core.reduce import GradientReducer
from fsdp2.core.streams import CommHandle, FSDPCommContext
from fsdp2.core.transport import Alone, Transport, is_alone, transport_of
from fsdp2.errors import PARAM_TRANSITIONS, FSDPRuntimeError, ParamPhase


class Unsharding(CommHandle):
    """One all-gather of a group's parameters, and what is known of it; there is one only in `ParamPhase.UNSHARDING`.

    Attributes:
        gather: the buffers, views and copies that it uses.
        resumes: it gathers among fewer ranks, from where the parameters rest after forward.
        user_initiated: the user waits for it, so a custom all-gather may be asynchronous.
        is_issuing: collectives are being launched; after an exception there, one may run that nothing can wait for.
        is_issued: nothing is left to be issued; after an exception before that, it cannot be waited for.
        awaits_copy_out: packed parameters are still to be copied from the staging buffer to the unsharded buffers.
        is_copying_out: this copy has begun and not ended; after an exception inside of it, it cannot be repeated.
    """

    __slots__ = ("awaits_copy_out", "gather", "is_copying_out", "is_issued", "is_issuing", "resumes", "user_initiated")

    def __init__(self, gather: Gather, *, resumes: bool, user_initiated: bool) -> None:
        self.works, self.event = [], None
        self.label, self.is_lost = UNNAMED, False
        self.gather = gather
        self.resumes = resumes
        self.user_initiated = user_initiated
        self.is_issuing = self.is_issued = self.awaits_copy_out = self.is_copying_out = False


class Loan(Protocol):
    """Other parameters, such as full ones, that are registered for a while in the place of a group's sharded ones.

    Attributes:
        lender: the function that has registered them, for messages.
    """

    lender: str

    def refuse_pass(self, name: str, *, for_backward: bool) -> None:
        """Raise FSDPRuntimeError if a forward or backward of the group, called ``name``, cannot compute with them."""


class FSDPParamGroup:
    """The parameters that are gathered together and whose gradients are reduced together.

    Attributes:
        name: the name of its module, below the root once that is known.
        of_root: the number of the root among those of its class, see `agreement.Number`.
        params: the parameters, all of one mesh.
        mesh: the ranks over which they are sharded and replicated.
        storage: the memory that they lie on.
        reducer: the gradient side.
        settings: what users have set on it.
        sharers: the states whose modules hold its parameters: several, if weights are tied across `fully_shard` calls.
            The group is then gathered for each of them, and reduced when the backward of all is over.
        users: the sharers of a shared group that are in the middle of a forward or backward, and need it unsharded.
        took_part: whether the running backward has come to a shared group.
        is_prepared: everything that the hot path uses is built; False before lazy initialization, and after changes.
        graph_inputs: what `compiled/entry.py` has prepared for graphs; None before the first compiled call.
        loan: other parameters that are registered for a while. Meanwhile the group is neither gathered nor searched for
            replaced parameters. None: there are none.
        settings_outside: what `accumulate()` sets back at its end, for copies that are made inside; None: not inside.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh: DataParallelMesh,
        offloading: Offloading,
        *,
        write_counter: WriteCounter,
        name: str,
    ) -> None:
        self.name, self.of_root = name, 0
        self.params = tuple(params)
        self.mesh = mesh
        self.storage = GroupStorage(params, mesh, offloading)
        self.reducer = GradientReducer(mesh, offloading)
        self.settings = DEFAULT
        self.sharers: list[Any] = []
        self.users: set[object] = set()
        self.took_part = False
        self.comm: FSDPCommContext | None = None
        self.is_prepared = False
        self._plan: GroupPlan | None = None
        self.graph_inputs: Any = None
        self.loan: Loan | None = None
        self.settings_outside: GroupSettings | None = None
        self._write_counter = write_counter
        self._phase = ParamPhase.SHARDED
        self._unsharding: Unsharding | None = None
        self._rests_in_place = False  # sharded parameters are registered, and the unsharded ones have their values
        self._is_lent_rest = False  # they have them for a graph that may be alive on this rank alone
        self.is_lent = False  # see `WatchedParameters.lend`
        self._storages: tuple[object, ...] = ()
        self._take_sharded()
        self._gathered: object = (0, 0)  # `written()` when the unsharded values were gathered; None: unknown
        self._awaited: object = None  # `written()` when the all-gather stream last waited for compute
        self._registrations = Registrations(self.params)
        self._transport: Transport = Alone()
        self._transport_among_neighbours: Transport = self._transport
        for param in self.params:
            param.group = self
        self._lay_out()

    # -- unshard

    @property
    def phase(self) -> ParamPhase:
        """The phase of the parameters."""
        return self._phase

    @property
    def was_interrupted(self) -> bool:
        """Whether an exception has left an all-gather unfinished. (A user may leave one in flight on purpose.)"""
        return self._unsharding is not None and (self.was_cut_short or not self._unsharding.user_initiated)

    @property
    def was_cut_short(self) -> bool:
        """Whether an exception has left an all-gather in a state in which it cannot be waited for (again)."""
        return self._unsharding is not None and (not self._unsharding.is_issued or self._unsharding.is_copying_out)

    def _enter(self, phase: ParamPhase) -> None:
        assert (self._phase, phase) in PARAM_TRANSITIONS, f"{self.name}: {self._phase} -> {phase}"
        self._phase = phase

    def unshard(self, *, for_backward: bool = False, user_initiated: bool = False, is_prefetch: bool = False) -> bool:
        """Issue the all-gather, unless the parameters are unsharded or about to be. Collective, asynchronous.

        =========================  ========================================  =======================================
        parameters are             forward, or the user                      ``for_backward``
        =========================  ========================================  =======================================
        sharded                    gathered                                  gathered; refused if stale
        ... their values in place  gathered, as other ranks may have to      registered; refused if stale
        sharded among fewer ranks  gathered from there, or if stale anew     gathered from there
        about to be unsharded      left to come, or if stale gathered anew   left to come
        unsharded                  left, or if stale gathered anew           left; refused if their memory was written
        =========================  ========================================  =======================================

        Parameters are stale if they were written since they were gathered (in forward also if they were frozen or
        thawed). A backward needs the values of its forward. After an exception in the last gather they count as
        sharded, since the model may have caught it.

        Args:
            for_backward: see above.
            user_initiated: the user waits for it, so a custom all-gather may be asynchronous.
            is_prefetch: the backward is only expected: where it would be refused, nothing is done.

        Returns:
            Whether an all-gather is in flight.

        Raises:
            FSDPRuntimeError: ``for_backward``, and the values of the forward are gone; or a `Loan` refuses.

        Stream: allocates, copies in, gathers and copies out on the all-gather stream.
        """
        if self.loan is not None:
            self.loan.refuse_pass(self.name, for_backward=for_backward)
            return False
        if self.is_lent and not for_backward:
            self.is_lent = self.is_saved()  # without saved values only modules read them, which gather again
        unsharding = self._unsharding
        if unsharding is not None:
            unsharding.user_initiated = user_initiated
            if not unsharding.is_issued or unsharding.is_copying_out:
                self.reshard()
        # The backward that is expected may never come, and if it does, it refuses stale parameters by itself.
        if for_backward and is_prefetch and self.is_stale():
            return self._unsharding is not None
        if self._rests_in_place and self._takes_up_in_place(for_backward):
            return False
        if self._phase is not ParamPhase.SHARDED:
            if for_backward or self._is_as_gathered():
                if self._phase is not ParamPhase.SHARDED_POST_FORWARD:
                    if for_backward and self._phase is ParamPhase.UNSHARDED:
                        self._begin_backward(is_prefetch)
                    return self._unsharding is not None
                if self._rests_as_left():
                    self._start(for_backward, user_initiated)
                    return True
            self.reshard()
        if for_backward and not is_prefetch and self.is_stale():
            self.refuse_backward()
        if not self._registrations.hold_sharded():
            # A backward takes new wrappers and frozen parameters, and no other values than those of its forward.
            if for_backward and not self._adopt_in_place():
                self.refuse_backward()
            self.adopt_replaced()
        if not self.is_prepared and self.comm is not None:
            self._prepare_anew(self.comm)
        self._start(for_backward, user_initiated)
        return True

    def _takes_up_in_place(self, for_backward: bool) -> bool:
        """Register the values that `rest_in_place` has left, if a backward may use them on all ranks alike.

        A forward gathers anew even if they are here. On another rank the user's code may have looked at the shards,
        which frees the values, and all ranks must issue the same gathers.
        """
        # A graph that nobody reads any more may be alive on one rank alone, until Python collects it. So where values
        # were left for a graph of a lent module all ranks gather: the same values come to the memory that they are in.
        is_alike = for_backward and not self._is_lent_rest
        if is_alike and self._registrations.hold_sharded() and not self.is_stale():
            self._rests_in_place = False
            self._registrations.register_unsharded()
            self._enter(ParamPhase.UNSHARDED)
            return True
        self._free_unsharded(keeps_memory=self._is_lent_rest)
        return False

    def _is_as_gathered(self) -> bool:
        """Whether a forward may use the values that are unsharded, on their way, or sharded among fewer ranks."""
        is_changed = False
        if self._phase is ParamPhase.UNSHARDED:
            is_changed = self._registrations.are_toggled()
        elif self._unsharding is not None and not self._unsharding.resumes:
            is_changed = self._registrations.were_changed()  # since it was gathered ahead
        return not (is_changed or self.is_stale())

    def _begin_backward(self, is_prefetch: bool) -> None:
        """A backward begins, and finds the parameters unsharded."""
        if self._registrations.are_toggled():
            self._adopt_toggled()
        # One rank alone computes with the shards themselves, so a write has reached what the forward saved.
        if self.storage.lies_in_place and not is_prefetch and self.is_stale():
            self.refuse_backward()

    def _rests_as_left(self) -> bool:
        """Whether the post-forward parameters are still registered, and were neither written nor frozen."""
        post_forward = self.storage.post_forward
        assert post_forward is not None, "the parameters rest there"
        return post_forward.changed() is None and self._registrations.hold_post_forward()

    def refuse_backward(self) -> NoReturn:
        """Raise `FSDPRuntimeError`: parameters that the running backward needs were written since its forward."""
        raise FSDPRuntimeError(
            f"parameters of '{self.name}' were changed between a forward and its backward, which needs the "
            "values of before; or an all-gather of them failed meanwhile. Run all backwards before the optimizer "
            "steps, or anything else writes them; after a failure, run the forward again."
        )

    def _start(self, for_backward: bool, user_initiated: bool) -> None:
        resumes = self._phase is ParamPhase.SHARDED_POST_FORWARD
        gather = self.storage.gather_from_rests if resumes else self.storage.gather
        assert gather is not None, "prepared"
        # First of all, so that `reshard` cleans up if an exception (out of memory) interrupts the rest.
        self._unsharding = Unsharding(gather, resumes=resumes, user_initiated=user_initiated)
        self._enter(ParamPhase.UNSHARDING)
        if not (resumes or for_backward) and (written := self.written()) != self._gathered:
            self._gathered = written
            # Other values come to the same memory: autograd must refuse the backward of graphs that saved the old ones.
            self.storage.outdate()
            # The all-gather stream has waited for compute when the root's forward began; the write came later.
            if self._awaited is not None and written != self._awaited and self.comm is not None:
                self.comm.gathers_follow_compute()
                self._awaited = written
        if self.storage.gathers_nothing:
            self._unsharding.is_issued = True
            return
        if _torch.profiler._is_profiler_enabled:
            with _torch.in_range(f"FSDP::all_gather ({self.name})"):
                self._issue_all_gather(self._unsharding, for_backward)
        else:
            self._issue_all_gather(self._unsharding, for_backward)

    def forget_event(self) -> None:
        """Forget the event of the all-gather: see `FSDPCommContext.forget_events`."""
        if self._unsharding is not None:
            self._unsharding.event = None

    def _issue_all_gather(self, unsharding: Unsharding, for_backward: bool) -> None:
        assert self.comm is not None, "unshard follows lazy initialization"
        device, storage, gather = self.comm.device, self.storage, unsharding.gather
        as_works = not device.has_streams or self.settings.gathers_on_compute
        stream = device.current_stream() if self.settings.gathers_on_compute else self.comm.all_gather_stream
        with device.use(stream):
            gather.allocate(ALLOCATOR if self.settings.gathers_on_compute else self.comm.gather_arena)
            unsharding.is_issuing = unsharding.awaits_copy_out = True
            version = None
            # Cast shards are kept only for training: without gradients many forwards may come between two steps, and
            # the shards may be written by others than steps (averages).
            if storage.caches_shards and not unsharding.resumes and (for_backward or torch.is_grad_enabled()):
                version = self._sent_version()
            gather.copy_in(version)
            members: Sequence[Transfer] = gather.members
            if storage.extensions is not None:
                members = storage.with_extended(members, resumes=unsharding.resumes)
            if storage.offloading.is_host and device.has_streams:
                self.comm.host_writes_shards_after(device.record(stream))
            works = unsharding.works if as_works else None
            user_waits = unsharding.user_initiated or self.settings.gathers_on_compute
            transport = self._transport if not unsharding.resumes else self._transport_among_neighbours
            unsharding.label = transport.label
            transport.all_gather(members, works, user_waits)
            unsharding.is_issuing = False
            if not as_works:  # works are waited for first, see `_finish_all_gather`
                self._copy_out(unsharding)
                unsharding.event = device.record(stream)
            unsharding.is_issued = True

    def _copy_out(self, unsharding: Unsharding) -> None:
        unsharding.awaits_copy_out, unsharding.is_copying_out = False, True
        if _torch.profiler._is_profiler_enabled:
            with _torch.in_range(f"FSDP::all_gather_copy_out ({self.name})"):
                unsharding.gather.copy_out()
        else:
            unsharding.gather.copy_out()
        if self.storage.extensions is not None:
            self.storage.finish_extended(resumes=unsharding.resumes)
        unsharding.is_copying_out = False

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather and register the unsharded parameters. Does nothing if no all-gather is in flight.

        Stream: the current stream waits; on CPU the host does.

        Raises:
            FSDPRuntimeError: an exception came before all had arrived, so that the values are not there.
        """
        if self._phase is not ParamPhase.UNSHARDING or self._unsharding is None:
            return
        if self._unsharding.is_copying_out or not self._unsharding.is_issued:
            raise FSDPRuntimeError(
                f"the all-gather of '{self.name}' was interrupted by an exception before all had arrived; call "
                "reshard() on the module, on all ranks, before it is unsharded again."
            )
        self._finish_all_gather(self._unsharding)
        self._registrations.register_unsharded()
        if self.storage.post_forward is not None:
            self.storage.post_forward.free()
        self._enter(ParamPhase.UNSHARDED)
        self._unsharding = None

    def _finish_all_gather(self, unsharding: Unsharding) -> None:
        assert self.comm is not None, "an all-gather is under way"
        self.comm.compute_follows_gather(unsharding)
        unsharding.works, unsharding.event = [], None
        if unsharding.awaits_copy_out:
            self._copy_out(unsharding)

    # -- reshard

    def reshard_after_forward(self, awaits_backward: bool) -> None:
        """Reshard at the end of a forward: to fewer ranks if that is set and it ``awaits_backward``, else to all."""
        if awaits_backward and self._phase is ParamPhase.SHARDED_POST_FORWARD:
            return  # an exception came after the end of this forward, or before its beginning
        post_forward = self.storage.post_forward if awaits_backward else None
        if post_forward is None or self._phase is not ParamPhase.UNSHARDED or self.storage.changed() is not None:
            self.reshard()
            return
        post_forward.take()
        self._registrations.register_post_forward()
        self._enter(ParamPhase.SHARDED_POST_FORWARD)
        # A graph whose backward begins at no module output may have saved the unsharded values: they stay for it.
        self._rests_in_place = self._is_lent_rest = self.is_lent and self.is_saved()
        if not self._rests_in_place:
            self._free_unsharded()

    def reshard(self, *, by_user: bool = False) -> None:
        """Register the sharded parameters and free the unsharded ones. Does nothing if they are sharded.

        ``by_user``: parameters that the user has registered over the same memory are dropped without an error.

        Stream: the all-gather stream waits for the current stream, which may still be reading.

        Raises:
            FSDPRuntimeError: the user changed a parameter while it was unsharded.
        """
        if self.is_lent and self.is_saved():  # a graph reads the values: only register the sharded parameters
            self.rest_in_place(lent=True)
            if self._rests_in_place and self._phase is ParamPhase.SHARDED:
                return
        if self._phase is ParamPhase.SHARDED:
            if self._rests_in_place:
                self._free_unsharded()
            return
        assert self.comm is not None, "resharding follows unsharding"
        unsharding = self._unsharding
        # Memory may be freed only when no collective uses it. A failed work, like an interrupted launch, may leave one
        # that nothing can wait for.
        if unsharding is not None and unsharding.leave_failed_works():
            unsharding.is_issuing = True
        if unsharding is not None and unsharding.is_issuing:
            unsharding.wait_for_works()
        elif unsharding is not None:
            self._finish_all_gather(unsharding)
        replaced: FSDPParam | None = None
        if self._phase is ParamPhase.UNSHARDED:
            replaced = self.storage.changed()
        elif self._phase is ParamPhase.SHARDED_POST_FORWARD and self.storage.post_forward is not None:
            replaced = self.storage.post_forward.changed()
        if self._registrations.hold_unsharded():
            self._registrations.register_sharded()
        else:
            # Before the end of a gather the modules hold the sharded parameters: what the user has put in their place
            # is no mistake, and is adopted by the next `unshard`.
            never_shown = self._phase is ParamPhase.UNSHARDING
            replaced = self._registrations.restore_sharded(by_user=by_user, keeps=never_shown) or replaced
        if unsharding is not None and unsharding.is_issuing:
            # A collective may still write to these buffers: they are not freed, and `prepare` makes others. So values
            # that an earlier forward has saved do not come back, and autograd must refuse its backward.
            self.comm.compute_follows_gathers()
            self.is_prepared = False
            self.storage.outdate()
            self._gathered = None
        else:
            self.storage.free_rests()
            self._free_unsharded()
        self._enter(ParamPhase.SHARDED)
        self._unsharding = None
        if replaced is not None:
            self._refuse(replaced)

    def rest_in_place(self, *, lent: bool = False) -> None:
        """Register the sharded parameters, and leave the unsharded ones their values: a recorded graph reads them.

        The next backward finds them there, unless parameters were written since; a reshard frees them, and a forward
        gathers them anew. No communication.
        """
        if self._phase is ParamPhase.SHARDED_POST_FORWARD and self._rests_in_place:
            if self._rests_as_left():
                self._registrations.register_sharded()
                self.storage.free_rests()
                self._enter(ParamPhase.SHARDED)
            return
        if self._phase is not ParamPhase.UNSHARDED or self.users:
            return
        if self.storage.changed() is None and self._registrations.hold_unsharded():
            self._registrations.register_sharded()
            self._enter(ParamPhase.SHARDED)
            self._rests_in_place, self._is_lent_rest = True, lent

    def is_in_graph(self) -> bool:
        """Whether an unsharded parameter is a leaf of a graph."""
        return self._uses() > 1

    def is_saved(self) -> bool:
        """Whether a graph has saved an unsharded parameter, to read it in backward."""
        return self._uses() > 2

    def _uses(self) -> int:
        # Python holds a tensor (1), then the node that accumulates its gradient (2), then each node that has saved it.
        unsharded = [param.unsharded for param in self.params if param.unsharded is not None]
        return max(map(_torch.use_count, unsharded), default=1)

    def free_in_place(self) -> None:
        """Free what `rest_in_place` has left, if nothing has unsharded it since."""
        if self._rests_in_place and not (self.is_lent and self.is_saved()):
            self._free_unsharded()

    def _free_unsharded(self, *, keeps_memory: bool = False) -> None:
        self._rests_in_place = False
        if self.storage.gathers_nothing:
            return
        # The all-gather stream, which owns the memory, may reuse it right after it is freed.
        if self.comm is not None and self.comm.device.has_streams:
            self.comm.gathers_follow_readers()
        if not keeps_memory:
            self.storage.free()

    def _refuse(self, replaced: FSDPParam) -> None:
        self.is_prepared = False  # the unsharded parameters are laid out anew
        raise FSDPRuntimeError(
            f"parameter '{replaced.path}' was replaced, converted or written while it was unsharded; the new "
            "value is lost, the sharded parameter is registered again. Change parameters only while they are "
            "sharded: call reshard() on the module that fully_shard was called on first. A module whose forward itself "
            "writes them, as nn.Embedding(max_norm=...) does, is left to torch: give it to ignored_params."
        )

    # -- gradients

    def reduce_or_keep(self) -> bool:
        """Issue the reduction of the gradients, or leave them unsharded, as the user has set. Collective, asynchronous.

        ``.grad`` is set when the reduction is retired.

        Returns:
            Whether one was issued.
        """
        if self.reducer.frozen:
            self.reducer.refuse_unexpected()
        if not self.reducer.is_trainable:
            return False
        if not self.settings.requires_gradient_sync:
            self.reducer.keep_unsharded()
            return False
        assert self.comm is not None, "reducing follows lazy initialization"
        if _torch.profiler._is_profiler_enabled:
            with _torch.in_range(f"FSDP::post_backward_reduce ({self.name})"):
                self.reducer.reduce(self.comm)
        else:
            self.reducer.reduce(self.comm)
        return True

    def clear_waiting(self, params: Collection[FSDPParam], set_to_none: bool) -> None:
        """Drop gradients of ``params`` that are not in ``.grad`` yet, or make them zeros."""
        if self.comm is not None:
            if self.reducer.is_reducing:
                self.comm.finish_reduces()
            self.reducer.wait_for_host_sums(self.comm.device)
        self.reducer.clear(params, set_to_none)

    def refuse_set_data(self) -> None:
        """Refuse that the user has set ``.data`` of a sharded parameter, which a DTensor ignores.

        Raises:
            FSDPRuntimeError: ``.data`` was set. It is raised once; the parameter keeps the values that it had.
        """
        with _torch.plain_attributes():
            if all(map(is_, map(_torch.untyped_storage, self._sharded), self._storages)):
                return
            storages = tuple(map(_torch.untyped_storage, self._sharded))
        changed = [one for one, *two in zip(self.params, self._storages, storages, strict=True) if two[0] is not two[1]]
        self._storages = storages
        for param in changed:
            if _torch.local_of(param.sharded) is param.local:  # else it was converted or moved, which is adopted
                raise FSDPRuntimeError(
                    f".data was set on parameter '{param.path}'. A DTensor ignores that: the parameter has its former "
                    "values. Copy into it instead, under torch.no_grad(): parameter.copy_(value)."
                )

    def begin_iteration(self, *, ends_by_itself: bool) -> None:
        """The root's forward begins.

        Args:
            ends_by_itself: each backward has reduced at its end, without ``finalize_backward``.

        Raises:
            FSDPRuntimeError: a backward left gradients that no hook noticed, or ``.data`` was set on a parameter; with
                its name and the remedy.
        """
        reducer = self.reducer
        self.refuse_set_data()
        if self.comm is not None and self.comm.device.has_streams:
            self._awaited = self.written()
        if not ends_by_itself:
            return
        if self.settings.requires_gradient_sync and not reducer.waiting & Waiting.UNREDUCED and reducer.has_gradients():
            raise FSDPRuntimeError(
                f"a backward left gradients in '{self.name}' that were not reduced over the ranks, because it was not "
                "noticed: no tensor was found in what the sharded modules returned, or .grad was set while the "
                "parameters were unsharded. Return tensors, or tuples, lists, dicts or dataclasses of them; call "
                "reshard() before setting .grad."
            )

    # -- after an exception

    def abandon(self) -> bool:
        """Drop what an iteration that failed left behind; the reductions in flight have been dropped before.

        Returns:
            Whether gradients of earlier microbatches, accumulated without communication, were lost.
        """
        lost = self.reducer.abandon()
        self.reshard()
        return lost

    def drop_gradients(self) -> None:
        """Drop all gradients, also those of earlier microbatches, reduced or not."""
        self.reducer.abandon()
        for param in self.params:
            param.sharded.grad = None

    # -- what the group is made of

    def rename(self, name: str, paths: Mapping[nn.Module, str]) -> None:
        """Take the module's ``name`` below the root, for messages. ``paths``: the names of all modules there."""
        self.name = name
        for param in self.params:
            param.rename(paths)

    def belong_to(self, root: int) -> None:
        """Label this group's collectives with the number of its root, so that roots of one class are told apart."""
        if root != self.of_root:
            self.of_root = root
            self._name_exchanges()

    def tie(self, param: FSDPParam, uses: Sequence[tuple[nn.Module, str]]) -> None:
        """Tie ``param`` to ``uses``: modules of another `fully_shard` call, which hold it as well."""
        self.reshard()
        param.tie(uses)
        self._registrations = Registrations(self.params)
        # Though one module's backward may do without the parameters, the other's may need them.
        self.configure(dataclasses.replace(self.settings, unshards_in_backward=True))

    def register_in(self, param: FSDPParam, place: Registration) -> None:
        """Register ``param`` in one more place, which holds its original."""
        self.reshard()
        param.register_in([place])
        self._registrations = Registrations(self.params)

    @property
    def sharded(self) -> tuple[nn.Parameter, ...]:
        """The sharded parameters, in a tuple that stays the same object until one is replaced."""
        return self._sharded

    @property
    def is_shared(self) -> bool:
        """Whether weights are tied across `fully_shard` calls."""
        return len(self.sharers) > 1

    @property
    def placed_within(self) -> DeviceMesh | None:
        """The mesh of the `fully_shard` call, if ``shard_placement_fn`` has put the parameters on a part of its ranks.

        The other ranks of it hold other values under the same name, so gradients are never reduced over them.
        """
        own, whole = self.mesh.device_mesh, self.sharers[0].mesh.device_mesh
        return whole if is_part_of(own, whole) else None

    @property
    def transport(self) -> Transport:
        """The transport that gathers the parameters from all ranks."""
        return self._transport

    @property
    def plan(self) -> GroupPlan:
        """How the group communicates. It is the same object until parameters or gradients are laid out anew."""
        gathers = tuple([buffers.plan for buffers in self.storage.buffers])
        reduces = tuple([bucket.plan for bucket in self.reducer.buckets])
        known = self._plan
        if known is None or not _are_same(gathers + reduces, known.gathers + known.reduces):
            way = transport_of(self.mesh.shard_group, self.mesh.device).way
            self._plan = GroupPlan(
                ", ".join(filter(None, (str(self.mesh), way))),
                tuple(ParamPlan(param.fqn, param.shape, param.requires_grad) for param in self.params),
                gathers,
                reduces,
                self.storage.extended,
            )
        assert self._plan is not None, "just made"
        return self._plan

    def _lay_out(self) -> None:
        self.is_prepared = False
        self._rests_in_place = False
        with _torch.plain_attributes():
            before = list(map(_torch.untyped_storage, self._sharded))
        self.storage.lay_out()
        with _torch.plain_attributes():
            after = list(map(_torch.untyped_storage, self._sharded))
        self._versioned = (*self._sharded, *[param.local for param in self.params])
        # A wrapper that `FSDPParam.lie_on` has moved to another device has a new storage: note it. Any other storage
        # stays as noted, so that `refuse_set_data` still finds a `.data` that the user has set.
        known = zip(self._storages, before, after, strict=True)
        self._storages = tuple([now if now is not was else noted for noted, was, now in known])

    def prepare(self, comm: FSDPCommContext) -> None:
        """Build everything that the hot path uses. Nothing is communicated.

        Raises:
            FSDPRuntimeError: a parameter is still on meta, or not where its shards live.
        """
        self.adopt_replaced()
        self.storage.check_devices(self.name)
        self.comm = comm
        # Buffers made under inference mode could never take part in training.
        with torch.inference_mode(False), torch.no_grad():
            self.storage.prepare(is_alone=is_alone(self.mesh.shard_group))
        self.reducer.name, self.reducer.of_root = self.name, self.of_root
        self.reducer.lay_out(self.params)
        self._bind_transports()
        self.is_prepared = True

    def _prepare_anew(self, comm: FSDPCommContext) -> None:
        """Prepare within an iteration, whose all-gathers have waited for compute only when it began."""
        if self.reducer.is_reducing:
            comm.finish_reduces()  # what is in flight was packed by the old plan
        self.prepare(comm)
        # Compute has written the new shard buffers, and may still use memory that was allocated just now.
        comm.gathers_follow_compute()

    def _name_exchanges(self) -> None:
        self.reducer.name, self.reducer.of_root = self.name, self.of_root
        self.reducer.name_exchanges()
        self._bind_transports()

    def _bind_transports(self) -> None:
        custom, post_forward = self.settings.custom_all_gather, self.storage.post_forward
        sizes = [f"{each.plan.param_dtype} {each.plan.layout.shard_numel}" for each in self.storage.buffers]
        sent = f"{sizes} {self.of_root}"
        what = label(f"the all-gather of '{self.name}'", sent)
        self._transport = transport_of(self.mesh.shard_group, self.mesh.device, custom, label=what)
        if post_forward is not None:
            what = label(f"the all-gather of '{self.name}' from fewer ranks", sent)
            group = post_forward.mesh.shard_group
            self._transport_among_neighbours = transport_of(group, self.mesh.device, custom, label=what)

    def configure(self, settings: GroupSettings) -> None:
        """Take other settings. Reductions in flight are finished with the old ones, if that makes a difference."""
        before = self.settings
        if self.comm is not None and (
            settings.changes_layout(before) or settings.denominator is not before.denominator
        ):
            self.comm.finish_reduces()
        if settings.gathers_on_compute is not before.gathers_on_compute:
            self.quiesce()  # kept shards and unsharded values lie in memory of the other stream
        if settings.custom_all_gather is not before.custom_all_gather and self._phase is ParamPhase.UNSHARDING:
            self.reshard()
        self.reducer.configure(settings)
        self.settings = settings
        custom = settings.custom_all_gather
        if custom is not before.custom_all_gather:
            with torch.inference_mode(False):
                self.storage.gather_with(None if custom is None else custom.allocate)
            self._bind_transports()
        if settings.keeps_unsharded_storage is not before.keeps_unsharded_storage:
            self._keep_unsharded_storage(settings.keeps_unsharded_storage)
        if settings.full_precision is not before.full_precision:
            self._compute_in_full_precision(settings.full_precision)

    def _compute_in_full_precision(self, full: bool) -> None:
        self.quiesce()
        for param in self.params:
            param.in_full_precision = full
        self._lay_out_anew()

    def rest_on_all_ranks(self) -> None:
        """Stop resharding to fewer ranks after forward, and drop what rests there now."""
        is_under_way = self._unsharding is not None and self._unsharding.resumes
        if is_under_way or self._phase is ParamPhase.SHARDED_POST_FORWARD:
            self.reshard()
        self.storage.post_forward = None

    def _keep_unsharded_storage(self, keep: bool) -> None:
        self.storage.keep_memory(keep)
        if not keep and self._phase in (ParamPhase.SHARDED, ParamPhase.SHARDED_POST_FORWARD):
            self._free_unsharded()

    def written(self) -> tuple[int, int]:
        """A value that changes with every visible write to the sharded parameters, on all ranks alike.

        Writes through ``to_local()`` count too, as local tensors have version counters of their own. All ranks must
        make such writes.
        """
        with _torch.plain_attributes():
            return self._write_counter.writes, sum(map(_torch.version_of, self._versioned))

    def note_write(self) -> None:
        """Note that the sharded parameters were written where no version counter sees it: by a captured graph."""
        self._write_counter.writes += 1
        WriteCounter.steps += 1

    def is_stale(self) -> bool:
        """Whether the sharded parameters were written since they were gathered, as far as `written` tells."""
        return self._gathered != self.written()

    def _sent_version(self) -> object:
        """A version of this rank's shards, for `Gather.copy_in`; None if they may be written without a trace."""
        if WriteCounter.unwatched:
            return None
        return self.written(), WriteCounter.steps

    def quiesce(self, *, frees: bool = True) -> None:
        """Reshard, and let the next gather cast the shards anew: the user may write them without a trace.

        Not ``frees``: values that `rest_in_place` has left stay, for the graph that reads them.
        """
        if frees or not self._rests_in_place:
            self.reshard(by_user=True)
        self.storage.forget_sent()

    # -- replaced parameters

    def adopt_replaced(self) -> None:
        """Take over sharded parameters that the user replaced, moved, converted, froze or unfroze.

        It does nothing unless the sharded parameters are registered. If values have moved, the buffers are rebuilt, and
        the plan if there was one.

        Raises:
            FSDPRuntimeError: a replacement is not a DTensor parameter of the same shape, mesh and placements.
        """
        if self.loan is not None or self._phase is not ParamPhase.SHARDED:
            return
        if self._registrations.hold_sharded() or self._adopt_in_place():
            return
        if self.comm is not None:
            self.comm.finish_reduces()  # what is in flight was packed by the old plan
        self._take_over(self._replacements())
        self._lay_out_anew()

    def _lay_out_anew(self) -> None:
        """Build buffers and, if there was one, the plan for what the parameters are now."""
        self._gathered = None
        self.storage.outdate()  # graphs that have saved the old values must be refused
        with torch.inference_mode(False):
            self._lay_out()
        if self.comm is not None and all(param.local.device == self.storage.offloading.device for param in self.params):
            self._prepare_anew(self.comm)  # else `unshard` does: the model is being moved, and may come back

    def refuse_loan(self, what: str) -> None:
        """Refuse ``what``, which needs the sharded parameters to be registered.

        Raises:
            FSDPRuntimeError: a `Loan` has registered others.
        """
        if self.loan is not None:
            raise FSDPRuntimeError(
                f"{what} of '{self.name}' inside of {self.loan.lender}, which has registered other parameters for as "
                "long as it lasts: do it after."
            )

    def _replacements(self) -> list[tuple[FSDPParam, nn.Parameter]]:
        """Each parameter with what is registered for it now. All are checked before anything is changed."""
        return [(param, param.registered()) for param in self.params]

    def _take_over(self, replacements: list[tuple[FSDPParam, nn.Parameter]]) -> None:
        for param, found in replacements:
            if found is not param.sharded:
                mark_replaced(param.sharded, found)
            param.adopt(found)
        self._take_sharded()
        self._registrations.expect_replaced()

    def _take_sharded(self) -> None:
        self._sharded = tuple([param.sharded for param in self.params])
        with _torch.plain_attributes():
            self._storages = tuple(map(_torch.untyped_storage, self._sharded))
        self._versioned = (*self._sharded, *[param.local for param in self.params])

    def _adopt_in_place(self) -> bool:
        """Take over parameters whose values did not move: frozen ones, and new wrappers, as model.to(device) makes.

        Unsharded parameters and buffers stay, so that this may be done between a forward and its backward.

        Returns:
            Whether nothing else has changed; if not, nothing was done.
        """
        replacements = self._replacements()
        if not all(param.lies_under(found) for param, found in replacements):
            return False
        if self.comm is not None:
            self.comm.finish_reduces()  # what is in flight was packed by the old plan
        was_stale = self.is_stale()
        self._take_over(replacements)
        self._gathered = self.written() if not was_stale else None
        self.storage.forget_sent()  # cast shards are kept by the versions of the old wrappers
        self._lay_out_gradients()
        return True

    def _lay_out_gradients(self) -> None:
        """Lay out the gradients anew: parameters were frozen or thawed."""
        if self.is_prepared:
            self.is_prepared = False  # it stays so if this raises: waiting gradients refuse another layout
            self.reducer.lay_out(self.params)
            self.is_prepared = True

    def _adopt_toggled(self) -> None:
        """Take over that parameters were frozen or thawed while they were unsharded: their backward begins."""
        if self.comm is not None:
            self.comm.finish_reduces()  # what is in flight was packed by the old plan
        for param in self.params:
            param.adopt_toggled()
        self._registrations.expect_replaced()
        self._lay_out_gradients()


def _are_same(ones: Sequence[object], others: Sequence[object]) -> bool:
    return len(ones) == len(others) and all(map(is_, ones, others))


def free_cleared_gradients(groups: Iterable[FSDPParamGroup]) -> None:
    """Free the memory of sharded gradients that have been cleared, and that nobody holds.

    It is called between passes, or by hooks on delivered gradients. While a graph is captured the memory stays, for
    ever. If the optimizer may still be reading it on a stream of its own, it stays until the next forward.
    """
    by_comm: dict[FSDPCommContext, list[tuple[FSDPParamGroup, list[GradientBuffer]]]] = {}
    for group in groups:
        cleared = group.reducer.cleared_buffers()
        # After an exception a reduction may still write there: the next iteration waits for it first.
        if cleared and group.comm is not None and not group.comm.was_interrupted:
            by_comm.setdefault(group.comm, []).append((group, cleared))
    for comm, together in by_comm.items():
        if comm.device.is_capturing():  # what is captured writes there in every replay
            for _, cleared in together:
                for buffer in cleared:
                    if not buffer.stays:
                        comm.held_for_graphs.append(buffer)
                    buffer.stays = True
            continue
        if comm.device.has_streams and comm.may_be_read_elsewhere():
            continue
        for _, cleared in together:
            for buffer in cleared:
                buffer.release()
