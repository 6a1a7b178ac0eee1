"""All-gather, reduce-scatter and all-reduce as sends and receives between all pairs of ranks: no thread, no copy.

For backends whose own collectives do more than that: gloo's reduce-scatter sends twice what it must (it is an
all-reduce) and clones its input, its all-gather goes through an output of its own. On 2 to 64 ranks, 16 KiB to
16 MiB: 0.3 to 1.05 of the CPU time of gloo's own all-gather, 0.3 to 0.75 of its reduce-scatter, and no clone of the
gradients (``python -m benchmarks.primitives``).

[Note: tags and what is abandoned]
Every exchange over a process group has the next number, and its tag is a hash of 30 bits of that and of the `Label` of
what it is of. Ranks issue the same exchanges in the same order; where they do not, tags differ, so that no rank ever
takes another's parameters or gradients for its own, whatever their sizes: it waits, and a watchdog finds out why
(`plugs/watchdog/`). An exchange that an exception has abandoned (nobody waits for it) must not be forgotten while
messages are under way into its buffers: it is kept until a later one over the same group is done, for messages between
two ranks arrive in order.

[Note: all or nothing]
The messages of an exchange are launched by one call of C, between two of whose steps no Ctrl-C comes: a rank that had
begun to receive and not to send would leave the others waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from operator import length_hint, methodcaller
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2._remedies import FEWER
from fsdp2.core.buffers import ALLOCATOR, Arena, Resizable
from fsdp2.core.gather import Transfer
from fsdp2.core.places import PLACE, RECORDED, UNNAMED, Label, Record, raise_stopped
from fsdp2.core.transport import OF_BACKENDS, Native, Works
from fsdp2.errors import FSDPRuntimeError
from fsdp2.plugs.transports import announce

_FIRST_TAG = 1 << 30
_MIXED = 2_654_435_761
"""Odd: numbers of one label have the same tag only if they are 2 ** 30 apart."""

_receive: Callable[..., dist.Work] = dist.ProcessGroup.recv
_send: Callable[..., dist.Work] = dist.ProcessGroup.send
_wait = methodcaller("wait")


class Line:
    """The exchanges over one process group.

    Attributes:
        begun: how many there were.
        kept: those that are not known to be done, by number.
        recent: the last ones.
        broken: numbers of those whose messages could not all be launched.
    """

    __slots__ = ("begun", "broken", "kept", "recent")

    def __init__(self) -> None:
        self.begun = 0
        self.kept: dict[int, Exchange] = {}
        self.recent: deque[Record] = deque(maxlen=RECORDED)
        self.broken: list[int] = []


LINES: WeakKeyDictionary[dist.ProcessGroup, Line] = WeakKeyDictionary()
"""By process group."""


def tag_of(label: Label, number: int) -> int:
    """Of the messages of an exchange."""
    return _FIRST_TAG + (label.bits + number * _MIXED) % _FIRST_TAG


class Message(NamedTuple):
    """One that may be under way: ``part`` from or to the rank ``peer`` of the group."""

    peer: int
    arrives: bool
    part: torch.Tensor


class Exchange:
    """One exchange under way: a work, to be waited for.

    Attributes:
        group: of its ranks.
        label: what it is of.
        number: over that group, once it was launched.
        tag: of its messages.
    """

    def __init__(self, group: dist.ProcessGroup, label: Label = UNNAMED) -> None:
        self.group = group
        self.label = label
        self.number = self.tag = -1
        self._line: Line | None = None
        self._messages: list[dist.Work] = []
        self._left: Iterator[dist.Work] | None = None  # to be waited for; None: all
        self._parts: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())
        self._failure = ""

    def launch(self, arriving: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]) -> None:
        """Begin to receive ``arriving`` from each rank in turn, and to send ``leaving`` to each, but this one.

        Raises:
            FSDPRuntimeError: nothing may be exchanged, see `Place.stopped`; or a rank is gone, as of `wait`.
        """
        if PLACE.stopped:
            raise_stopped()
        group = self.group
        line = LINES.get(group)
        if line is None:
            line = LINES[group] = Line()
            line.begun = LOST.first_number(group)
        number = line.begun
        tag = tag_of(self.label, number)
        sources, targets = _peers(group)
        receives = map(_receive, repeat(group), [[arriving[each]] for each in sources], sources, repeat(tag))
        sends = map(_send, repeat(group), [[leaving[each]] for each in targets], targets, repeat(tag))
        try:
            self._line, self.number, self.tag, self._parts = line, number, tag, (arriving, leaving)
            line.kept[number] = self
            line.begun = number + 1
            line.recent.append(Record(number, self.label, PLACE.step, PLACE.phase))
            self._messages.extend(chain(receives, sends))
        except BaseException as failure:
            if len(self._messages) < len(sources) + len(targets):  # else it was Ctrl-C, after all of them
                self._fail(failure)
                line.broken.append(number)
                if type(failure) is RuntimeError:  # gloo's, where a connection is lost already
                    raise FSDPRuntimeError(LOST.text(self, failure)) from failure
            raise

    @property
    def has_failed(self) -> bool:
        """Whether it was waited for, or launched, in vain; or an exception came before anything was sent."""
        return bool(self._failure) or self.number < 0

    def _fail(self, failure: BaseException) -> None:
        self._failure = str(failure) or type(failure).__name__

    @property
    def waited_for(self) -> int:
        """How many messages, with that which is waited for now."""
        return 0 if self._left is None else len(self._messages) - length_hint(self._left)

    def pending(self) -> list[Message]:
        """The messages that were not waited for yet; asked for by another thread."""
        (arriving, leaving), done = self._parts, self.waited_for
        if not arriving or self._failure:
            return []
        sources, targets = _peers(self.group)
        every = [Message(each, True, arriving[each]) for each in sources]
        every += [Message(each, False, leaving[each]) for each in targets]
        return every[max(done - 1, 0) :]

    def wait(self) -> bool:
        """Block the host until all has arrived; nothing to do the second time.

        Raises:
            FSDPRuntimeError: the ranks can never meet (`Place.stopped`), or a rank is gone, with its number. From then
                on the same, without waiting.
        """
        if self._failure:
            raise FSDPRuntimeError(f"an exchange with other ranks has failed before: {self._failure}")
        if self._left is None:
            self._left = iter(self._messages)
        PLACE.waiting = self
        try:
            # Each once, as gloo would wait for another of the same tag; from C: Ctrl-C shows when all have arrived.
            deque(map(_wait, self._left), 0)
        except Exception as failure:
            self._fail(failure)
            if PLACE.stopped:
                raise_stopped()
            raise FSDPRuntimeError(LOST.text(self, failure)) from failure
        finally:
            PLACE.waiting = None
        if PLACE.stopped:
            self._failure = PLACE.stopped
            raise_stopped()
        self._parts = ((), ())
        self._messages, self._left = [], None  # which hold what they carried
        if self._line is not None:
            kept = self._line.kept
            for number in [each for each in kept if each <= self.number]:
                del kept[number]
        return True


class Lost:
    """What is said of a message that failed, and done before the next ones; `plugs/watchdog/` knows more."""

    def text(self, exchange: Exchange, failure: Exception) -> str:
        """For an exchange that failed so."""
        waited_for = (exchange.waited_for or len(exchange._messages) + 1) - 1  # 0: it was not launched to its end
        sources, targets = _peers(exchange.group)
        peer = [*sources, *targets][waited_for]
        rank = dist.get_global_rank(exchange.group, peer)
        return (
            f"{exchange.label.text} with rank {rank} failed, {PLACE.phase}: its process has ended, or raised and left, "
            f"or the connection to it was lost. See what that rank said. {FEWER} ({failure})"
        )

    def first_number(self, group: dist.ProcessGroup) -> int:
        """Of the exchanges over ``group``, where there was none before."""
        return 0


LOST = Lost()

_PEERS: WeakKeyDictionary[dist.ProcessGroup, tuple[list[int], list[int]]] = WeakKeyDictionary()


def _peers(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """From whom is received, and to whom sent, in which order."""
    known = _PEERS.get(group)
    if known is None:
        rank, world_size = group.rank(), group.size()
        steps = range(1, world_size)
        known = [(rank - each) % world_size for each in steps], [(rank + each) % world_size for each in steps]
        _PEERS[group] = known
    return known


class _Sum(Exchange):
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
            add_up(self.terms, self.output, is_mean=self.is_mean)
        self.terms = []
        for buffer in self.taken:
            buffer.free()
        return True


def add_up(terms: Sequence[torch.Tensor], output: torch.Tensor, *, is_mean: bool) -> None:
    """``output`` is the sum of ``terms``, two or more, in their order; or their mean. It may be the first of them.

    It is of their dtype, or of a wider one, in which they are added.
    """
    with _torch.without_grad():
        if terms[0].dtype is output.dtype:
            torch.add(terms[0], terms[1], out=output)
        else:
            output.copy_(terms[0]).add_(terms[1])
        for term in terms[2:]:
            output.add_(term)
        if is_mean:
            output.div_(len(terms))


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    works: list[Any],
    label: Label = UNNAMED,
) -> None:
    """Begin to gather ``input`` (n,) of every rank into ``output`` (world_size * n,): done when ``works`` are."""
    rank, numel = group.rank(), input.numel()
    if numel == 0:
        return
    parts = output.split(numel)
    exchange = Exchange(group, label)
    works.append(exchange)
    exchange.launch(parts, [input] * len(parts))
    if parts[rank].data_ptr() != input.data_ptr():
        parts[rank].copy_(input)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any,
    group: dist.ProcessGroup,
    works: list[Any],
    arena: Arena = ALLOCATOR,
    label: Label = UNNAMED,
) -> None:
    """Begin to sum (or average) ``input`` (world_size * n,) over the ranks, its part of this rank into ``output`` (n,).

    Terms are added in the order of the ranks, one after the other, in the dtype of ``output``. ``input`` is only read,
    and may be of a narrower dtype: its elements travel as they are.
    ``works`` are to be waited for: the last of them adds. Until then n elements for each other rank are kept, in
    memory of ``arena``; what is never waited for never goes back there, for it may yet be received.
    """
    rank, world_size, numel = group.rank(), group.size(), output.numel()
    if numel == 0:
        return
    parts = input.split(numel)
    exchange = _Sum(group, label)
    received_numel = (world_size - 1) * numel
    exchange.taken = []
    received = arena.empty(received_numel, dtype=input.dtype, device=input.device, taken=exchange.taken)
    arrived = list(received.split(numel))
    exchange.output, exchange.is_mean = output, op == dist.ReduceOp.AVG
    exchange.terms = [*arrived[:rank], parts[rank], *arrived[rank:]]
    works.append(exchange)
    exchange.launch(exchange.terms, parts)


class _SumOfAll(Exchange):
    """An all-reduce: this rank's piece of ``output`` is summed, and then sent to all others.

    Attributes:
        output: summed in place.
        terms: this rank's piece of all ranks.
        pieces: of ``output``, one for each rank.
    """

    output: torch.Tensor
    is_mean: bool
    terms: list[torch.Tensor]
    pieces: Sequence[torch.Tensor]
    _second: Exchange | None = None

    def wait(self) -> bool:
        """Block the host until ``output`` holds the result. An interrupted wait goes on where it was."""
        super().wait()
        try:
            if self._second is None:
                # Apart, for the own term is a part of the output: to be added again after Ctrl-C.
                total = torch.empty_like(self.terms[0])
                add_up(self.terms, total, is_mean=self.is_mean)
                self._second = Exchange(self.group, self.label)
                rank = self.group.rank()
                self.pieces[rank].copy_(total)
                self._second.launch(self.pieces, [self.pieces[rank]] * len(self.pieces))
            self._second.wait()
        except BaseException as failure:
            if self._second is not None and self._second.has_failed:
                self._fail(failure)
            raise
        self.terms = []
        return True


class _SumOfWholes(Exchange):
    """An all-reduce in which ranks, two or with little to say, send each other everything; fields as of `_SumOfAll`."""

    output: torch.Tensor
    is_mean: bool
    terms: list[torch.Tensor]

    def wait(self) -> bool:
        """Block the host until ``output`` holds the result."""
        super().wait()
        terms, self.terms = self.terms, []  # first: the own one is the output, and adding twice is wrong
        if terms:
            try:
                add_up(terms, self.output, is_mean=self.is_mean)
            except BaseException as failure:
                self._fail(failure)
                raise
        return True


def all_reduce(
    output: torch.Tensor, op: Any, group: dist.ProcessGroup, works: list[Any], label: Label = UNNAMED
) -> None:
    """Begin to sum (or average) ``output`` (n,) over the ranks, in place.

    Terms are added in the order of the ranks, so that all get the same bits.
    """
    rank, world_size, numel = group.rank(), group.size(), output.numel()
    if numel == 0:
        return
    exchange: _SumOfWholes | _SumOfAll
    pieces: Sequence[torch.Tensor]
    if world_size == 2 or numel < world_size:
        exchange, pieces = _SumOfWholes(group, label), [output] * world_size
        own = output if world_size == 2 else output.clone()
    else:
        exchange = _SumOfAll(group, label)
        exchange.pieces = pieces = output.tensor_split(world_size)
        own = pieces[rank]
    arrived = [torch.empty_like(own) if each != rank else own for each in range(world_size)]
    exchange.output, exchange.is_mean, exchange.terms = output, op == dist.ReduceOp.AVG, arrived
    works.append(exchange)
    exchange.launch(arrived, pieces)


def can_reduce(op: Any) -> bool:
    """Whether `reduce_scatter` knows ``op``."""
    return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)  # type: ignore[comparison-overlap]


class PeerToPeer(Native):
    """Messages between all pairs of ranks; terms are added in rank order, in the dtype of the output.

    Messages are told apart by their tags, so a rank's collectives may come in any order.
    """

    is_ordered = False
    widens = True
    way = "peer to peer"

    def compare(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        """One exchange, which is known by its label as others are."""
        works: list[Any] = []
        all_gather(everyone, mine, self.group, works, self.label)
        for work in works:
            work.wait()

    def sum(self, tensor: torch.Tensor, op: Any, works: Works) -> None:
        """One work."""
        if works is None or not can_reduce(op):
            super().sum(tensor, op, works)
            return
        if _torch.count_dispatch_modes() or _torch.all_reduces_are_patched():
            announce.all_reduce(tensor, op, self.group)
        all_reduce(tensor, op, self.group, works, self.label)

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """One work for each member."""
        if works is None:
            super().all_gather(members, works)
            return
        if _torch.count_dispatch_modes() or _torch.gathers_are_patched():
            announce.all_gather(members, self.group)
        for output, input in members:
            all_gather(output, input, self.group, works, self.label)

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """One work for each member."""
        if works is None or not can_reduce(op):
            super().reduce_scatter([(output, input.to(output.dtype)) for output, input in members], op, works)
            return
        if _torch.count_dispatch_modes() or _torch.reduce_scatters_are_patched():
            announce.reduce_scatter(members, op, self.group)
        for output, input in members:
            reduce_scatter(output, input, op, self.group, works, arena, self.label)


class _OfFakeGroups(Native):
    """A fake group is taken for the gloo group that it stands for."""

    is_ordered = False
    widens = True

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """What is narrower is received as it is, and cast."""
        received = [
            output if output.dtype is input.dtype else input.new_empty(output.shape) for output, input in members
        ]
        super().reduce_scatter([(each, input) for each, (_, input) in zip(received, members, strict=True)], op, works)
        for each, (output, _) in zip(received, members, strict=True):
            if each is not output:
                output.copy_(each)


MAX_PEERS = 64
"""Beyond, nothing was measured: a rank sends a message to every other, more of them and smaller ones."""


def _for_few(few: type[Native]) -> Callable[[dist.ProcessGroup], Native]:
    return lambda group: (few if group.size() <= MAX_PEERS else Native)(group)


OF_BACKENDS["cpu", "gloo"], OF_BACKENDS["cpu", "fake"] = _for_few(PeerToPeer), _for_few(_OfFakeGroups)
