"""`Observation`: tells a `Listener` what a model's groups exchange and wait for, and when its modules run.

It owns the `Taps` on the states, roots, groups, reducers, transports and communication contexts of some models, and
knows what belongs together: which wait is for which exchange of which group. It takes no time, and keeps no tensor, no
gradient and no exchange: of what is in flight it remembers identities.

The order in which a step is told, for a group ``blocks.0`` that is gathered ahead::

    begin_exchange(GATHER, ahead)  end of issue  ...  begin_wait  end_wait  end_exchange  open(FORWARD)  close(FORWARD)
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch_compiler
from fsdp2.core.gather import Transfer
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.root import FSDPRoot
from fsdp2.core.state import FSDPState, state_of, states_below
from fsdp2.core.streams import Device, FSDPCommContext, PendingReduce
from fsdp2.core.transport import Transport
from fsdp2.errors import FSDPValueError
from fsdp2.tools.observing.taps import Tap, Taps

TAPPED: dict[str, tuple[str, ...]] = {
    "FSDPState": ("on_real_parameters", "forward_failed"),
    "FSDPRoot": ("begin_forward", "_end_iteration"),
    "Schedule": ("gather_ahead",),
    "FSDPCommContext": ("_wait_for", "add_pending"),
    "FSDPParamGroup": ("_issue_all_gather", "_copy_out", "_free_unsharded"),
    "GradientReducer": ("reduce",),
    "Transport": ("all_gather", "reduce_scatter", "all_reduce"),
}
"""The methods of the engine that are tapped, by class. This file relies on no others."""


class Kind(enum.Enum):
    """The kind of an exchange."""

    GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"


class Activity(enum.Enum):
    """What a rank does on the stream where it computes."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    ENGINE = "pack and launch"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call of a transport.

    Attributes:
        kind: its kind.
        group: the name of the group whose parameters or gradients travel.
        number: its number in this observation, from 0.
        nbytes: bytes of all ranks together: what an all-gather fills, what a reduce-scatter or all-reduce takes.
        sent_bytes: what each rank must send at least: (n - 1) / n of ``nbytes`` over n ranks, twice that for an
            all-reduce.
        collectives: how many buffers it carries: calls of a collective, unless the backend coalesces them.
        for_backward: whether a backward needs a gather; always True for a reduction.
        ahead: whether a gather was issued before its module was needed.
        ranks: how many ranks take part.
    """

    kind: Kind
    group: str
    number: int
    nbytes: int
    sent_bytes: int
    collectives: int
    for_backward: bool
    ahead: bool
    ranks: int


class Listener:
    """What is told to listeners. All methods do nothing here; subclasses override those that they need."""

    def begin_step(self, root: FSDPRoot) -> None:
        """The forward of a root begins."""

    def end_iteration(self, root: FSDPRoot, *, reduced: bool) -> None:
        """A backward of a root has ended, or its finalization."""

    def open(self, activity: Activity, name: str, device: Device) -> None:
        """The module or group ``name`` begins to do ``activity``."""

    def close(self, activity: Activity, name: str, device: Device) -> None:
        """The module or group has ended it. This may come although it never began."""

    def begin_exchange(self, exchange: Exchange, device: Device) -> None:
        """An exchange is about to be issued, on the current stream."""

    def issued(self, exchange: Exchange, device: Device, *, is_over: bool) -> None:
        """The exchange was issued. ``is_over``: nothing of it is left to wait for on the host (without streams)."""

    def begin_wait(self, group: str, kind: Kind, device: Device) -> None:
        """The current stream (without streams the host) is about to wait for exchanges of ``group``."""

    def end_wait(self, group: str, kind: Kind, device: Device) -> None:
        """The wait is over."""

    def end_exchange(self, exchange: Exchange, device: Device) -> None:
        """The exchange was waited for."""

    def hold(self, group: str, unsharded_bytes: int, staged_bytes: int, device: Device) -> None:
        """The group's memory now: of unsharded parameters, and of the buffers that are gathered into first."""


