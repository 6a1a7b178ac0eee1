"""`FSDPRoot`: what the outermost sharded module owns: the communication context, the learned orders, the iteration.

Decides when groups are gathered ahead and when a pass begins, ends or has failed. Talks to groups, not to modules.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
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
"""A port: called with a root when its first forward with gradients begins, and again if one of them raises."""


class Iteration:
    """All state of one iteration, replaced as a whole when it has ended or failed.

    Attributes:
        in_forward: the root's forward is running.
        in_backward: a backward has begun and has not come to its end.
        creates_graph: that backward is recorded, to be differentiated itself, and so needs the parameters again.
        is_second: that backward differentiates a recorded one.
        unfinalized: a backward has come to its end, and waits for ``finalize_backward``.
        failed: an exception left a forward.
        reduced: gradients were reduced, which takes all ranks.
        ahead: groups that were gathered ahead and have not been used yet.
        following: a unit, and what is to be gathered ahead when its backward has ended.
        recomputed: the unit that a recompute in backward has left unsharded for its own backward, see `keep`.
        gathered: the root's forward has gathered something.
        trained: a backward that reduced has ended inside of the root's forward, or of a method that calls it, which
            trains by itself.
    """

    __slots__ = (
        "ahead",
        "creates_graph",
        "failed",
        "following",
        "gathered",
        "in_backward",
        "in_forward",
        "is_second",
        "recomputed",
        "reduced",
        "trained",
        "unfinalized",
    )

    def __init__(self) -> None:
        self.reduced = self.trained = self.gathered = False
        self.in_forward = False
        self.in_backward = False
        self.creates_graph = False
        self.is_second = False
        self.unfinalized = False
        self.failed = False
        self.ahead: set[FSDPParamGroup] = set()
        self.following: tuple[Unit, Sequence[Unit]] | None = None
        self.recomputed: Unit | None = None


class FSDPRoot:
    """Shared by the states of all sharded modules below one root.

    Attributes:
        name: class name of the root module, for messages.
        owner: whose module that is.
        states: those of all sharded modules below it, its owner first.
        groups: all groups, in the order of the modules.
        shared: those of them that modules of several calls use.
        settings: what the user has set on it.
        shared_comm: where other roots find the communication context, if they share it.
        restarts: how often all ranks had left a step together when this root last noticed.
        watched: at which parameters a backward is noticed that begins at no output.
        parameters: what `optim/model_parameters.py` knows of the parameters below; here, as it must go with the root.
        is_disturbed: another root has claimed modules of this one, which must claim them back before its next forward.
        has_trained: a forward with gradients has begun.
        learned: the order that its steps have followed.
        schedule: what is gathered when: by `learned`; or where ranks run different modules, by what they agreed on.
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
        """The first forward with gradients begins: what is to be so by then is looked at. Collective."""
        for action in ON_TRAINING:
            action(self)
        self.has_trained = True

    @property
    def post_optim_event(self) -> Any:
        """What the next forward's all-gathers wait for, instead of all that compute has been given."""
        return self.comm.post_optim_event

    @post_optim_event.setter
    def post_optim_event(self, event: Any) -> None:
        """To be set for each iteration."""
        self.comm.post_optim_event = event

    def begin_forward(self) -> None:
        """The root's forward begins, outside of any backward."""
        self.comm.refuse_unfinished_handle("a forward")
        if not self.has_trained and torch.is_grad_enabled():
            self.begin_training()
        if self.settings.divergence == "join" or self.schedule is not self.learned:
            self.schedule = self._joining() if self.settings.divergence == "join" else self.learned
        self.schedule.begin_forward()
        self.iteration.in_forward, self.iteration.trained, self.iteration.gathered = True, False, False
        PLACE.step, PLACE.thread = PLACE.step + 1, threading.get_ident()
        PLACE.phase, PLACE.left, PLACE.tells = self._phases[0], "", self.settings.aborts_together
        event, self.comm.post_optim_event = self.comm.post_optim_event, None
        if self.comm.device.has_streams:
            self.comm.begin_forward()
            if event is not None:
                self.comm.compute_follows(event)
        free_cleared_gradients(self.groups)
        for group in self.groups:
            group.begin_iteration(ends_by_itself=not self.settings.finalizes_manually)
        if self.groups:
            self.comm.max_pending_reduces = max(group.settings.max_pending for group in self.groups)
        if not self.comm.device.has_streams or all([group.storage.gathers_nothing for group in self.groups]):
            return
        if event is None:
            self.comm.gathers_follow_compute()
        else:
            self.comm.gathers_follow(event)

    def begin_compiled_call(self) -> None:
        """A forward begins that is one graph; neither its end nor its backward will be told."""
        PLACE.step, PLACE.thread = PLACE.step + 1, threading.get_ident()
        PLACE.phase = self._phases[4]
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None and self.comm.device.has_streams:
            self.comm.compute_follows(event)

    def join_step(self) -> None:
        """This rank has nothing to run in a step, or no more: others have. Collective."""
        self.schedule = self._joining()
        self.schedule.join_step()

    def _joining(self) -> JoiningSchedule:
        self._joined = self._joined or JOINING.filling(self)
        return self._joined

    def join(self) -> None:
        """A grouped module is used outside the root's forward: its gathers must see what compute has written."""
        self.comm.refuse_unfinished_handle("a forward")
        if self.comm.device.has_streams:
            self.comm.begin_forward()
        self.comm.gathers_follow_compute()

    def end_forward(self) -> None:
        """The root's forward has ended: drop what was gathered in vain."""
        self.schedule.end_forward()
        self.end_rounds()
        self.iteration.in_forward = self.iteration.trained = False
        PLACE.phase = self._phases[1]
        self.schedule.drop_ahead()
        if not torch.is_grad_enabled():  # else the end of backward does, or whatever writes before that
            self.comm.let_host_write_shards()

    def end_rounds(self) -> None:
        """The root's forward is over: of lists of modules not all may have been called."""
        for state in self.states:
            if state.round.to_run:
                state.end_round()

    # -- backward

    def begin_backward(self) -> None:
        """Some backward hook runs: arrange for the end of this backward, once."""
        if not self.iteration.in_backward:
            self.comm.refuse_unfinished_handle("a backward")
            self.iteration.in_backward = True
            PLACE.phase = self._phases[2]
            self.iteration.creates_graph = torch.is_grad_enabled()
            self.schedule.begin_backward(is_recorded=self.iteration.creates_graph)
            is_last = self.settings.is_last_backward or self.settings.finalizes_manually
            for group in self.groups:
                group.reducer.is_last = is_last
            _torch.queue_backward_callback(functools.partial(on_real_parameters, self._end_backward))

    def reduce_shared(self, *, only_keeps: bool = False) -> None:
        """End the backward of the shared groups that it has come to, and is over for. Collective."""
        for group in self.shared:
            if only_keeps and group.settings.requires_gradient_sync:
                continue
            if group.took_part or group.reducer.is_due():
                group.took_part = False
                if group.reduce_or_keep():
                    self.iteration.reduced = True

    def _end_backward(self) -> None:
        self.schedule.end_backward()
        self.watched.holds_graph, self.iteration.is_second = self.iteration.creates_graph, False
        if self.settings.finalizes_manually:
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
        is_inside = ended.in_forward or self.owner.calls > 0
        self.iteration.trained = is_inside and (ended.reduced or ended.trained)

    def next_iteration(self) -> Iteration:
        """Begin anew. Returns the iteration that has ended."""
        ended, self.iteration = self.iteration, Iteration()
        return ended

    # -- finalization by the user

    def finalize(self) -> None:
        """The user says that backward has ended: reduce and reshard what is left. Collective, asynchronous."""
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
        """Let the modules below find a root anew, in their next forward."""
        self.owner.forget_root()

    def leave_recording(self) -> None:
        """A graph was given up while it was recorded: nothing that was issued ran, nothing of it is waited for."""
        self.post_optim_event = None
        self.comm.forget_events()
        for group in self.groups:
            group.forget_event()
