"""`Traffic`: the collectives of a step, how often, how large, over which ranks; and transports that write them down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core import transport
from fsdp2.core.buffers import ALLOCATOR, Arena
from fsdp2.core.gather import Transfer
from fsdp2.core.transport import Native, Works
from fsdp2.tools.estimating.clocks import Clocks
from fsdp2.tools.estimating.hardware import Hardware
from fsdp2.tools.estimating.links import Exchange, Kind, Shape, exchange, shape_of
from fsdp2.tools.estimating.memory import MemoryLog, Use

_FAKE = ("cpu", "fake")

SENT, REDUCED = "sent by the device", "reduced on the device"
"""Buffers that a device has for what is in host memory."""


@dataclass(slots=True)
class Sum:
    """All collectives of one kind over process groups of one shape.

    Attributes:
        count: how many.
        nbytes: of the whole tensors.
        sent_inside: bytes that a rank sends to ranks of its node.
        sent_between: the same, to other nodes.
        seconds: how long they run, one after the other.
    """

    count: int = 0
    nbytes: int = 0
    sent_inside: float = 0.0
    sent_between: float = 0.0
    seconds: float = 0.0

    def add(self, nbytes: int, cost: Exchange) -> None:
        """One more."""
        self.count += 1
        self.nbytes += nbytes
        self.sent_inside += cost.sent_inside
        self.sent_between += cost.sent_between
        self.seconds += cost.seconds

    def repeat(self, since: Sum, times: int) -> None:
        """What was added since the copy ``since`` is added ``times`` more times."""
        for name in self.__slots__:
            now = getattr(self, name)
            setattr(self, name, now + times * (now - getattr(since, name)))


@dataclass(slots=True)
class Traffic:
    """What a rank exchanges.

    Attributes:
        hardware: whose links.
        log: hears of buffers that a device would have, and the simulation has not.
        clocks: where collectives take their time; None: time is not counted.
        sums: by kind, and by how the ranks lie on nodes.
        to_host: bytes that move between the device and its host.
    """

    hardware: Hardware
    log: MemoryLog
    clocks: Clocks | None = None
    sums: dict[tuple[Kind, Shape], Sum] = field(default_factory=dict)
    to_host: int = 0
    _shapes: dict[Any, Shape] = field(default_factory=dict)

    def add(self, kind: Kind, nbytes: int, group: Any) -> None:
        """One collective, on the current stream. ``group``: the process group, or its name."""
        shape = self._shape_of(group)
        cost = exchange(kind, nbytes, shape, self.hardware)
        self.sums.setdefault((kind, shape), Sum()).add(nbytes, cost)
        if self.clocks is not None:
            self.clocks.communicate(cost.seconds)

    def _shape_of(self, group: Any) -> Shape:
        if group not in self._shapes:
            found = _torch.group_named(group) if isinstance(group, str) else group
            self._shapes[group] = shape_of(dist.get_process_group_ranks(found), self.hardware)
        return self._shapes[group]

    def cross(self, nbytes: int) -> None:
        """``nbytes`` move between device and host, on the current stream."""
        self.to_host += nbytes
        if self.clocks is not None:
            self.clocks.communicate(nbytes / self.hardware.host_bandwidth)

    def settle(self) -> None:
        """Everything has arrived: a device holds nothing for it any more."""
        for name in (SENT, REDUCED):
            self.log.borrow(name, 0)

    def snapshot(self) -> Traffic:
        """What was exchanged so far, which does not change any more."""
        return replace(self, sums={key: replace(each) for key, each in self.sums.items()})

    def repeat(self, since: Traffic, times: int) -> None:
        """All that was exchanged since the snapshot ``since`` is exchanged ``times`` more times."""
        for key, each in self.sums.items():
            each.repeat(since.sums.get(key, Sum()), times)
        self.to_host += times * (self.to_host - since.to_host)

    def reset(self) -> None:
        """Count from now on."""
        self.sums, self.to_host = {}, 0


class Observed(Native):
    """A transport that writes down what passes.

    Args:
        group: the process group.
        inner: what moves the bytes; None: nothing does, as the buffers need no values.
        traffic: where it is written.

    Attributes:
        offloads: whether shards and reduced gradients are in host memory, which a device gets and gives its copy of.
    """

    def __init__(self, group: dist.ProcessGroup, inner: Native | None, traffic: Traffic) -> None:
        super().__init__(group)
        self._inner, self._traffic, self.offloads = inner, traffic, False
        self.is_ordered = True if inner is None else inner.is_ordered
        self.widens = Native.widens if inner is None else inner.widens
        self.way = "" if inner is None else inner.way

    def _named(self) -> Native:
        assert self._inner is not None, "asked for"
        self._inner.label = self.label
        return self._inner

    def sum(self, tensor: torch.Tensor, op: Any, works: Works) -> None:
        """Write it down."""
        self._traffic.add(Kind.ALL_REDUCE, tensor.nbytes, self.group)
        if self._inner is not None:
            self._named().sum(tensor, op, works)

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """Write down one collective, for all members are launched at once."""
        if self.offloads:
            self._copy_from_host([input for _, input in members])
        self._traffic.add(Kind.ALL_GATHER, sum(output.nbytes for output, _ in members), self.group)
        if self._inner is not None:
            self._named().all_gather(members, works, user_waits)

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """Write down one collective, for all members are launched at once."""
        self._traffic.add(Kind.REDUCE_SCATTER, sum(input.nbytes for _, input in members), self.group)
        if self.offloads:
            nbytes = sum(output.nbytes for output, _ in members)
            self._traffic.log.borrow(REDUCED, nbytes)
            self._traffic.cross(nbytes)
        if self._inner is not None:
            self._named().reduce_scatter(members, op, works, arena)

    def _copy_from_host(self, inputs: Sequence[torch.Tensor]) -> None:
        """What is sent as it lies is a copy on a device; what is cast is one here, too."""
        log = self._traffic.log
        lying = [each for each in inputs if log.use_of(each.untyped_storage()) is Use.SHARDS]
        log.borrow(SENT, sum(each.nbytes for each in lying))
        self._traffic.cross(sum(each.nbytes for each in inputs))


@contextmanager
def transports_observed(traffic: Traffic, *, moves: bool) -> Iterator[None]:
    """While inside, groups that are prepared exchange by `Observed`; ``moves``: over the engine's own transport."""
    before = transport.OF_BACKENDS.get(_FAKE)
    inner: Callable[[dist.ProcessGroup], Native] = before or Native

    def observed(group: dist.ProcessGroup) -> Native:
        return Observed(group, inner(group) if moves else None, traffic)

    transport.OF_BACKENDS[_FAKE] = observed
    try:
        yield
    finally:
        if before is None:
            del transport.OF_BACKENDS[_FAKE]
        else:
            transport.OF_BACKENDS[_FAKE] = before