class Observation:
    """Tells a listener what happens to ``models``, until `end`.

    Attributes:
        models: the models, uncompiled.
        listener: the listener.
        devices: the devices that roots compute on, with how the engine reaches each, by the identity of that; empty
            before a first forward.
        groups: the groups of the models by name, in the order of their modules.
    """

    def __init__(
        self, models: Sequence[nn.Module], listener: Listener, function: str, *, only_exchanges: bool = False
    ) -> None:
        """``function``: what the user has called, for messages. ``only_exchanges``: tell only of exchanges and waits.

        Raises:
            FSDPValueError: nothing in one of ``models`` is sharded.
        """
        self.models = [getattr(model, "_orig_mod", model) for model in models]
        for model in self.models:
            refuse_unsharded(model, function)
        self.listener = listener
        self._only_exchanges = only_exchanges
        self._taps = Taps()
        self._handles: list[RemovableHandle] = []
        self._prefixes = _prefixes(self.models)
        self._names: dict[int, str] = {}
        self._held: list[Any] = []  # kept alive, as their identities are keys
        self._number = 0
        self._ahead = False
        self._issuing: _Issuing | None = None
        self._in_flight: dict[int, _InFlight] = {}
        self._pending: dict[int, int] = {}
        self._reducing: FSDPParamGroup | None = None
        self.devices: dict[int, tuple[Device, torch.device]] = {}
        self.groups: dict[str, FSDPParamGroup] = {}

    # -- beginning and end

    def begin(self, *, sees_optimizers: bool = True) -> None:
        """Begin to listen; to optimizers only if asked, as their global hooks would keep this object alive."""
        try:
            self._begin(sees_optimizers)
        except BaseException:
            self.end()
            raise

    def _begin(self, sees_optimizers: bool) -> None:
        self.refresh()
        for model in self.models:
            for state in states_below(model):
                self._observe_state(state)
        for root in self.roots():
            self.observe_root(root)
        for name, group in self.groups.items():
            if group.comm is not None:
                self.listener.hold(name, *bytes_held(group), group.comm.device)
        if sees_optimizers:
            self._handles = [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]

    def end(self) -> None:
        """Stop listening. The engine is as it was before."""
        self._taps.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def refresh(self) -> None:
        """Look up the names of groups: they change when a root forms above them."""
        self._names.clear()
        self._held.clear()
        self.groups.clear()
        for model, prefix in zip(self.models, self._prefixes, strict=True):
            for state in states_below(model):
                for group in state.unit:
                    self._held.append(group)
                    self._names[id(group)] = prefix + group.name
                    self.groups.setdefault(prefix + group.name, group)
                self._held.append(state)
                self._names[id(state)] = prefix + state.name

    def roots(self) -> list[FSDPRoot]:
        """The roots that have formed."""
        found = [state.root for model in self.models for state in states_below(model)]
        return list(dict.fromkeys(root for root in found if root is not None))

    def name_of(self, one: FSDPParamGroup | FSDPState) -> str:
        """The name of a group or state, with the model's name before it if there are several models."""
        known = self._names.get(id(one))
        if known is None:
            self.refresh()
            known = self._names.setdefault(id(one), one.name)
        return known

    # -- what is tapped

    def _observe_state(self, state: FSDPState) -> None:
        if self._only_exchanges and state.root is not None:
            self._taps.forget(state)  # its tap was there only to notice that a root forms
            return
        self._taps.place(state, "on_real_parameters", functools.partial(_around_action, self, state))
        self._taps.place(state, "forward_failed", functools.partial(_around_failure, self, state))
        for group in state.unit:
            self._observe_group(group)

    def observe_root(self, root: FSDPRoot) -> None:
        """Listen to a root that has formed, or is about to run, and to everything that is new below it."""
        place = self._taps.place
        place(root, "begin_forward", functools.partial(_around_forward, self, root))
        if not self._only_exchanges:
            place(root.schedule, "gather_ahead", functools.partial(_around_ahead, self))
            place(root, "_end_iteration", functools.partial(_around_end, self, root))
        place(root.comm, "_wait_for", functools.partial(_around_wait, self, root.comm))
        place(root.comm, "add_pending", functools.partial(_around_pending, self))
        for group in root.groups:
            self._observe_group(group)
            self.devices.setdefault(id(root.comm.device), (root.comm.device, group.mesh.device))
        for state in root.states:
            if isinstance(state, FSDPState):
                self._observe_state(state)

    def _observe_group(self, group: FSDPParamGroup) -> None:
        place = self._taps.place
        place(group, "_issue_all_gather", functools.partial(_around_gather, self, group))
        if not self._only_exchanges:
            place(group, "_copy_out", functools.partial(_around_copy_out, self, group))
            place(group, "_free_unsharded", functools.partial(_around_free, self, group))
        place(group.reducer, "reduce", functools.partial(_around_reduce, self, group))

    def _observe_transport(self, transport: Transport, group: FSDPParamGroup) -> None:
        if not self._taps.has(transport):
            for name, kind in _KINDS.items():
                self._taps.place(transport, name, functools.partial(_around_exchange, self, group, kind))

    # -- optimizers

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        own = {id(parameter) for model in self.models for parameter in model.parameters()}
        own.update(id(each) for group in self.groups.values() for each in group.sharded)
        return any(id(each) in own for part in optimizer.param_groups for each in part["params"])

    @_torch_compiler.stays_outside("fsdp2 observes optimizers around each step, outside of graphs")
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_ours(optimizer):
            for device, _device in self.devices.values():
                self.listener.open(Activity.OPTIMIZER, type(optimizer).__name__, device)

    @_torch_compiler.stays_outside("fsdp2 observes optimizers around each step, outside of graphs")
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for device, _device in self.devices.values():
            self.listener.close(Activity.OPTIMIZER, type(optimizer).__name__, device)

    # -- what is told

    def told_of(self, group: FSDPParamGroup, kind: Kind, members: Sequence[Any], ranks: int) -> Exchange:
        """The facts of an exchange that is about to be issued."""
        nbytes, sent = _bytes_of(kind, members, ranks)
        issuing = self._issuing
        is_gather = kind is Kind.GATHER
        self._number += 1
        return Exchange(
            kind,
            self.name_of(group),
            self._number - 1,
            nbytes,
            sent,
            len(members),
            not is_gather or (issuing is not None and issuing.for_backward),
            is_gather and issuing is not None and issuing.ahead,
            ranks,
        )


