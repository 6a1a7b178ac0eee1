"""What is gathered when: the unit that is needed now, and ahead of its compute those that are expected next.

`Schedule` gathers; its kinds decide what comes next. `LearnedOrder` predicts it from the steps before; the feature
``set_divergence("join")`` brings another, for ranks that run different modules on purpose. A prefetch is decided in
`LearnedOrder.enter_forward` and `enter_backward`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.ports import Port, missing
from fsdp2.core.schedule import ExecutionOrder
from fsdp2.errors import ParamPhase

if TYPE_CHECKING:
    from fsdp2.core.root import FSDPRoot
    from fsdp2.core.state import FSDPState

PREFETCH_DEPTH = 1
"""How many units are gathered ahead of the one that computes, unless the user has set a budget."""

MAX_PREFETCH_DEPTH = 16
"""How many units are gathered ahead at most, if the user has set a budget in bytes."""

Unit = tuple[FSDPParamGroup, ...]
"""The groups of one `fully_shard` call, one per mesh: they are needed together. Empty without parameters."""

Prefetch = tuple[Unit, ...] | None
"""The units to gather ahead while one computes, as the user has set them; None: those that are expected to come."""


class Schedule:
    """Gathers the units of one root. Collective: all ranks must come to the same gathers in the same order.

    Subclasses say what comes next, in the methods whose names begin with begin, enter, leave and end.
    """

    def __init__(self, root: FSDPRoot) -> None:
        self._root = root

    # -- what it is told

    def begin_forward(self) -> None:
        """The root's forward begins."""

    def enter_forward(self, state: FSDPState) -> None:
        """The forward of ``state`` begins, inside of the root's: gather its unit."""
        raise NotImplementedError

    def note_stays(self, state: FSDPState) -> None:
        """The forward of ``state`` has ended, and what it returned may read its unsharded parameters until backward."""

    def end_forward(self) -> None:
        """The root's forward has ended."""

    def forward_failed(self) -> None:
        """An exception has left the root's forward."""

    def begin_backward(self, *, is_recorded: bool) -> None:
        """A backward begins, with ``create_graph=True`` if it ``is_recorded``."""

    def enter_backward(self, state: FSDPState) -> None:
        """The backward of ``state`` begins: gather its unit."""
        raise NotImplementedError

    def enter_recompute(self, state: FSDPState) -> None:
        """A backward computes the forward of ``state`` again: gather its unit, outside of the order."""
        iteration, unit = self._root.iteration, state.unit
        # One unit at most stays unsharded beyond its recompute: free the one before, unless it is needed again.
        if iteration.recomputed is unit:
            iteration.recomputed = None
        else:
            self.keep_for_backward(None)
        self.gather(unit, for_backward=True)

    def leave_backward(self, state: FSDPState) -> None:
        """All gradients of ``state`` have been computed: reduce them."""
        for group in state.own:
            if group.reduce_or_keep():
                self._root.iteration.reduced = True

    def end_backward(self) -> None:
        """The backward has ended. The root finishes modules whose end was not noticed after this call."""

    def end_pass(self) -> None:
        """The backward is over, and all its modules are finished: reshard what was gathered in vain."""
        self.keep_for_backward(None)
        self.drop_ahead()

    def abandon(self) -> None:
        """The pass is dropped after a failure: the next step begins anew."""

    # -- what it does

    def gather(self, unit: Unit, *, for_backward: bool = False) -> None:
        """Gather ``unit``, and let compute wait for it."""
        iteration = self._root.iteration
        ahead = iteration.ahead
        for group in unit:
            if group.unshard(for_backward=for_backward):
                iteration.gathered = True
            if ahead:
                ahead.discard(group)
        for group in unit:  # this frees their staging buffers, before a prefetch allocates others
            group.wait_for_unshard()

    def gather_ahead(self, upcoming: Sequence[Unit], *, for_backward: bool = False) -> None:
        """Issue the gathers of those ``upcoming`` units that will be needed and are not there yet."""
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
                    if gathers:
                        self._root.iteration.ahead.add(group)

    def gather_in_turn(self, unit: Unit, then: Sequence[Unit], *, for_backward: bool = False) -> None:
        """Gather ``unit``, and ahead as many of the units that come ``then`` as the budget allows."""
        self.gather(unit, for_backward=for_backward)
        self.gather_ahead(self.within_budget(then), for_backward=for_backward)

    def within_budget(self, upcoming: Sequence[Unit]) -> Sequence[Unit]:
        """The first of ``upcoming``: those that fit into the user's budget, or `PREFETCH_DEPTH` if there is none."""
        budget = self._root.settings.prefetch_bytes
        if budget is None:
            return upcoming[:PREFETCH_DEPTH]
        within: list[Unit] = []
        for unit in upcoming[:MAX_PREFETCH_DEPTH]:
            budget -= sum(group.storage.unsharded_bytes for group in unit)
            if budget < 0:
                break
            within.append(unit)
        return within

    def drop_ahead(self) -> None:
        """Reshard what was gathered ahead and not used."""
        root = self._root
        for group in root.groups:
            if group in root.iteration.ahead and not group.users:
                if root.watched.holds_graph and group.phase is ParamPhase.UNSHARDED:
                    continue  # a recorded graph may read the values
                group.reshard()
                root.comm.let_host_write_shards()
        root.iteration.ahead.clear()

    def keep_for_backward(self, unit: Unit | None) -> None:
        """Leave ``unit`` unsharded after its recompute, instead of the one before.

        The last unit that is recomputed is the first whose backward follows; the others are resharded.
        """
        root = self._root
        iteration = root.iteration
        kept, iteration.recomputed = iteration.recomputed, unit
        if kept is not None and kept is not unit:
            if root.watched.holds_graph or iteration.creates_graph or iteration.is_second:
                return
            for group in kept:
                if not group.users:
                    group.reshard()


