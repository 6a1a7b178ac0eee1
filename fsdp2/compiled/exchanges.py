"""Collectives in graphs, over the transports of the eager runtime: one operator begins each, another one waits for it.

::

    begin_gather(handle, shards)         -> token     packed shards were copied in, and messages are under way
    end_gather(handle, token, ...)       -> unsharded parameters, flat, one tensor for each of the plan's ``gathers``
    begin_reduce(handle, sent, reduce)   -> token
    end_reduce(handle, token, sent, ...) -> the sum of this rank's part, in the layout of the plan's ``reduces``

A *handle* identifies a group: it is a number in a tensor, an input of the graph like the group's shards. So a graph
contains nothing that belongs to a process: equal groups share a graph, whatever their process groups are called, and a
graph may come out of a cache. A *token* identifies one of the collectives that the group has under way.

A graph issues its own gathers ahead (`fsdp2.compiled.overlap`). It does not know the first gather of the next graph, if
blocks are compiled one by one. That gather is issued ahead here, once one pass has shown which one it is.

The results are tensors that the graph has not seen before and owns from then on: operators alias and write nothing, as
their schemas say. The inputs of a collective are arguments of the operator that waits, too, so that their memory is not
reused while messages are under way. If an exception comes between beginning and waiting, the next call forgets the
collective; its transport keeps the memory in which messages may still arrive.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from fsdp2 import _torch, _torch_compiler
from fsdp2.core.buffers import Resizable
from fsdp2.core.gather import Gather, Source
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.layout import GradientLayout
from fsdp2.core.places import PLACE
from fsdp2.core.plan import GatherPlan, GroupPlan, ReducePlan
from fsdp2.core.streams import CommHandle, FSDPCommContext
from fsdp2.errors import FSDPRuntimeError


class _Arrival:
    """The buffer that one gather of a graph fills.

    Attributes:
        unsharded: the flat buffer; it has memory until that is handed to the graph.
    """

    __slots__ = ("unsharded",)

    def __init__(self, plan: GatherPlan, device: torch.device) -> None:
        self.unsharded = Resizable(torch.empty(plan.layout.unsharded_numel, dtype=plan.param_dtype, device=device))


_Pass = tuple[int, bool]
"""A forward of a root, by its number and False; or the backwards that come after it, by this number and True."""


@dataclass(eq=False)
class _Gathering:
    """One gather that is under way, or the buffers of a finished one, which the next gather uses.

    Attributes:
        gather: the buffers and copies.
        arrivals: the unsharded buffers, one for each of the plan's ``gathers``, whose memory goes to the graph.
        handle: the works to wait for.
        version: the version of the parameters when it was begun.
    """

    gather: Gather
    arrivals: list[_Arrival]
    handle: CommHandle
    version: object = None


@dataclass(eq=False)
class _Reduction:
    """One reduction under way.

    Attributes:
        plan: the plan that it follows.
        output: the flat tensor that it fills.
        handle: the works to wait for.
    """

    plan: ReducePlan
    output: torch.Tensor
    handle: CommHandle


class _Course:
    """The gathers of the graphs of one root in one pass.

    Attributes:
        during: the pass.
        last: the group whose gather a graph has begun last; None before the first.
        under_way: how many gathers graphs have begun and not ended.
        ahead: the gathers that were begun before their graph, by group.
    """

    def __init__(self) -> None:
        self.during: _Pass = (-1, False)
        self.last: GroupExchanges | None = None
        self.under_way = 0
        self.ahead: dict[GroupExchanges, _Gathering] = {}

    def go_on(self) -> None:
        """If another pass has begun, forget this one: its order and its gathers mean nothing in the new one."""
        now = (PLACE.step, _torch.backward_is_running())
        if now != self.during:
            self.begin_anew()
            self.during = now

    def begin_anew(self) -> None:
        """Forget the pass. Gathers that were begun ahead are left to their transports."""
        if self.last is not None:
            self.last.successors.pop(self.during[1], None)
        self.last, self.under_way = None, 0
        self.ahead.clear()


_COURSES: weakref.WeakKeyDictionary[FSDPCommContext, _Course] = weakref.WeakKeyDictionary()


def _course_of(comm: FSDPCommContext) -> _Course:
    found = _COURSES.get(comm)
    if found is None:
        found = _COURSES[comm] = _Course()
    return found


_NUMBERS = itertools.count()
_TOKENS = itertools.count()


class GroupExchanges:
    """The collectives of one group in graphs, by one plan.

    All ranks must begin, and end, the same ones in the same order.

    Attributes:
        plan: the plan by which they are laid out.
        number: the number in their handle.
        successors: in forward (False) and in backward (True), the group whose gather the next graph begins with, as far
            as it is known.
    """

    def __init__(self, group: FSDPParamGroup, budget: int | None) -> None:
        self.successors: dict[bool, Callable[[], GroupExchanges | None]] = {}
        self._budget = budget
        self.number = next(_NUMBERS)
        self.plan: GroupPlan = group.plan
        self._shards = tuple(buffers.shard for buffers in group.storage.buffers)
        self._group = weakref.ref(group)
        self._gathers: dict[int, _Gathering] = {}
        self._reductions: dict[int, _Reduction] = {}
        self._idle: list[_Gathering] = []
        self._version: object = None  # the version of the parameters in the last forward
        _EXCHANGES[self.number] = self

    def abandon(self) -> None:
        """Forget what is under way, and its buffers: the transport keeps memory in which messages may still arrive."""
        if self._gathers or self._reductions:
            self._gathers.clear()
            self._reductions.clear()
            _course_of(self._living()[1]).begin_anew()

    def begin_gather(self) -> int:
        """Begin to gather all shards, unless that was done ahead. Returns the token.

        Raises:
            FSDPRuntimeError: a backward runs, and the parameters were written since the last forward.
        """
        group, comm = self._living()
        if not _torch.backward_is_running():
            self._version = group.written()
        elif self._version not in (None, group.written()):
            group.refuse_backward()
        course = _course_of(comm)
        course.go_on()
        if course.last is not None:
            # If another gather is under way, the graph itself has issued this one ahead: there is nothing to learn.
            course.last.successors[course.during[1]] = weakref.ref(self) if not course.under_way else _NOBODY
        course.last = self
        gathering = course.ahead.pop(self, None)
        if gathering is None or gathering.version != group.written():
            gathering = self._launch(group, comm)
        course.under_way += 1
        token = next(_TOKENS)
        self._gathers[token] = gathering
        return token

    def _launch(self, group: FSDPParamGroup, comm: FSDPCommContext) -> _Gathering:
        gathering = self._idle.pop() if self._idle else self._new_gathering(group)
        gathering.handle = CommHandle([], label=group.transport.label)
        gathering.version = group.written()
        with _torch.without_grad():
            gathering.gather.allocate(comm.gather_arena)
            gathering.gather.copy_in()
            group.transport.all_gather(gathering.gather.members, gathering.handle.works)
        return gathering

    def end_gather(self, token: int) -> list[torch.Tensor]:
        """Wait for the gather. Returns its results, (unsharded_numel,) for each of the plan's ``gathers``."""
        _, comm = self._living()
        gathering = self._gathers.pop(token)
        course = _course_of(comm)
        course.under_way -= 1
        if not course.under_way and course.last is self:
            self._begin_ahead(course)
        gathering.handle.wait_for_works()
        with _torch.without_grad():
            gathering.gather.copy_out()
            if not _torch.can_swap_memory:  # then the buffers themselves go to the graph, and others are made next time
                return [arrival.unsharded.flat for arrival in gathering.arrivals]
            flats = [arrival.unsharded.hand_over() for arrival in gathering.arrivals]
        self._idle.append(gathering)
        return flats

    def _begin_ahead(self, course: _Course) -> None:
        """Begin the gather of the next graph, if that is known and the prefetch budget allows it."""
        following = self.successors.get(course.during[1], _NOBODY)()
        if following is None or following is self or following in course.ahead:
            return
        if self._budget is not None and following.unsharded_bytes > self._budget:
            return
        group = following._group()
        if group is not None and group.comm is not None:
            course.ahead[following] = following._launch(group, group.comm)

    @property
    def unsharded_bytes(self) -> int:
        """How many bytes its unsharded parameters have."""
        return sum(plan.layout.unsharded_numel * plan.param_dtype.itemsize for plan in self.plan.gathers)

    def begin_reduce(self, sent: Sequence[torch.Tensor], index: int) -> int:
        """Begin to reduce ``sent``, as `members_of` the plan's ``reduces[index]`` lists it. Returns the token."""
        group, comm = self._living()
        refuse_other_plan(group, self.plan)
        plan = self.plan.reduces[index]
        transport = group.reducer.transport
        with _torch.without_grad():
            output = torch.empty(plan.layout.numel, dtype=plan.dtype, device=group.mesh.device)
            members, end = [], 0
            # Alignment between members is received from nobody, and must be zero for what reads the flat result.
            for (offset, numel), each in zip(members_of(plan.layout), sent, strict=True):
                if offset > end:
                    output[end:offset].zero_()
                members.append((output.narrow(0, offset, numel), each))
                end = offset + numel
            if end < plan.layout.numel:
                output[end:].zero_()
            reduction = _Reduction(plan, output, CommHandle([], label=transport.label))
            transport.reduce_scatter(members, plan.scaling.scatter_op, reduction.handle.works, comm.reduce_arena)
        token = next(_TOKENS)
        self._reductions[token] = reduction
        return token

    def end_reduce(self, token: int) -> torch.Tensor:
        """Wait for the reduction, and sum over replicas if there are any. Returns (numel,) of the plan's layout."""
        group, _ = self._living()
        reduction = self._reductions.pop(token)
        handle, plan, output = reduction.handle, reduction.plan, reduction.output
        handle.wait_for_works()
        if group.mesh.replicate_group is not None:
            handle.works = []
            with _torch.without_grad():
                group.reducer.transport.all_reduce(output, plan.scaling.replicate_op, handle.works)
            handle.wait_for_works()
        return output

    def _living(self) -> tuple[FSDPParamGroup, FSDPCommContext]:
        group = self._group()
        if group is None or group.comm is None:
            raise_gone()
        return group, group.comm

    def _new_gathering(self, group: FSDPParamGroup) -> _Gathering:
        mesh, plans = group.mesh, self.plan.gathers
        with torch.inference_mode(False):
            arrivals = [_Arrival(plan, mesh.device) for plan in plans]
            parts = zip(arrivals, self._shards, plans, strict=True)
            sources = [Source(arrival, shard, plan.layout) for arrival, shard, plan in parts]
            gather = Gather(sources, mesh.shard_size, mesh.shard_rank, mesh.device, None)
        return _Gathering(gather, arrivals, CommHandle([]))


