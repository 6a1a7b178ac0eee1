"""Ranks that run different modules on purpose: each joins the exchanges of modules that it skips (`set_divergence`).

All ranks go through the same list of exchanges in every step, whatever they run. Forward gathers each sharded module
once. Backward has one gather and one reduction for each, in the opposite order; a module's reduction comes after those
of the modules inside it. Before a rank runs a module, it joins the exchanges that the list has before: it gathers
without a use for it, and adds nothing to reductions. At the end of a pass it joins those that are left.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2._remedies import DIVERGENCE
from fsdp2.arguments import checked
from fsdp2.core.agreement import Setting, refuse_disagreement
from fsdp2.core.failure import is_to_restart, recover_if_failed
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.hooks import on_real_parameters
from fsdp2.core.prefetch import JOINING, MAX_PREFETCH_DEPTH, JoiningSchedule
from fsdp2.core.root import FSDPRoot
from fsdp2.core.state import FSDPState, state_of
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError, ParamPhase


class Event(NamedTuple):
    """One event of a backward.

    Attributes:
        state: the state that it happens to.
        what: "enter": the backward of one of its forwards begins; "leave": that backward ends; "reduce": all gradients
            of the state are complete.
    """

    state: FSDPState
    what: str


@dataclass(slots=True)
class DivergenceReport:
    """What this rank has joined since `set_divergence`, for modules that it did not run.

    Attributes:
        forward_gathers: how many modules it gathered in forward without running them.
        backward_gathers: how many in backward.
        gathered_bytes: the bytes of unsharded parameters in both.
        reductions: how many modules it reduced without a gradient of its own.
        steps: passes in which this rank ran nothing (`join_step`).
    """

    forward_gathers: int = 0
    backward_gathers: int = 0
    gathered_bytes: int = 0
    reductions: int = 0
    steps: int = 0


class Joining(JoiningSchedule):
    """The schedule of a root that follows one order on all ranks.

    Attributes:
        report: what was joined so far.
    """

    def __init__(self, root: FSDPRoot) -> None:
        super().__init__(root)
        self.report = DivergenceReport()
        self._order: tuple[str, ...] | None = None
        self._is_agreed = False
        self._forward: tuple[FSDPState, ...] = ()
        self._backward: tuple[Event, ...] = ()
        self._ends: tuple[int, ...] = ()  # for each index of `_forward`, where the modules inside of it end
        self._spans: list[tuple[int, FSDPState]] = []  # (end, state) of modules that forward is in, outermost first
        self._next = 0  # an index of `_forward`: what comes next
        self._entered: set[FSDPState] = set()
        self._next_back = 0  # an index of `_backward`: what comes next
        self._open: set[FSDPState] = set()  # states whose backward has begun and not ended
        self._ran: set[FSDPState] = set()  # states whose backward this rank has run itself, not only joined
        self._awaits_backward = False

    # -- the order

    def _agree(self) -> None:
        """Look up the order, and compare it with that of the other ranks. Collective."""
        root = self._root
        self._order = root.settings.divergence_order
        self._forward = self._given(self._order) if self._order is not None else self._learned()
        within = _modules_within(self._forward)
        self._ends = tuple(_span_end(self._forward, within, start) for start in range(len(self._forward)))
        self._backward = tuple(_backward_of(self._forward, self._ends))
        # Ranks with other orders would wait for each other for ever, so they compare them before the first exchange.
        names = [Setting(f"joins '{state.name}'") for state in self._forward]
        owner: Any = root.owner
        refuse_disagreement(root.name, root.groups, owner.mesh, names)
        self._is_agreed = True
        if len(self._forward) == 1:
            _warn_if_called_one_by_one(owner)

    def _given(self, order: Sequence[str]) -> tuple[FSDPState, ...]:
        owner: Any = self._root.owner
        found = []
        for name in order:
            state = state_of(owner.modules[0].get_submodule(name))
            if state is not None and state.unit:
                found.append(state)
        if owner.unit and owner not in found:
            found.insert(0, owner)
        missing = [state.name for state in self._states() if state not in found]
        if missing:
            raise FSDPRuntimeError(
                f"set_divergence('join', order=...) lacks {_quoted(missing)}, which fully_shard was called on as well: "
                "give all sharded modules, in the order in which forward comes to them."
            )
        return tuple(found)

    def _learned(self) -> tuple[FSDPState, ...]:
        """The order of the last step, if it ran all modules, each once; else the order of the modules in the model."""
        of_units: dict[Any, list[FSDPState]] = {}
        for state in self._states():
            of_units.setdefault(state.unit, []).append(state)
        learned = self._root.learned.forward
        if set(learned) == set(of_units) and all(len(states) == 1 for states in of_units.values()):
            return tuple(of_units[unit][0] for unit in learned)
        return tuple(self._states())

    def _states(self) -> list[FSDPState]:
        states: Any = self._root.states
        return [state for state in states if state.unit]

    # -- forward

    def begin_forward(self) -> None:
        """The root's forward begins. Collective if the order is another one than before."""
        self._refuse_settings()
        if not self._is_agreed or self._order != self._root.settings.divergence_order:
            self._agree()
        self._next = 0
        if torch.is_grad_enabled():  # an evaluation between a forward and its backward changes nothing
            self._awaits_backward = False
        self._entered.clear()

    def _refuse_settings(self) -> None:
        if self._root.settings.finalizes_manually:
            raise FSDPNotImplementedError(
                "set_divergence('join') with set_manual_backward_finalization(True): ranks would not know which "
                "backward is to join what is left. Use one of them."
            )

    def enter_forward(self, state: FSDPState) -> None:
        """Gather the units before ``state``, which this rank skips, and then its own. Collective."""
        # It was gathered in this pass, and is still unsharded: another forward of it needs no exchange.
        if state in self._entered and state.is_unsharded() and not self._has_left(state):
            return
        try:
            index = self._forward.index(state, self._next)
        except ValueError:
            self._refuse_order(state)
        while self._next < index:
            self._pass()
        self._next = index + 1
        self._entered.add(state)
        self._leave_spans(index)
        self._gather_forward(index)

    def _has_left(self, state: FSDPState) -> bool:
        """Whether its forward is over, though the groups that it shares are still unsharded."""
        return any(state not in group.users for group in _shared(state)) and state.reshards_as_set()

    def note_stays(self, state: FSDPState) -> None:
        """Refuse to keep ``state`` unsharded: ranks that skip it cannot know that it stays."""
        raise FSDPNotImplementedError(
            f"set_divergence('join'): '{state.name}' ({state.class_name}) returns parameters, or hides tensors that "
            "may require gradients in its outputs, and would stay unsharded for its backward, which ranks that skip it "
            "cannot know: return tensors, in tuples, lists or dicts; or set reshard_after_forward=False on it."
        )

    def end_forward(self) -> None:
        """Gather the units that are left, which this rank skips. Collective."""
        while self._next < len(self._forward):
            self._pass()
        self._leave_spans(len(self._forward))
        self._awaits_backward = self._awaits_backward or torch.is_grad_enabled()

    def forward_failed(self) -> None:
        """Release the shared groups of modules that forward was in, as if it had gone on."""
        self._leave_spans(len(self._forward))

    def _pass(self) -> None:
        """Gather the next unit, whose module this rank skips."""
        index, self._next = self._next, self._next + 1
        state = self._forward[index]
        self._leave_spans(index)
        if not state.is_unsharded():
            self.report.forward_gathers += 1
            self.report.gathered_bytes += _bytes_of(state.unit)
        self._gather_forward(index)
        state.leave_as_set(state.own)

    def _leave_spans(self, index: int) -> None:
        """Release the groups that modules share whose inner modules all lie before ``index``, where forward is now.

        All ranks do so here, and not where a module's own forward ends, which some ranks do not run: whether an inner
        module finds a weight unsharded that is tied to one around it must not depend on that.
        """
        while self._spans and self._spans[-1][0] <= index:
            state = self._spans.pop()[1]
            self._release(state)
            state.leave_as_set(_shared(state))

    def _hold(self, state: FSDPState) -> None:
        for group in _shared(state):
            group.users.add((self, state))

    def _release(self, state: FSDPState) -> None:
        for group in _shared(state):
            group.users.discard((self, state))

    def _gather_forward(self, index: int) -> None:
        state = self._forward[index]
        self._hold(state)
        self._spans.append((self._ends[index], state))
        then = [state.unit for state in self._forward[index + 1 : index + 1 + MAX_PREFETCH_DEPTH]]
        # All ranks gather ahead what the common order says, so prefetches are the same exchanges as well.
        self.gather_in_turn(state.unit, then)

    def _refuse_order(self, state: FSDPState) -> NoReturn:
        before, order = self._forward[self._next - 1].name, _quoted(each.name for each in self._forward)
        raise FSDPRuntimeError(
            f"set_divergence('join'): forward comes to '{state.name}' ({state.class_name}) after '{before}', and in "
            f"the order that the ranks follow it is not to come any more: {order}. "
            "Call set_divergence('join', order=[...]) on all ranks, with the sharded modules in the order in which "
            "forward comes to them; one that runs k times is there k times."
        )

    # -- backward

    def begin_backward(self, *, is_recorded: bool) -> None:
        """A backward begins: go back to the start of its events."""
        if is_recorded:
            raise FSDPNotImplementedError(
                "set_divergence('join') with create_graph=True: ranks that skip modules cannot know which of them the "
                "differentiation of that backward comes to."
            )
        self._next_back = 0
        self._open.clear()
        self._ran.clear()

    def enter_backward(self, state: FSDPState) -> None:
        """Join the gathers and reductions before ``state``, and gather its own unit. Collective."""
        needed = _needed_in_backward(state.unit)
        if state in self._open and all(group.phase is ParamPhase.UNSHARDED for group in needed):
            self._ran.add(state)
            return
        try:
            index = self._backward.index(Event(state, "enter"), self._next_back)
        except ValueError:
            self._refuse_late(state)
        self._advance(index)
        self._ran.add(state)
        self._enter(index)

    def enter_recompute(self, state: FSDPState) -> None:
        """Gather for a recompute, which may be the first event of this state in the backward. Collective."""
        self.enter_backward(state)
        super().enter_recompute(state)

    def leave_backward(self, state: FSDPState) -> None:
        """Reduce the gradients of ``state``, once everything before it has been joined. Collective."""
        if not state.unit:
            return
        index = self._backward.index(Event(state, "reduce"))
        # Another rank's backward has come further in the list, so the reduction has been joined already.
        if index < self._next_back:
            if any([group.reducer.has_gradients() for group in state.own if group.settings.requires_gradient_sync]):
                self._refuse_late(state)
            return
        if self._next_back > self._last_entry(index):
            self._advance(index + 1)

    def end_backward(self) -> None:
        """Join the gathers and reductions that are left. Collective."""
        self._advance(len(self._backward))
        # Some rank may have used a shared group: all of them reduce it.
        for group in self._root.shared:
            group.took_part = True
        self._awaits_backward = False

    def _last_entry(self, index: int) -> int:
        """The last "enter" of the state of event ``index``; only events of modules inside of it lie in between."""
        entry = Event(self._backward[index].state, "enter")
        return max(each for each in range(index) if self._backward[each] == entry)

    def _advance(self, index: int) -> None:
        while self._next_back < index:
            event = self._backward[self._next_back]
            if event.what == "enter":
                if not event.state.is_unsharded():
                    self.report.backward_gathers += 1
                    self.report.gathered_bytes += _bytes_of(event.state.unit)
                self._enter(self._next_back)
                continue
            self._next_back += 1
            if event.what == "leave":
                self._open.discard(event.state)
                self._release(event.state)
                event.state.backward.end(reduces=False)
            else:
                self._reduce(event.state)

    def _enter(self, index: int) -> None:
        self._next_back = index + 1
        state = self._backward[index].state
        self._open.add(state)
        self._hold(state)
        upcoming = self._backward[index + 1 : index + 1 + 3 * MAX_PREFETCH_DEPTH]
        then = [event.state.unit for event in upcoming if event.what == "enter"]
        if self._root.settings.backward_prefetch == "never":
            then = []
        self.gather_in_turn(_needed_in_backward(state.unit), then, for_backward=True)

    def _reduce(self, state: FSDPState) -> None:
        if state not in self._ran and any(group.reducer.is_trainable for group in state.own):
            self.report.reductions += 1
        super().leave_backward(state)

    def _refuse_late(self, state: FSDPState) -> NoReturn:
        raise FSDPRuntimeError(
            f"set_divergence('join'): backward comes to '{state.name}' ({state.class_name}) after modules that forward "
            "came to before it, so that ranks which skip it could not follow. Activation checkpointing of several "
            "sharded modules in one region does that: checkpoint each of them by itself."
        )

    def abandon(self) -> None:
        """Forget the step that was left, as the next one begins anew."""
        self._spans.clear()
        self._awaits_backward = False

    # -- nothing to run

    def join_step(self) -> None:
        """Join what is left of a step, or a whole step. Collective."""
        root = self._root
        if is_to_restart(root) and not _torch.backward_is_running():
            recover_if_failed(root)  # all ranks have left the step before: this is another one
        if (root.iteration.in_forward and not root.iteration.failed) or _torch.backward_is_running():
            raise FSDPRuntimeError("join_step() must be called outside of forward and backward.")
        if root.iteration.in_backward:
            raise FSDPRuntimeError(
                "join_step() after a backward that an exception has left: modules that were reduced before it hold "
                "gradients of this rank's batch, and others would not. Let all ranks leave the step: "
                "set_recovery(abort_together=True)."
            )
        self.report.steps += 1
        if not (self._awaits_backward and torch.is_grad_enabled()):
            on_real_parameters(self._join_forward)
        if torch.is_grad_enabled():
            # A backward that runs nothing of the model: at its end autograd calls the root, which joins the rest.
            begins = torch.zeros((), requires_grad=True)
            begins.register_hook(lambda gradient: root.begin_backward())
            begins.clone().backward()

    def _join_forward(self) -> None:
        root = self._root
        if root.iteration.failed and root.iteration.in_forward:
            cut_short = [group.name for group in root.groups if group.was_cut_short]
            if cut_short:
                raise FSDPRuntimeError(
                    f"join_step() after an exception inside of the all-gather of {_quoted(cut_short)}, which cannot be "
                    "taken up again. Let all ranks leave the step: set_recovery(abort_together=True)."
                )
            root.iteration.failed = False  # it goes on where the program's own forward has ended
        else:
            recover_if_failed(root)
            root.begin_forward()
        root.end_forward()