@dataclass(slots=True)
class _Issuing:
    """A gather that is being issued, with its exchanges so far."""

    for_backward: bool
    ahead: bool
    exchanges: list[Exchange]


@dataclass(slots=True)
class _InFlight:
    """The exchanges that a wait is for."""

    group: FSDPParamGroup
    kind: Kind
    exchanges: list[Exchange]


_KINDS = {"all_gather": Kind.GATHER, "reduce_scatter": Kind.REDUCE_SCATTER, "all_reduce": Kind.ALL_REDUCE}


def _prefixes(models: Sequence[nn.Module]) -> list[str]:
    if len(models) == 1:
        return [""]
    names = list(map(class_name, models))
    return [f"{name}/" if names.count(name) == 1 else f"{name}#{index}/" for index, name in enumerate(names)]


def refuse_unsharded(model: nn.Module, function: str) -> None:
    """Refuse a model in which there is nothing to observe.

    Raises:
        FSDPValueError: nothing in ``model`` is sharded.
    """
    if not states_below(model):
        raise FSDPValueError(
            f"{function} observes what sharded modules do, and nothing in {class_name(model)} is sharded: call "
            "fully_shard() first."
        )


def class_name(model: nn.Module) -> str:
    """The class of ``model`` as its user knows it, not compiled and not sharded."""
    model = getattr(model, "_orig_mod", model)
    state = state_of(model)
    return type(model).__name__ if state is None else state.class_name


def _bytes_of(kind: Kind, members: Sequence[Any], ranks: int) -> tuple[int, int]:
    """The bytes of all ranks together, and what each rank must send at least."""
    if kind is Kind.ALL_REDUCE:
        nbytes = sum(each.nbytes for each in members)
        return nbytes, 2 * nbytes * (ranks - 1) // ranks
    outputs = inputs = 0
    pairs: Sequence[Transfer] = members
    for output, input in pairs:  # (generators would cost a call for each)
        outputs += output.nbytes
        inputs += input.nbytes
    return (outputs, outputs - inputs) if outputs > inputs else (inputs, inputs - outputs)


