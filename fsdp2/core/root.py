"""`FSDPRoot`: what the outermost sharded module owns: the communication context, the learned orders, the iteration.

It decides when a pass begins and ends. It talks to groups and to states, not to modules.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fsdp2 import _torch
from fsdp2.core.backward import WatchedParameters
from fsdp2.core.buffers import ALLOCATOR
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.group import FSDPParamGroup, free_cleared_gradients
from fsdp2.core.hooks import on_real_parameters
from fsdp2.core.options import RootSettings
from fsdp2.core.places import PLACE
from fsdp2.core.prefetch import JOINING, JoiningSchedule, LearnedOrder, Schedule, Unit
from fsdp2.core.reduce import GradientReducer
from fsdp2.core.several_roots import SharedComm

if TYPE_CHECKING:
    from fsdp2.core.state import FSDPState

ON_ROOT: list[Callable[[Sequence[Any], Sequence[FSDPParamGroup]], None]] = []
"""A port: called when a root forms, with its states and their groups."""

ON_TRAINING: list[Callable[[Any], None]] = []
"""A port: called with a root when its first forward with gradients begins. If one raises, all are called again."""


@dataclass(slots=True)
class Iteration:
    """All state of one iteration, replaced as a whole when it has ended or failed.

    Attributes:
        in_forward: the root's forward is running.
        in_backward: a backward has begun and has not come to its end.
        creates_graph: that backward is recorded, to be differentiated itself, and so needs the parameters again.
        is_second: that backward differentiates a recorded one.
        unfinalized: a backward has come to its end, and waits for ``finalize_backward``.
        failed: an exception left a forward.
        reduced: gradients were reduced, in which all ranks take part.
        ahead: groups that were gathered ahead and have not been used yet.
        following: a unit, and the units to gather ahead when the backward of that unit has ended.
        recomputed: the unit that a recompute has left unsharded for its backward, see `Schedule.keep_for_backward`.
        gathered: the root's forward has issued an all-gather.
    """

    in_forward: bool = False
    in_backward: bool = False
    creates_graph: bool = False
    is_second: bool = False
    unfinalized: bool = False
    failed: bool = False
    reduced: bool = False
    gathered: bool = False
    ahead: set[FSDPParamGroup] = field(default_factory=set)
    following: tuple[Unit, Sequence[Unit]] | None = None
    recomputed: Unit | None = None


class FSDPRoot:
    """Runs the iterations of one root module, for the states of all sharded modules below it.

    Attributes:
        name: class name of the root module, for messages.
        owner: the state of the root module.
        states: the states of all sharded modules below, the owner first.
        groups: the groups of all these states, in the order of the modules.
        shared: the groups whose weights are tied across `fully_shard` calls.
        settings: what the user has set on the root.
        shared_comm: where other roots find the communication context, if they share it.
        restarts: `Place.restarts` when this root last looked; if it has grown, all ranks have left a step together.
        watched: the unsharded parameters at which a backward is noticed that begins at no module output.
        parameters: a cache of `optim/model_parameters.py`, which must be dropped together with the root.
        is_disturbed: another root has claimed modules of this one, which must claim them back before its next forward.
        has_trained: a forward with gradients has begun.
        learned: the schedule that follows the order of earlier steps.
        schedule: the one in use: `learned`, or a `JoiningSchedule` where ranks run different modules.
    """

    def __init__(
        self,
        owner: FSDPState,
        states: Sequence[FSDPState],
        shared: SharedComm,
        groups: Sequence[FSDPParamGroup],
        settings: RootSettings,
    ) -> None:
        assert shared.comm is not None, "a root has a communication context"
        self.name = owner.class_name
        self.owner = owner
        self.states = tuple(states)
        self.shared_comm = shared
        self.comm = shared.comm
        self.groups = tuple(groups)
        self.settings = settings
        if settings.pools_memory is not None:
            self.comm.pool_memory(settings.pools_memory)
        self.shared: Unit = tuple(group for group in groups if group.is_shared)
        self.is_disturbed = False
        self.has_trained = False
        self.parameters: Any = None
        self.restarts = PLACE.restarts
        passes = ("forward of", "after the forward of", "backward of", "after the backward of", "compiled call of")
        self._phases = [f"{each} {self.name}" for each in passes]
        self.watched = WatchedParameters(self.begin_backward)
        self.iteration = Iteration()
        self.learned = LearnedOrder(self)
        self.schedule: Schedule = self.learned
        self._joined: JoiningSchedule | None = None

    # -- forward

    def begin_training(self) -> None:
        """The first forward with gradients begins: run the checks of `ON_TRAINING`. Collective."""
        for action in ON_TRAINING:
            action(self)
        self.has_trained = True

    @property
    def post_optim_event(self) -> Any:
        """The event that the next forward's all-gathers wait for, instead of all work issued to compute so far."""
        return self.comm.post_optim_event

    @post_optim_event.setter
    def post_optim_event(self, event: Any) -> None:
        """Set the event, for one iteration: the next forward consumes it."""
        self.comm.post_optim_event = event

    def begin_forward(self) -> None:
        """The root's forward begins, outside of any backward."""
        self.comm.refuse_unfinished_handle("a forward")
        if not self.has_trained and torch.is_grad_enabled():
            self.begin_training()
        if self.settings.divergence == "join" or self.schedule is not self.learned:
            self.schedule = self._joining() if self.settings.divergence == "join" else self.learned
        self.schedule.begin_forward()
        # An iteration is not replaced here: several forwards may come before the backward that ends it.
        self.iteration.in_forward, self.iteration.gathered = True, False
        PLACE.step, PLACE.thread = PLACE.step + 1, threading.get_ident()
        PLACE.phase, PLACE.left, PLACE.tells = self._phases[0], "", self.settings.aborts_together
        event, self.comm.post_optim_event = self.comm.post_optim_event, None
        if self.comm.device.has_streams:
            self.comm.begin_forward()
            if event is not None:
                self.comm.compute_follows(event)
        # Compute has joined the optimizer's stream just now, so nobody reads the cleared gradients any more.
        free_cleared_gradients(self.groups)
        for group in self.groups:
            group.begin_iteration(ends_by_itself=not self.settings.finalizes_manually)
        if self.groups:
            self.comm.max_pending_reduces = max(group.settings.max_pending for group in self.groups)
        if not self.comm.device.has_streams or all([group.storage.gathers_nothing for group in self.groups]):
            return
        # All-gathers must see what the optimizer has written. Without an event they wait for all that compute has;
        # with one they overlap with what the program has issued since, such as the copy of the next batch.
        if event is None:
            self.comm.gathers_follow_compute()
        else:
            self.comm.gathers_follow(event)

    def begin_compiled_call(self) -> None:
        """A forward begins that is one compiled graph, which tells neither its end nor its backward."""
        PLACE.step, PLACE.thread = PLACE.step + 1, threading.get_ident()
        PLACE.phase = self._phases[4]
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None and self.comm.device.has_streams:
            self.comm.compute_follows(event)

    def join_step(self) -> None:
        """This rank runs nothing, or nothing more, in a step: take part in the collectives of the other ranks."""
        self.schedule = self._joining()
        self.schedule.join_step()

    def _joining(self) -> JoiningSchedule:
        self._joined = self._joined or JOINING.filling(self)
        return self._joined

    def join(self) -> None:
        """A sharded module is used outside of the root's forward: its gathers must see what compute has written."""
        self.comm.refuse_unfinished_handle("a forward")
        if self.comm.device.has_streams:
            self.comm.begin_forward()
        self.comm.gathers_follow_compute()

    def end_forward(self) -> None:
        """The root's forward has ended: reshard what was gathered ahead in vain."""
        self.schedule.end_forward()
        self.end_rounds()
        self.iteration.in_forward = False
        PLACE.phase = self._phases[1]
        self.schedule.drop_ahead()
        # The user's code may write offloaded shards next. With gradients the end of the backward waits for copies of
        # them, and so does whatever the engine lets write them before that (see `FSDPState.quiesce`).
        if not torch.is_grad_enabled():
            self.comm.let_host_write_shards()

    def end_rounds(self) -> None:
        """The root's forward is over: reshard lists of modules of which not all were called."""
        for state in self.states:
            if state.round.to_run:
                state.end_round()

    # -- backward

    def begin_backward(self) -> None:
        """A hook of a backward runs. If it is the first one, arrange that the end of this backward is noticed."""
        if not self.iteration.in_backward:
            self.comm.refuse_unfinished_handle("a backward")
            self.iteration.in_backward = True
            PLACE.phase = self._phases[2]
            # Autograd enables gradients inside of a backward only under create_graph=True.
            self.iteration.creates_graph = torch.is_grad_enabled()
            self.schedule.begin_backward(is_recorded=self.iteration.creates_graph)
            # Gradients that add up in host memory come back to the device in the last backward only.
            is_last = self.settings.is_last_backward or self.settings.finalizes_manually
            for group in self.groups:
                group.reducer.is_last = is_last
            # Autograd calls it when the whole backward is done, also if no hook has noticed the end of some modules.
            _torch.queue_backward_callback(functools.partial(on_real_parameters, self._end_backward))

    def reduce_shared(self, *, only_keeps: bool = False) -> None:
        """Reduce the shared groups that the backward has come to: it is over for all of their modules. Collective.

        ``only_keeps``: leave out groups that reduce, so that only gradients are kept and nothing is communicated.
        """
        for group in self.shared:
            if only_keeps and group.settings.requires_gradient_sync:
                continue
            if group.took_part or group.reducer.is_due():
                group.took_part = False
                if group.reduce_or_keep():
                    self.iteration.reduced = True

    def _end_backward(self) -> None:
        self.schedule.end_backward()
        # Before modules are finished below: these reshard, unless this backward was recorded and its graph reads on.
        self.watched.holds_graph, self.iteration.is_second = self.iteration.creates_graph, False
        if self.settings.finalizes_manually:
            # Further backwards may come before finalize_backward(), so nothing is reduced. The reducers are noted, so
            # that zero_grad() reaches gradients that are in no `.grad` yet.
            for state in self.states:
                state.backward.pause()
            self.reduce_shared(only_keeps=True)
            GradientReducer.owing.update(group.reducer for group in self.groups)
            self.iteration.in_backward = False
            self.iteration.unfinalized = True
            PLACE.phase = self._phases[3]
            self.schedule.end_pass()
            return
        self.finalize()
        if self.settings.is_last_backward:
            self.comm.finish_reduces()
        self._end_iteration()

    def _end_iteration(self) -> None:
        self.schedule.end_pass()
        if self.iteration.reduced:
            # All ranks take part in a reduction, so all of them have come to it by the same order of gathers.
            self.learned.commit()
            if self.comm.device.has_streams or self.comm.gather_arena is not ALLOCATOR:
                self.comm.end_step()
        self.comm.let_host_write_shards()
        PLACE.phase, PLACE.failure = self._phases[3], ""
        self.watched.hold_graph(self.watched.holds_graph, self.groups, in_forward=self.iteration.in_forward)
        ended = self.next_iteration()
        # A backward inside the root's forward does not end that, nor one after a forward that failed its failure.
        self.iteration.in_forward = ended.in_forward
        self.iteration.failed, self.iteration.gathered = ended.failed, ended.in_forward and ended.gathered

    def next_iteration(self) -> Iteration:
        """Replace the state of the iteration by a fresh one. Returns the iteration that has ended."""
        ended, self.iteration = self.iteration, Iteration()
        return ended

    # -- finalization by the user

    def finalize(self) -> None:
        """The backward is final: reduce and reshard what is left. Collective, asynchronous."""
        for state in self.states:
            state.backward.finish()
        on_real_parameters(self.reduce_shared)

    def wait_for_finalization(self) -> None:
        """Wait for the reductions of a finalized backward, and end the iteration."""
        self.comm.finish_reduces()
        self._end_iteration()

    # -- between iterations

    def is_running(self) -> bool:
        """Whether a forward or a backward is running, or waits for ``finalize_backward``."""
        iteration = self.iteration
        runs = iteration.in_forward or iteration.in_backward or iteration.unfinalized
        return runs or _torch.backward_is_running()

    def finish(self) -> None:
        """Recover from a failure, and wait for the reductions in flight."""
        recover_if_failed(self)
        self.comm.finish_reduces()

    def dissolve(self) -> None:
        """End this root: the modules below find a root anew in their next forward."""
        self.owner.forget_root()

    def leave_recording(self) -> None:
        """A graph capture was given up: nothing that was issued in it ran, so nothing of it must be waited for."""
        self.post_optim_event = None
        self.comm.forget_events()
        for group in self.groups:
            group.forget_event()
