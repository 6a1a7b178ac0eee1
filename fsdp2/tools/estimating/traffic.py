"""`Traffic`: the collectives of a step: how many, how large, over which ranks; and transports that record them."""

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
from fsdp2.tools.estimating.hardware import Hardware
from fsdp2.tools.estimating.memory import MemoryLog, Use
from fsdp2.tools.facts.data import Kind
from fsdp2.tools.facts.exchanges import sent

_FAKE = ("cpu", "fake")

SENT, REDUCED = "sent by the device", "reduced on the device"
"""Buffers that a device would have for shards and gradients that are in host memory."""


@dataclass(slots=True)
class Sum:
    """All collectives of one kind, over process groups that are spread over nodes in the same way.

    Attributes:
        count: how many collectives there are.
        nbytes: bytes of the full tensors.
        sent_inside: bytes that a rank sends to ranks of its node.
        sent_between: bytes that a rank sends to other nodes.
    """

    count: int = 0
    nbytes: int = 0
    sent_inside: int = 0
    sent_between: int = 0

    def repeat(self, since: Sum, times: int) -> None:
        """Add ``times`` more times what was added since the copy ``since`` was made."""
        for name in self.__slots__:
            now = getattr(self, name)
            setattr(self, name, now + times * (now - getattr(since, name)))


@dataclass(slots=True)
class Traffic:
    """What a rank exchanges in a step.

    Attributes:
        hardware: the machine, which says which ranks share a node.
        log: where buffers are noted that a device would have, and the simulation has not.
        sums: the collectives, by kind, and by how many ranks are on how many nodes.
        to_host: bytes that move between the device and its host.
    """

    hardware: Hardware
    log: MemoryLog
    sums: dict[tuple[Kind, int, int], Sum] = field(default_factory=dict)
    to_host: int = 0
    _ranks: dict[Any, list[int]] = field(default_factory=dict)

    def add(self, kind: Kind, nbytes: int, group: Any) -> None:
        """Count one collective of ``nbytes`` of full tensors. ``group``: the process group, or its name."""
        if group not in self._ranks:
            found = _torch.group_named(group) if isinstance(group, str) else group
            self._ranks[group] = dist.get_process_group_ranks(found)
        ranks, per_node = self._ranks[group], self.hardware.ranks_per_node
        part_bytes = nbytes if kind == "all-reduce" else nbytes // len(ranks)
        inside, between = sent(kind, part_bytes, ranks, 0, per_node, "ring")
        known = self.sums.setdefault((kind, len(ranks), len({rank // per_node for rank in ranks})), Sum())
        known.count += 1
        known.nbytes += nbytes
        known.sent_inside += inside
        known.sent_between += between

    def settle(self) -> None:
        """Note that everything has arrived, so that a device has no buffers for it any more."""
        for name in (SENT, REDUCED):
            self.log.borrow(name, 0)

    def snapshot(self) -> Traffic:
        """A copy of what was exchanged so far."""
        return replace(self, sums={key: replace(each) for key, each in self.sums.items()})

    def repeat(self, since: Traffic, times: int) -> None:
        """Count ``times`` more times everything that was exchanged since the snapshot ``since``."""
        for key, each in self.sums.items():
            each.repeat(since.sums.get(key, Sum()), times)
        self.to_host += times * (self.to_host - since.to_host)

    def reset(self) -> None:
        """Start counting anew."""
        self.sums, self.to_host = {}, 0


class Observed(Native):
    """A transport that records what it carries.

    Args:
        group: the process group.
        inner: the transport that moves the bytes; None: nothing moves them, as buffers need no values.
        traffic: where it is recorded.

    Attributes:
        offloads: whether shards and reduced gradients are in host memory, so that a device would copy them.
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
        """Record an all-reduce."""
        self._traffic.add("all-reduce", tensor.nbytes, self.group)
        if self._inner is not None:
            self._named().sum(tensor, op, works)

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """Record one collective, as all members are launched at once."""
        if self.offloads:
            self._copy_from_host([input for _, input in members])
        self._traffic.add("all-gather", sum(output.nbytes for output, _ in members), self.group)
        if self._inner is not None:
            self._named().all_gather(members, works, user_waits)

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """Record one collective, as all members are launched at once."""
        self._traffic.add("reduce-scatter", sum(input.nbytes for _, input in members), self.group)
        if self.offloads:
            nbytes = sum(output.nbytes for output, _ in members)
            self._traffic.log.borrow(REDUCED, nbytes)
            self._traffic.to_host += nbytes
        if self._inner is not None:
            self._named().reduce_scatter(members, op, works, arena)

    def _copy_from_host(self, inputs: Sequence[torch.Tensor]) -> None:
        """Count copies from the host. Shards that are sent as they are need a buffer on a device; casts have one."""
        log = self._traffic.log
        lying = [each for each in inputs if log.use_of(each.untyped_storage()) is Use.SHARDS]
        log.borrow(SENT, sum(each.nbytes for each in lying))
        self._traffic.to_host += sum(each.nbytes for each in inputs)


@contextmanager
def transports_observed(traffic: Traffic, *, moves: bool) -> Iterator[None]:
    """Inside, groups that are prepared exchange by `Observed`; ``moves``: over the engine's own transport."""
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