def bytes_held(group: FSDPParamGroup) -> tuple[int, int]:
    """The memory of ``group`` now: of unsharded parameters, and of buffers that are being gathered into."""
    storage = group.storage
    unsharded = sum(each.unsharded.nbytes for each in storage.buffers if each.unsharded.has_memory)
    gathers = [each for each in (storage.gather, storage.gather_from_rests) if each is not None]
    return unsharded, sum(each.allocated_bytes for each in gathers)


def observations_of(group: FSDPParamGroup) -> list[Observation]:
    """The observations that listen to ``group`` now."""
    tap = group.__dict__.get("_issue_all_gather")
    return [each.args[0] for each in tap.arounds] if isinstance(tap, Tap) else []


# Functions that run around the engine's methods. They are no bound methods, which would be new objects at each access.


def _around_action(seen: Observation, state: FSDPState, call: Callable[..., None], action: Any, *args: Any) -> None:
    name = getattr(action, "__name__", "")
    if name in ("_gather_for_forward", "_gather_for_recompute", "_gather"):
        seen.observe_root(args[0])
    listener = seen.listener
    device = None if state.root is None else state.root.comm.device
    if device is not None and name == "_leave_forward":
        listener.close(Activity.RECOMPUTE if args[3] else Activity.FORWARD, seen.name_of(state), device)
    elif device is not None and name == "_end":
        listener.close(Activity.BACKWARD, seen.name_of(state), device)
    call(action, *args)
    if name == "_become_root" and state.own_root is not None:
        seen.refresh()
        seen.observe_root(state.own_root)
    opens = _OPENS.get(name)
    if opens is not None and state.root is not None:
        listener.open(opens, seen.name_of(state), state.root.comm.device)


_OPENS = {
    "_gather_for_forward": Activity.FORWARD,
    "_gather_for_recompute": Activity.RECOMPUTE,
    "_gather": Activity.BACKWARD,
}


def _around_failure(seen: Observation, state: FSDPState, call: Callable[..., None], module: nn.Module) -> None:
    if state.root is not None:
        for activity in (Activity.FORWARD, Activity.RECOMPUTE):
            seen.listener.close(activity, seen.name_of(state), state.root.comm.device)
    call(module)


def _around_forward(seen: Observation, root: FSDPRoot, call: Callable[[], None]) -> None:
    seen.observe_root(root)  # modules may have been added since, and it may share another communication context now
    seen.listener.begin_step(root)
    call()


def _around_end(seen: Observation, root: FSDPRoot, call: Callable[[], None]) -> None:
    reduced = root.iteration.reduced
    call()
    seen.listener.end_iteration(root, reduced=reduced)


