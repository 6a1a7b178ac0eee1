"""All-gather and reduce-scatter as sends and receives between all pairs of ranks, without a thread or a copy between.

For backends whose own collectives do more than that: gloo's reduce-scatter sends twice what it must (it is an
all-reduce) and clones its input, its all-gather goes through an output of its own. On 2, 4 and 8 ranks, 16 KiB to
64 MiB: 0.3 to 0.9 of the CPU time of gloo's own all-gather, 0.4 to 0.75 of its reduce-scatter, and no clone of the
gradients (``python -m benchmarks.primitives``).

[Note: tags and what is abandoned]
Every exchange over a process group has the next tag, the same on all ranks, which issue the same exchanges in the
same order: messages of two exchanges, or of the user's own, are never mistaken for one another. An exchange that an
exception has abandoned (nobody waits for it) must not be forgotten while messages are under way into its buffers: it
is kept until a later one over the same group is done, for messages between two ranks arrive in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.buffers import ALLOCATOR, Arena, Resizable
from fsdp2.core.gather import Transfer
from fsdp2.core.transport import OF_BACKENDS, Native, Works
from fsdp2.errors import FSDPRuntimeError
from fsdp2.features import announce

_FIRST_TAG = 0x46000000
_TAGS = 1 << 24


class _Line:
    """The exchanges over one process group: how many there were, and those that are not known to be done, by number."""

    __slots__ = ("begun", "kept")

    def __init__(self) -> None:
        self.begun = 0
        self.kept: dict[int, _Exchange] = {}


_LINES: WeakKeyDictionary[dist.ProcessGroup, _Line] = WeakKeyDictionary()


class _Exchange:
    """One all-gather or reduce-scatter under way: a work, to be waited for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        line = _LINES.get(group)
        if line is None:
            line = _LINES[group] = _Line()
        self.group = group
        self.tag = _FIRST_TAG + line.begun % _TAGS
        self._line = line
        self._number = line.begun
        self._messages: list[dist.Work] = []
        self._waited_for = 0
        self._failure = ""
        line.kept[line.begun] = self
        line.begun += 1

    def receive(self, part: torch.Tensor, source: int) -> None:
        """Begin to receive ``part`` from the rank ``source``. Before anything is sent, on every rank."""
        self._messages.append(_torch.receive(part, source, self.group, self.tag))

    def send(self, part: torch.Tensor, target: int) -> None:
        """Begin to send ``part`` to the rank ``target``."""
        self._messages.append(_torch.send(part, target, self.group, self.tag))

    def wait(self) -> bool:
        """Block the host until all has arrived; nothing to do the second time.

        Raises:
            RuntimeError: the backend's, of a message that failed. From then on: FSDPRuntimeError, without waiting.
        """
        if self._failure:
            raise FSDPRuntimeError(f"an exchange with other ranks has failed before: {self._failure}")
        try:
            while self._waited_for < len(self._messages):
                # Each once: gloo would wait for another of the same tag. Counted before: Ctrl-C shows after the wait.
                self._waited_for += 1
                self._messages[self._waited_for - 1].wait()
        except Exception as failure:
            self._failure = str(failure) or type(failure).__name__
            raise
        kept = self._line.kept
        for number in [each for each in kept if each <= self._number]:
            del kept[number]
        return True


class _Sum(_Exchange):
    """A reduce-scatter: what has arrived is added up.

    Attributes:
        terms: one for each rank, until they are added.
        taken: what they were received in, if it is to be freed.
    """

    terms: list[torch.Tensor]
    output: torch.Tensor
    is_mean: bool
    taken: list[Resizable]

    def wait(self) -> bool:
        """Block the host until ``output`` holds the result."""
        super().wait()
        if self.terms:
            with _torch.without_grad():
                torch.add(self.terms[0], self.terms[1], out=self.output)
                for term in self.terms[2:]:
                    self.output.add_(term)
                if self.is_mean:
                    self.output.div_(len(self.terms))
        self.terms = []
        for buffer in self.taken:
            buffer.free()
        return True


def all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, works: list[Any]) -> None:
    """Begin to gather ``input`` (n,) of every rank into ``output`` (world_size * n,): done when ``works`` are."""
    rank, world_size, numel = group.rank(), group.size(), input.numel()
    if numel == 0:
        return
    parts = output.split(numel)
    exchange = _Exchange(group)
    works.append(exchange)
    for step in range(1, world_size):
        exchange.receive(parts[(rank - step) % world_size], (rank - step) % world_size)
    for step in range(1, world_size):
        exchange.send(input, (rank + step) % world_size)
    if parts[rank].data_ptr() != input.data_ptr():
        parts[rank].copy_(input)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any,
    group: dist.ProcessGroup,
    works: list[Any],
    arena: Arena = ALLOCATOR,
) -> None:
    """Begin to sum (or average) ``input`` (world_size * n,) over the ranks, its part of this rank into ``output`` (n,).

    Terms are added in the order of the ranks, one after the other, in the dtype of ``input``, which is only read.
    ``works`` are to be waited for: the last of them adds. Until then n elements for each other rank are kept, in
    memory of ``arena``; what is never waited for never goes back there, for it may yet be received.
    """
    rank, world_size, numel = group.rank(), group.size(), output.numel()
    if numel == 0:
        return
    parts = input.split(numel)
    exchange = _Sum(group)
    received_numel = (world_size - 1) * numel
    exchange.taken = []
    received = arena.empty(received_numel, dtype=input.dtype, device=input.device, taken=exchange.taken)
    arrived = list(received.split(numel))
    exchange.output, exchange.is_mean = output, op == dist.ReduceOp.AVG
    exchange.terms = [*arrived[:rank], parts[rank], *arrived[rank:]]
    works.append(exchange)
    for step in range(1, world_size):
        exchange.receive(exchange.terms[(rank - step) % world_size], (rank - step) % world_size)
    for step in range(1, world_size):
        exchange.send(parts[(rank + step) % world_size], (rank + step) % world_size)


def can_reduce(op: Any) -> bool:
    """Whether `reduce_scatter` knows ``op``."""
    return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)  # type: ignore[comparison-overlap]


class PeerToPeer(Native):
    """Messages between all pairs of ranks; terms are added in rank order, in the dtype that travels.

    Messages are told apart by their tags, so a rank's collectives may come in any order.
    """

    is_ordered = False
    way = "peer to peer"

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """One work for each member."""
        if works is None:
            super().all_gather(members, works)
            return
        if _torch.count_dispatch_modes() or _torch.gathers_are_patched():
            announce.all_gather(members, self.group)
        for output, input in members:
            all_gather(output, input, self.group, works)

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """One work for each member."""
        if works is None or not can_reduce(op):
            super().reduce_scatter(members, op, works)
            return
        if _torch.count_dispatch_modes() or _torch.reduce_scatters_are_patched():
            announce.reduce_scatter(members, op, self.group)
        for output, input in members:
            reduce_scatter(output, input, op, self.group, works, arena)


class _OfFakeGroups(Native):
    """A fake group is taken for the gloo group that it stands for."""

    is_ordered = False


MAX_PEERS = 8
"""Beyond, nothing was measured: a rank sends a message to every other, more of them and smaller ones."""


def _for_few(few: type[Native]) -> Callable[[dist.ProcessGroup], Native]:
    return lambda group: (few if group.size() <= MAX_PEERS else Native)(group)


OF_BACKENDS["cpu", "gloo"], OF_BACKENDS["cpu", "fake"] = _for_few(PeerToPeer), _for_few(_OfFakeGroups)