_ALONE: WeakSet[Any] = WeakSet()
"""Roots that join and have no other sharded module below: their forward has nothing that could be skipped."""


def _warn_if_called_one_by_one(owner: Any) -> None:
    """Warn when a second such root begins a forward: once, as a program has as many of them as layers."""
    if owner in _ALONE:
        return
    _ALONE.add(owner)
    if len(_ALONE) != 2:
        return
    gc.collect()  # a root of a model that the program has dropped does not count
    if len(_ALONE) == 2:
        names = " and ".join(sorted(each.class_name for each in _ALONE))
        warnings.warn(
            f"set_divergence('join') was called on sharded modules that are each a root of their own: {names}. It "
            "joins what a rank skips inside of a root's forward, and these have no sharded module inside: a rank that "
            "does not call one of them lets the others wait. Call fully_shard also on one module whose forward calls "
            "them all, call set_divergence('join') on that one, and run its forward. (Roots that take turns, each with "
            "its whole step, may stay as they are: a rank that does not run one calls its join_step() instead.) See "
            f"{DIVERGENCE}.",
            stacklevel=2,
        )


def _shared(state: FSDPState) -> tuple[FSDPParamGroup, ...]:
    return tuple(group for group in state.unit if group.is_shared)


def _span_end(forward: Sequence[FSDPState], within: dict[FSDPState, set[FSDPState]], start: int) -> int:
    """The index at which the modules inside of the one at ``start``, which follow it, end."""
    after = start + 1
    while after < len(forward) and forward[after] in within[forward[start]]:
        after += 1
    return after