def _around_ahead(seen: Observation, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    before, seen._ahead = seen._ahead, True
    try:
        call(*args, **kwargs)
    finally:
        seen._ahead = before


def _around_gather(
    seen: Observation, group: FSDPParamGroup, call: Callable[..., None], unsharding: Any, for_backward: bool
) -> None:
    assert group.comm is not None, "it is prepared"
    device, name = group.comm.device, seen.name_of(group)
    for transport in (group._transport, group._transport_among_neighbours):
        seen._observe_transport(transport, group)
    issuing = seen._issuing = _Issuing(for_backward, seen._ahead, [])
    shows = not (device.has_streams or seen._only_exchanges)
    if shows:
        seen.listener.open(Activity.ENGINE, name, device)
    try:
        call(unsharding, for_backward)
    finally:
        seen._issuing = None
        if shows:
            seen.listener.close(Activity.ENGINE, name, device)
    seen._in_flight[id(unsharding)] = _InFlight(group, Kind.GATHER, issuing.exchanges)
    if not seen._only_exchanges:
        seen.listener.hold(name, *bytes_held(group), device)


def _around_exchange(
    seen: Observation, group: FSDPParamGroup, kind: Kind, call: Callable[..., None], members: Any, *args: Any
) -> None:
    assert group.comm is not None, "it is prepared"
    works = args[0 if kind is Kind.GATHER else 1]
    if kind is Kind.ALL_REDUCE:
        told = seen.told_of(group, kind, [members], group.mesh.replicate_size)
    else:
        told = seen.told_of(group, kind, members, _ranks_of(members))
    device, listener = group.comm.device, seen.listener
    begun = 0 if works is None else len(works)
    listener.begin_exchange(told, device)
    try:
        call(members, *args)
    except BaseException:
        listener.issued(told, device, is_over=True)  # nobody will wait for it
        raise
    is_over = not device.has_streams and (works is None or len(works) == begun)
    listener.issued(told, device, is_over=is_over)
    if is_over or device.has_streams:
        return
    if seen._issuing is not None:
        seen._issuing.exchanges.append(told)
    else:
        waited = seen._in_flight.get(seen._pending.get(id(group), -1))
        if waited is not None:
            waited.exchanges.append(told)


def _ranks_of(members: Sequence[Transfer]) -> int:
    for output, input in members:
        one, other = output.numel(), input.numel()
        if one and other:
            return one // other if one > other else other // one
    return 1


def _around_copy_out(seen: Observation, group: FSDPParamGroup, call: Callable[..., None], unsharding: Any) -> None:
    assert group.comm is not None, "it is prepared"
    device, name = group.comm.device, seen.name_of(group)
    if not device.has_streams:
        seen.listener.open(Activity.ENGINE, name, device)
    try:
        call(unsharding)
    finally:
        if not device.has_streams:
            seen.listener.close(Activity.ENGINE, name, device)
        seen.listener.hold(name, *bytes_held(group), device)


def _around_free(seen: Observation, group: FSDPParamGroup, call: Callable[..., None], **kwargs: bool) -> None:
    call(**kwargs)
    if group.comm is not None:
        seen.listener.hold(seen.name_of(group), *bytes_held(group), group.comm.device)


def _around_reduce(seen: Observation, group: FSDPParamGroup, call: Callable[..., None], comm: FSDPCommContext) -> None:
    before, seen._reducing = seen._reducing, group
    name = seen.name_of(group)
    shows = not (comm.device.has_streams or seen._only_exchanges)
    if shows:
        seen.listener.open(Activity.ENGINE, name, comm.device)
    try:
        call(comm)
    finally:
        seen._reducing = before
        if shows:
            seen.listener.close(Activity.ENGINE, name, comm.device)


def _around_pending(seen: Observation, call: Callable[..., None], pending: Any) -> None:
    group = seen._reducing
    if group is not None:
        seen._observe_transport(group.reducer._transport, group)  # it may be new, as the group was just laid out anew
        last = seen._in_flight.get(seen._pending.get(id(group), -1))
        if last is not None and last.group is group and last.kind is not Kind.GATHER:
            del seen._in_flight[seen._pending[id(group)]]  # the reduction before has ended, or was given up
        seen._in_flight[id(pending)] = _InFlight(group, Kind.REDUCE_SCATTER, [])
        seen._pending[id(group)] = id(pending)
    call(pending)


def _around_wait(seen: Observation, comm: FSDPCommContext, call: Callable[..., None], handle: Any, why: Any) -> None:
    waited = seen._in_flight.get(id(handle))
    waits = bool(handle.works) or handle.event is not None
    if waited is None or not waits:
        call(handle, why)
        return
    listener, name, device = seen.listener, seen.name_of(waited.group), comm.device
    # If only the reduce-scatter is waited for, the all-reduce goes on.
    goes_on = isinstance(handle, PendingReduce) and handle.event is handle.scattered is not None
    ended = [each for each in waited.exchanges if not (goes_on and each.kind is Kind.ALL_REDUCE)]
    kind = ended[-1].kind if ended else waited.kind
    listener.begin_wait(name, kind, device)
    try:
        call(handle, why)
    finally:
        listener.end_wait(name, kind, device)
        for exchange in ended:
            listener.end_exchange(exchange, device)
            waited.exchanges.remove(exchange)
    if waited.kind is Kind.GATHER:
        del seen._in_flight[id(handle)]