def _nobody() -> None:
    return None


_NOBODY: Callable[[], GroupExchanges | None] = _nobody

_EXCHANGES: weakref.WeakValueDictionary[int, GroupExchanges] = weakref.WeakValueDictionary()
"""All exchanges that are alive, by the number in their handle."""


def raise_gone() -> NoReturn:
    """Raise `FSDPRuntimeError`: the group of a graph that runs does not exist any more."""
    raise FSDPRuntimeError(
        "the model of this backward was deleted, or sharded anew, after its forward: run backward before."
    )


def refuse_other_plan(group: FSDPParamGroup, plan: GroupPlan) -> None:
    """Refuse to reduce by ``plan``, with which a graph's forward was traced, if ``group`` could not deliver the result.

    Only the scalings of the plans may differ: the difference is applied to the result.

    Raises:
        FSDPRuntimeError: gradients are laid out differently now, or other parameters have them.
    """
    now = group.plan
    if now is plan:
        return
    then = [[(each.dtype, each.params, each.layout) for each in one.reduces] for one in (plan, now)]
    if plan.params != now.params or then[0] != then[1]:
        raise FSDPRuntimeError(
            f"which parameters of '{group.name}' require gradients, or in which dtype or layout these are reduced, was "
            "changed between a compiled forward and its backward, whose graph reduces as it was. Change it before the "
            "forward, or after the backward."
        )


