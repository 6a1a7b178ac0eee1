"""`FSDPRoot`: what the outermost sharded module owns: the communication context, the learned orders, the iteration.

Decides when groups are gathered ahead and when a pass begins, ends or has failed. Talks to groups, not to modules.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fsdp2 import _torch
from fsdp2.core.backward import WatchedParameters
from fsdp2.core.buffers import ALLOCATOR
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.group import FSDPParamGroup, free_cleared_gradients
from fsdp2.core.hooks import on_real_parameters
from fsdp2.core.options import RootSettings
from fsdp2.core.places import PLACE
from fsdp2.core.ports import Port, missing
from fsdp2.core.reduce import GradientReducer
from fsdp2.core.schedule import ExecutionOrder
from fsdp2.core.several_roots import SharedComm
from fsdp2.errors import ParamPhase

if TYPE_CHECKING:
    from fsdp2.core.state import FSDPState

PREFETCH_DEPTH = 1
"""How many units are gathered ahead of the one that computes, unless the user has set a budget."""

MAX_PREFETCH_DEPTH = 16
"""How many at most within a budget."""

Unit = tuple[FSDPParamGroup, ...]
"""The groups of one `fully_shard` call, one per mesh: they are needed together. Empty without parameters."""


ON_ROOT: list[Callable[[Sequence[Any], Sequence[FSDPParamGroup]], None]] = []
"""A port: called when a root forms, with its states and their groups."""

ON_TRAINING: list[Callable[[Any], None]] = []
"""A port: called with a root when its first forward with gradients begins, and again if one of them raises."""


class Walk(Protocol):
    """The exchanges of a step in an order that is agreed upon, where ranks run different modules on purpose."""

    def begin_forward(self) -> None:
        """The root's forward begins. Collective if the order is another one than before."""

    def enter_forward(self, state: Any) -> None:
        """Gather the unit of ``state``, after what comes before it. Collective."""

    def end_forward(self) -> None:
        """The root's forward has ended: gather what is left. Collective."""

    def forward_failed(self) -> None:
        """An exception has left the root's forward: let go what is held for the modules that it was in."""

    def begin_backward(self, *, is_recorded: bool) -> None:
        """A backward begins."""

    def enter_backward(self, state: Any) -> None:
        """Gather the unit of ``state``, after what comes before it in backward. Collective."""

    def leave_backward(self, state: Any) -> None:
        """All gradients of ``state`` have been computed. Collective."""

    def end_backward(self) -> None:
        """The backward has ended: gather and reduce what is left. Collective."""

    def join_step(self) -> None:
        """This rank has nothing to run. Collective."""

    def abandon(self) -> None:
        """What has begun is dropped: the next step begins anew."""


WALK: Port[Callable[[Any], Walk]] = Port(missing("divergence"))
"""Makes one, of a root."""

Prefetch = tuple[Unit, ...] | None
"""The units that are gathered after one, as the user has it; None: those that are expected to come."""