class LearnedOrder(Schedule):
    """Gathers ahead in the order of the last step that all ranks ran to its end, while the running step follows it.

    A forward's order is learned only at the end of a backward that reduced gradients. Before that another rank may
    still fail: it would not learn the order, and predict something else. No such moment follows an evaluation, so its
    order is learned at its end: see `ExecutionOrder.settle`.
    """

    def __init__(self, root: FSDPRoot) -> None:
        super().__init__(root)
        self._forward: ExecutionOrder[Unit] = ExecutionOrder()
        self._evaluation: ExecutionOrder[Unit] = ExecutionOrder()
        self._backward: ExecutionOrder[Unit] = ExecutionOrder()
        self._running = self._forward  # which of the first two the root's forward follows

    @property
    def forward(self) -> tuple[Unit, ...]:
        """The order in which the last step that all ranks have run came to the units; empty before such a step."""
        return self._forward.learned

    @property
    def backward(self) -> tuple[Unit, ...]:
        """The order in which the backward of that step came to the units."""
        return self._backward.learned

    def begin_forward(self) -> None:
        """See `Schedule`."""
        self._running = self._forward if torch.is_grad_enabled() else self._evaluation

    def enter_forward(self, state: FSDPState) -> None:
        """See `Schedule`. Gathers ahead the units that are expected, or that the user has set."""
        self.gather(state.unit)
        expected = self._advance(self._running, state.unit)
        self.gather_ahead(expected if state.forward_prefetch is None else state.forward_prefetch)

    def end_forward(self) -> None:
        """See `Schedule`."""
        self._forward.end()
        if self._root.iteration.gathered:
            self._evaluation.settle()
        else:  # without gathers nothing keeps ranks together, so their orders may differ
            self._evaluation.abandon()

    def forward_failed(self) -> None:
        """See `Schedule`."""
        if self._root.iteration.gathered:
            self._evaluation.settle()
        self.abandon()

    def begin_backward(self, *, is_recorded: bool) -> None:
        """See `Schedule`. Until a backward was learned, the reversed order of the forward is expected."""
        self._backward.expect(self._forward.learned[::-1])

    def enter_backward(self, state: FSDPState) -> None:
        """See `Schedule`. Gathers ahead the units that are expected, or that the user has set.

        With ``set_backward_prefetch("after")`` the expected units are noted, and gathered when this backward has ended.
        """
        root, unit, then = self._root, state.unit, state.backward_prefetch
        if root.comm.device.has_streams:
            root.comm.free_packed()  # before this module makes its gradients
        iteration = root.iteration
        if iteration.recomputed is unit:
            iteration.recomputed = None
        needed = unit
        for group in unit:
            if not group.settings.unshards_in_backward:
                needed = tuple(each for each in unit if each.settings.unshards_in_backward)
        self.gather(needed, for_backward=True)
        expected = self._advance(self._backward, unit)
        if then is None and root.settings.backward_prefetch != "before":
            iteration.following = (unit, expected) if root.settings.backward_prefetch == "after" else None
            return
        self.gather_ahead(expected if then is None else then, for_backward=True)

    def end_pass(self) -> None:
        """See `Schedule`."""
        self.keep_for_backward(None)
        self.drop_ahead()
        self._backward.end()

    def _advance(self, order: ExecutionOrder[Unit], unit: Unit) -> Sequence[Unit]:
        """Note that ``unit`` is needed now. Returns the units to gather ahead, unless the user has set others."""
        if self._root.settings.prefetch_bytes is None:
            return order.advance(unit, depth=PREFETCH_DEPTH)
        return self.within_budget(order.advance(unit, depth=MAX_PREFETCH_DEPTH))

    def commit(self) -> None:
        """A step has ended that all ranks have run: learn its orders."""
        self._forward.commit()
        self._backward.commit()

    def forget(self) -> None:
        """Ranks may have learned different orders: forget them."""
        for order in (self._forward, self._evaluation, self._backward):
            order.forget()

    def abandon(self) -> None:
        """See `Schedule`."""
        for order in (self._forward, self._evaluation, self._backward):
            order.abandon()


class JoiningSchedule(Schedule):
    """A schedule for ranks that run different modules on purpose."""

    def join_step(self) -> None:
        """This rank runs nothing in this step: take part in the collectives of the others."""
        raise NotImplementedError


JOINING: Port[Callable[[Any], JoiningSchedule]] = Port(missing("schedules.divergence"))
"""Makes the joining schedule of a root."""