def handle_of(group: FSDPParamGroup, budget: int | None) -> torch.Tensor:
    """Make the exchanges of ``group`` by its present plan, and return their handle, which keeps them alive.

    ``budget``: how many bytes may be gathered ahead of the compute; None: one group.
    """
    exchanges = GroupExchanges(group, budget)
    with torch.inference_mode(False):
        handle = torch.tensor(exchanges.number, device="cpu")
    handle.exchanges = exchanges  # type: ignore[attr-defined]
    return handle


def abandon(handle: torch.Tensor) -> None:
    """Forget collectives that an exception has left under way. No graph is running."""
    _of(handle).abandon()


def _of(handle: torch.Tensor) -> GroupExchanges:
    found = _EXCHANGES.get(int(handle))
    if found is None:
        raise_gone()
    return found


def members_of(layout: GradientLayout) -> list[tuple[int, int]]:
    """The offset and size in the result of each tensor to send: the packed row, then gradients that are not packed."""
    alone = [(slot.offset, slot.shard_numel) for slot in layout.slots if slot.direct and slot.shard_numel]
    return [(0, layout.packed_numel), *sorted(alone)]


# The operators. Each is called with tensors of one group; sizes and dtypes are passed for their fake implementations.


def _begin_gather(handle: torch.Tensor, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(_of(handle).begin_gather(), device="cpu")


def _end_gather(
    handle: torch.Tensor,
    token: torch.Tensor,
    shards: Sequence[torch.Tensor],
    numels: Sequence[int],
    dtypes: str,
) -> list[torch.Tensor]:
    return _of(handle).end_gather(int(token))


def _begin_reduce(handle: torch.Tensor, sent: Sequence[torch.Tensor], reduce: int) -> torch.Tensor:
    return torch.tensor(_of(handle).begin_reduce(sent, reduce), device="cpu")


def _end_reduce(
    handle: torch.Tensor, token: torch.Tensor, sent: Sequence[torch.Tensor], numel: int, dtype: torch.dtype
) -> torch.Tensor:
    return _of(handle).end_reduce(int(token))


def _token(handle: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(handle)


def _gathered(
    handle: torch.Tensor,
    token: torch.Tensor,
    shards: Sequence[torch.Tensor],
    numels: Sequence[int],
    dtypes: str,
) -> list[torch.Tensor]:
    named = [getattr(torch, name) for name in dtypes.split()]  # operator schemas have no lists of dtypes
    return [each.new_empty(numel, dtype=dtype) for each, numel, dtype in zip(shards, numels, named, strict=True)]


def _reduced(
    handle: torch.Tensor, token: torch.Tensor, sent: Sequence[torch.Tensor], numel: int, dtype: torch.dtype
) -> torch.Tensor:
    return sent[0].new_empty(numel, dtype=dtype)


BEGIN_GATHER = _torch_compiler.define_operator(
    "begin_gather(Tensor handle, Tensor[] shards) -> Tensor", _begin_gather, fake=_token
)
END_GATHER = _torch_compiler.define_operator(
    "end_gather(Tensor handle, Tensor token, Tensor[] shards, int[] numels, str dtypes) -> Tensor[]",
    _end_gather,
    fake=_gathered,
)
BEGIN_REDUCE = _torch_compiler.define_operator(
    "begin_reduce(Tensor handle, Tensor[] sent, int reduce) -> Tensor", _begin_reduce, fake=_token
)
END_REDUCE = _torch_compiler.define_operator(
    "end_reduce(Tensor handle, Tensor token, Tensor[] sent, int numel, ScalarType dtype) -> Tensor",
    _end_reduce,
    fake=_reduced,
)


def gather(handle: torch.Tensor, shards: Sequence[torch.Tensor], plans: Sequence[GatherPlan]) -> list[torch.Tensor]:
    """Gather a group's unsharded parameters, and wait: flat, (unsharded_numel,) for each of the plan's ``gathers``."""
    token = BEGIN_GATHER(handle, shards)
    numels = [plan.layout.unsharded_numel for plan in plans]
    dtypes = " ".join(str(plan.param_dtype).removeprefix("torch.") for plan in plans)
    return END_GATHER(handle, token, shards, numels, dtypes)  # type: ignore[no-any-return]


def reduce(handle: torch.Tensor, sent: Sequence[torch.Tensor], index: int, plan: ReducePlan) -> torch.Tensor:
    """Reduce ``sent`` by ``plan``, the group's ``reduces[index]``, and wait for it: (numel,) of its layout."""
    token = BEGIN_REDUCE(handle, sent, index)
    return END_REDUCE(handle, token, sent, plan.layout.numel, plan.dtype)  # type: ignore[no-any-return]