def _backward_of(forward: Sequence[FSDPState], ends: Sequence[int]) -> Iterator[Event]:
    """The events of a backward: modules in the opposite order, each reduced once, after those inside of it."""
    first = {state: index for index, state in reversed(list(enumerate(forward)))}

    def walk(start: int, end: int) -> Iterator[Event]:
        """The events for ``forward[start:end]``, a run of modules that lie side by side, with those inside of each."""
        spans = []
        while start < end:
            spans.append((start, min(ends[start], end)))
            start = spans[-1][1]
        for begin, after in reversed(spans):
            yield Event(forward[begin], "enter")
            yield from walk(begin + 1, after)
            yield Event(forward[begin], "leave")
            if first[forward[begin]] == begin:
                yield Event(forward[begin], "reduce")

    return walk(0, len(forward))


def _modules_within(states: Sequence[FSDPState]) -> dict[FSDPState, set[FSDPState]]:
    """For each of ``states``, those of them that manage modules inside of its own."""
    owners = {module: state for state in states for module in state.modules}
    found: dict[FSDPState, set[FSDPState]] = {}
    for state in states:
        inside = [each for module in state.modules for each in module.modules()]
        found[state] = {owners[each] for each in inside if each in owners} - {state}
    return found


def _needed_in_backward(unit: tuple[FSDPParamGroup, ...]) -> tuple[FSDPParamGroup, ...]:
    return tuple(group for group in unit if group.settings.unshards_in_backward)


def _bytes_of(unit: tuple[FSDPParamGroup, ...]) -> int:
    return sum(group.storage.unsharded_bytes for group in unit)


def _quoted(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)


@checked()
def divergence_report(model: nn.Module) -> DivergenceReport:
    """What this rank has joined for modules that it did not run: the price of ``set_divergence("join")``.

    No communication: each rank has its own report.

    Args:
        model: the root.

    Raises:
        FSDPTypeError: ``model`` is not a module.
        FSDPValueError: it is no root on which `FSDPModule.set_divergence` was called, or it has run no forward since.
    """
    state = state_of(model)
    schedule = None if state is None or state.root is None or not state.is_root else state.root.schedule
    if not isinstance(schedule, Joining):
        raise FSDPValueError(
            f"divergence_report: {type(model).__name__} is no root that has run a forward since set_divergence('join')."
        )
    return schedule.report


JOINING.fill(Joining)