class Iteration:
    """All state of one iteration, replaced as a whole when it has ended or failed.

    Attributes:
        in_forward: the root's forward is running.
        in_backward: a backward has begun and has not come to its end.
        creates_graph: that backward is recorded, to be differentiated itself, and so needs the parameters again.
        is_second: that backward differentiates a recorded one.
        unfinalized: a backward has come to its end, and waits for ``finalize_backward``.
        failed: an exception left a forward.
        order: the order that the root's forward follows.
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
        "order",
        "recomputed",
        "reduced",
        "trained",
        "unfinalized",
    )

    def __init__(self) -> None:
        self.order: ExecutionOrder[Unit] | None = None
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
        orders: that forwards, evaluations and backwards were learned to follow.
        watched: at which parameters a backward is noticed that begins at no output.
        parameters: what `optim/model_parameters.py` knows of the parameters below; here, as it must go with the root.
        is_disturbed: another root has claimed modules of this one, which must claim them back before its next forward.
        has_trained: a forward with gradients has begun.
        walk: in which order ranks exchange that run different modules; None where all are to run the same.
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
        self.walk: Walk | None = None
        self.parameters: Any = None
        self.restarts = PLACE.restarts
        passes = ("forward of", "after the forward of", "backward of", "after the backward of", "compiled call of")
        self._phases = [f"{each} {self.name}" for each in passes]
        self.watched = WatchedParameters(self.begin_backward)
        self.iteration = Iteration()
        self._forward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self.evaluation_order: ExecutionOrder[Unit] = ExecutionOrder()
        self._backward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self.orders = (self._forward_order, self.evaluation_order, self._backward_order)

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
        if self.settings.divergence == "join" or self.walk is not None:
            self._take_walk()
        self.iteration.in_forward, self.iteration.trained, self.iteration.gathered = True, False, False
        PLACE.step, PLACE.thread = PLACE.step + 1, threading.get_ident()
        PLACE.phase, PLACE.left, PLACE.tells = self._phases[0], "", self.settings.aborts_together
        self.iteration.order = self._forward_order if torch.is_grad_enabled() else self.evaluation_order
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

    def _take_walk(self) -> None:
        if self.settings.divergence != "join":
            self.walk = None
            return
        self.walk = self.walk or WALK.filling(self)
        self.walk.begin_forward()

    def join_step(self) -> None:
        """This rank has nothing to run in a step, or no more: others have. Collective."""
        self.walk = self.walk or WALK.filling(self)
        self.walk.join_step()

    @property
    def learned_order(self) -> tuple[Unit, ...]:
        """In which order the last step that all ranks have run came to the units; empty before."""
        return self._forward_order.learned

    @property
    def learned_backward_order(self) -> tuple[Unit, ...]:
        """The same of its backward."""
        return self._backward_order.learned

    def join(self) -> None:
        """A grouped module is used outside the root's forward: its gathers must see what compute has written."""
        self.comm.refuse_unfinished_handle("a forward")
        if self.comm.device.has_streams:
            self.comm.begin_forward()
        self.comm.gathers_follow_compute()

    def gather_for_forward(self, unit: Unit, then: Sequence[Unit] | None) -> None:
        """Gather ``unit``, and ahead of its compute the units that come ``then``, or are expected to. Collective."""
        iteration = self.iteration
        self._gather(unit)
        if iteration.in_forward and iteration.order is not None:
            expected = self._advance(iteration.order, unit)
            self._gather_ahead(expected if then is None else then)

    def _advance(self, order: ExecutionOrder[Unit], unit: Unit) -> Sequence[Unit]:
        """Note that ``unit`` is needed now; returns what is to be gathered ahead if the user says nothing."""
        if self.settings.prefetch_bytes is None:
            return order.advance(unit, depth=PREFETCH_DEPTH)
        return self.within_budget(order.advance(unit, depth=MAX_PREFETCH_DEPTH))

    def within_budget(self, upcoming: Sequence[Unit]) -> Sequence[Unit]:
        """As many of ``upcoming`` as are to be gathered ahead."""
        budget = self.settings.prefetch_bytes
        if budget is None:
            return upcoming[:PREFETCH_DEPTH]
        within: list[Unit] = []
        for unit in upcoming[:MAX_PREFETCH_DEPTH]:
            budget -= sum(group.storage.unsharded_bytes for group in unit)
            if budget < 0:
                break
            within.append(unit)
        return within

    def gather_in_turn(self, unit: Unit, then: Sequence[Unit], *, for_backward: bool = False) -> None:
        """Gather ``unit`` and what is to be gathered ahead of what comes ``then``. Collective."""
        self._gather(unit, for_backward=for_backward)
        self._gather_ahead(self.within_budget(then), for_backward=for_backward)

    def _gather(self, unit: Unit, *, for_backward: bool = False) -> None:
        ahead = self.iteration.ahead
        for group in unit:
            if group.unshard(for_backward=for_backward):
                self.iteration.gathered = True
            if ahead:
                ahead.discard(group)
        for group in unit:  # their staging buffers are gone before the next one is allocated
            group.wait_for_unshard()

    def _gather_ahead(self, upcoming: Sequence[Unit], *, for_backward: bool = False) -> None:
        for unit in upcoming:
            for group in unit:
                if group.storage.gathers_nothing:
                    continue
                if not for_backward or group.settings.unshards_in_backward:
                    if _torch.profiler._is_profiler_enabled:
                        way = "backward" if for_backward else "forward"
                        with _torch.in_range(f"FSDP::{way}_prefetch for {group.name}"):
                            gathers = group.unshard(for_backward=for_backward, is_prefetch=True)
                    else:
                        gathers = group.unshard(for_backward=for_backward, is_prefetch=True)
                    if gathers:  # else it was there, or is not needed
                        self.iteration.ahead.add(group)

    def end_forward(self) -> None:
        """The root's forward has ended: drop what was gathered in vain.

        Its order is learned at the end of a backward that reduced gradients. Before, another rank may yet fail, not
        learn it, and predict something else. After an evaluation nothing later would tell: see `ExecutionOrder.settle`.
        """
        if self.walk is not None:
            self.walk.end_forward()
        self.end_rounds()
        self.iteration.in_forward = self.iteration.trained = False
        PLACE.phase = self._phases[1]
        self._forward_order.end()
        if self.iteration.gathered:
            self.evaluation_order.settle()
        else:  # ranks may run what is there already in ways of their own
            self.evaluation_order.abandon()
        self._drop_ahead()
        if not torch.is_grad_enabled():  # else the end of backward does, or whatever writes before that
            self.comm.let_host_write_shards()

    def end_rounds(self) -> None:
        """The root's forward is over: of lists of modules not all may have been called."""
        for state in self.states:
            state.end_round()

    def _drop_ahead(self) -> None:
        for group in self.groups:
            if group in self.iteration.ahead and not group.users:
                if self.watched.holds_graph and group.phase is ParamPhase.UNSHARDED:
                    continue  # which the graph may read
                group.reshard()
                self.comm.let_host_write_shards()
        self.iteration.ahead.clear()

    # -- backward

    def begin_backward(self) -> None:
        """Some backward hook runs: arrange for the end of this backward, once."""
        if not self.iteration.in_backward:
            self.comm.refuse_unfinished_handle("a backward")
            self.iteration.in_backward = True
            PLACE.phase = self._phases[2]
            self.iteration.creates_graph = torch.is_grad_enabled()
            if self.walk is not None:
                self.walk.begin_backward(is_recorded=self.iteration.creates_graph)
            is_last = self.settings.is_last_backward or self.settings.finalizes_manually
            for group in self.groups:
                group.reducer.is_last = is_last
            self._backward_order.expect(self._forward_order.learned[::-1])
            _torch.queue_backward_callback(functools.partial(on_real_parameters, self._end_backward))

    def gather_for_backward(self, unit: Unit, then: Sequence[Unit] | None) -> None:
        """Gather ``unit`` and, ahead of its backward, the units that come ``then``, or are expected to. Collective."""
        if self.comm.device.has_streams:
            self.comm.free_packed()
        iteration = self.iteration
        if iteration.recomputed is unit:
            iteration.recomputed = None
        needed = unit
        for group in unit:
            if not group.settings.unshards_in_backward:
                needed = tuple(each for each in unit if each.settings.unshards_in_backward)
        self._gather(needed, for_backward=True)
        expected = self._advance(self._backward_order, unit)
        if then is None and self.settings.backward_prefetch != "before":
            iteration.following = (unit, expected) if self.settings.backward_prefetch == "after" else None
            return
        self._gather_ahead(expected if then is None else then, for_backward=True)

    def gather_following(self, unit: Unit) -> None:
        """The backward of ``unit`` has ended: gather what comes next, if that was to wait for it. Collective."""
        following, self.iteration.following = self.iteration.following, None
        if following is not None and following[0] is unit:
            self._gather_ahead(following[1], for_backward=True)

    def gather_for_recompute(self, unit: Unit) -> None:
        """Gather ``unit`` for a recompute in backward, which is no part of the learned orders. Collective."""
        if self.iteration.recomputed is unit:
            self.iteration.recomputed = None
        else:
            self.keep_for_backward(None)
        self._gather(unit, for_backward=True)

    def gather_for_second_backward(self, unit: Unit) -> None:
        """Gather ``unit`` for the differentiation of a recorded backward, if it is not there any more. Collective."""
        self._gather(unit, for_backward=True)

    def keep_for_backward(self, unit: Unit | None) -> None:
        """Leave ``unit`` unsharded after its recompute, instead of the one before.

        The last unit that is recomputed is the first whose backward follows; the others are resharded.
        """
        iteration = self.iteration
        kept, iteration.recomputed = iteration.recomputed, unit
        if kept is not None and kept is not unit:
            if self.watched.holds_graph or iteration.creates_graph or iteration.is_second:
                return
            for group in kept:
                if not group.users:
                    group.reshard()

    def reduce_or_keep(self, unit: Unit) -> None:
        """Issue the reductions of a unit's gradients, or leave them unsharded, as the user has set. Collective."""
        for group in unit:
            if group.reducer.frozen:
                group.reducer.refuse_unexpected()
            if not group.reducer.is_trainable:
                continue
            if group.settings.requires_gradient_sync:
                group.reduce()
                self.iteration.reduced = True
            else:
                group.reducer.keep_unsharded()

    def reduce_shared(self, *, only_keeps: bool = False) -> None:
        """`reduce_or_keep` the shared groups that the backward, which is over, has come to. Collective."""
        for group in self.shared:
            if only_keeps and group.settings.requires_gradient_sync:
                continue
            if group.took_part or group.reducer.is_due():
                group.took_part = False
                self.reduce_or_keep((group,))

    def _end_backward(self) -> None:
        if self.walk is not None:
            self.walk.end_backward()
        self.watched.holds_graph, self.iteration.is_second = self.iteration.creates_graph, False
        if self.settings.finalizes_manually:
            for state in self.states:
                state.backward.pause()
            self.reduce_shared(only_keeps=True)
            GradientReducer.owing.update(group.reducer for group in self.groups)
            self.iteration.in_backward = False
            self.iteration.unfinalized = True
            PLACE.phase = self._phases[3]
            self.keep_for_backward(None)
            self._drop_ahead()
            self._backward_order.end()
            return
        self.finalize()
        if self.settings.is_last_backward:
            self.comm.finish_reduces()
        self._end_iteration()

    def _end_iteration(self) -> None:
        self.keep_for_backward(None)
        self._drop_ahead()
        self._backward_order.end()
        if self.iteration.reduced:
            self._forward_order.commit()
            self._backward_order.commit()
            if self.comm.device.has_streams or self.comm.gather_arena is not ALLOCATOR:
                self.comm.end_step()
        self.comm.let_host_write_shards()
        PLACE.phase, PLACE.failure = self._phases[3], ""
        self.watched.hold_graph(self.watched.holds_graph, self.groups, in_forward=self.iteration.in_forward)
        ended = self.next_iteration()
        # A backward inside the root's forward does not end that, nor one after a forward that failed its failure.
        self.iteration.in_forward, self.iteration.order = ended.in_forward, ended.order
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
