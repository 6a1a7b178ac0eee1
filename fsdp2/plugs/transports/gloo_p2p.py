"""All-gather, reduce-scatter and all-reduce as sends and receives between all pairs of ranks: no thread, no copy.

This is for gloo, whose own collectives do more than that. Its reduce-scatter sends twice as much as it must (it is an
all-reduce) and clones its input; its all-gather goes through an output of its own. On 2 to 64 ranks, 16 KiB to 16 MiB,
this takes 0.3 to 1.05 of the CPU time of gloo's all-gather, 0.3 to 0.75 of that of its reduce-scatter, and makes no
clone of the gradients (``python -m benchmarks.primitives``).

[Note: tags and what is abandoned]
Every exchange over a process group has the next number. Its tag is a hash of 30 bits of that number and of its `Label`.
Ranks issue the same exchanges in the same order. Where they do not, tags differ, so no rank ever takes another's
parameters or gradients for its own, whatever their sizes: it waits, and a watchdog finds out why
(`plugs/watchdog/`). An exchange that an exception has abandoned (nobody waits for it) must not be freed while
messages are under way into its buffers. It is kept until a later exchange over the same group is done, for messages
between two ranks arrive in order.

[Note: all or nothing]
One call into C launches all messages of an exchange, so no Ctrl-C comes between two of them. A rank that had begun to
receive, but not to send, would leave the others waiting.
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
"""An odd factor: numbers of one label have the same tag only if they are 2 ** 30 apart."""

_receive: Callable[..., dist.Work] = dist.ProcessGroup.recv
_send: Callable[..., dist.Work] = dist.ProcessGroup.send
_wait = methodcaller("wait")


class Line:
    """The exchanges over one process group.

    Attributes:
        begun: how many exchanges have begun.
        kept: exchanges that are not known to be done, by number.
        recent: records of the last exchanges.
        broken: numbers of the exchanges whose messages could not all be launched.
    """

    __slots__ = ("begun", "broken", "kept", "recent")

    def __init__(self) -> None:
        self.begun = 0
        self.kept: dict[int, Exchange] = {}
        self.recent: deque[Record] = deque(maxlen=RECORDED)
        self.broken: list[int] = []


LINES: WeakKeyDictionary[dist.ProcessGroup, Line] = WeakKeyDictionary()
"""The exchanges of each process group."""


def tag_of(label: Label, number: int) -> int:
    """The tag of the messages of exchange ``number``, which is of ``label``."""
    return _FIRST_TAG + (label.bits + number * _MIXED) % _FIRST_TAG


class Message(NamedTuple):
    """A message that may be under way: ``part`` comes from, or goes to, the rank ``peer`` of the group."""

    peer: int
    arrives: bool
    part: torch.Tensor


class Exchange:
    """One exchange under way. It is a work: callers wait for it.

    Attributes:
        group: the process group that it runs over.
        label: what it is for.
        number: its number over that group, once it was launched.
        tag: the tag of its messages.
    """

    def __init__(self, group: dist.ProcessGroup, label: Label = UNNAMED) -> None:
        self.group = group
        self.label = label
        self.number = self.tag = -1
        self._line: Line | None = None
        self._messages: list[dist.Work] = []
        self._left: Iterator[dist.Work] | None = None  # messages that were not waited for; None: all of them
        self._parts: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())
        self._failure = ""

    def launch(self, arriving: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]) -> None:
        """Begin to receive ``arriving`` from each other rank in turn, and to send ``leaving`` to each of them.

        Raises:
            FSDPRuntimeError: `Place.stopped` forbids exchanges; or a rank is gone, as in `wait`.
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
        # Noted before anything is sent: whatever Ctrl-C leaves under way is in `kept`, with its buffers.
        try:
            self._line, self.number, self.tag, self._parts = line, number, tag, (arriving, leaving)
            line.kept[number] = self
            line.begun = number + 1
            line.recent.append(Record(number, self.label, PLACE.step, PLACE.phase))
            # One call into C, see [Note: all or nothing].
            self._messages.extend(chain(receives, sends))
        except BaseException as failure:
            if len(self._messages) < len(sources) + len(targets):  # else it is Ctrl-C, and all were launched
                self._fail(failure)
                # The watchdog tells the others, who wait for a part that never comes.
                line.broken.append(number)
                if type(failure) is RuntimeError:  # gloo raises it if a connection is lost already
                    raise FSDPRuntimeError(LOST.text(self, failure)) from failure
            raise

    @property
    def has_failed(self) -> bool:
        """Whether a launch or a wait has failed, or an exception came before anything was sent."""
        return bool(self._failure) or self.number < 0

    def _fail(self, failure: BaseException) -> None:
        self._failure = str(failure) or type(failure).__name__

    @property
    def waited_for(self) -> int:
        """How many messages were waited for, the present one included."""
        return 0 if self._left is None else len(self._messages) - length_hint(self._left)

    def pending(self) -> list[Message]:
        """The messages that were not waited for yet. The watchdog's thread calls this."""
        (arriving, leaving), done = self._parts, self.waited_for
        if not arriving or self._failure:
            return []
        sources, targets = _peers(self.group)
        every = [Message(each, True, arriving[each]) for each in sources]
        every += [Message(each, False, leaving[each]) for each in targets]
        # The one that is waited for now has left the iterator, and may not have arrived.
        return every[max(done - 1, 0) :]

    def wait(self) -> bool:
        """Block the host until all has arrived. A second call returns at once.

        Raises:
            FSDPRuntimeError: the ranks can never meet (`Place.stopped`); or a rank is gone, which is named. Later calls
                raise it again, without waiting.
        """
        if self._failure:
            raise FSDPRuntimeError(f"an exchange with other ranks has failed before: {self._failure}")
        if self._left is None:
            self._left = iter(self._messages)
        # The watchdog's thread reads what is waited for.
        PLACE.waiting = self
        try:
            # Each message once: gloo would wait for another of the same tag. In C: Ctrl-C waits until all have arrived.
            deque(map(_wait, self._left), 0)
        except RuntimeError as failure:  # gloo's; after another exception a second call goes on where this one was
            self._fail(failure)
            if PLACE.stopped:
                raise_stopped()
            raise FSDPRuntimeError(LOST.text(self, failure)) from failure
        finally:
            PLACE.waiting = None
        if PLACE.stopped:
            # The watchdog may have ended the wait by messages without content.
            self._failure = PLACE.stopped
            raise_stopped()
        self._parts = ((), ())
        self._messages, self._left = [], None  # works hold the tensors that they carried
        if self._line is not None:
            # Messages between two ranks arrive in order: what was begun earlier has arrived too.
            kept = self._line.kept
            for number in [each for each in kept if each <= self.number]:
                del kept[number]
        return True


class Lost:
    """Describes a message that failed. A port: `plugs/watchdog/` puts a class here that knows more."""

    def text(self, exchange: Exchange, failure: Exception) -> str:
        """The text of the error for an ``exchange`` that ``failure`` has ended."""
        waited_for = (exchange.waited_for or len(exchange._messages) + 1) - 1  # the launch failed if it is 0
        sources, targets = _peers(exchange.group)
        peers = [*sources, *targets]
        peer = peers[min(waited_for, len(peers) - 1)]
        rank = dist.get_global_rank(exchange.group, peer)
        return (
            f"{exchange.label.text} with rank {rank} failed, {PLACE.phase}: its process has ended, or raised and left, "
            f"or the connection to it was lost. See what that rank said. {FEWER} ({failure})"
        )

    def first_number(self, group: dist.ProcessGroup) -> int:
        """The number of the first exchange over ``group``."""
        return 0


LOST = Lost()

_PEERS: WeakKeyDictionary[dist.ProcessGroup, tuple[list[int], list[int]]] = WeakKeyDictionary()


def _peers(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """The ranks to receive from, and those to send to, in this order: nearest neighbours first, to spread the load."""
    known = _PEERS.get(group)
    if known is None:
        rank, world_size = group.rank(), group.size()
        steps = range(1, world_size)
        known = [(rank - each) % world_size for each in steps], [(rank + each) % world_size for each in steps]
        _PEERS[group] = known
    return known


class _Sum(Exchange):
    """A reduce-scatter, which adds what has arrived.

    Attributes:
        terms: what each rank has sent, until they are added.
        output: where the sum goes.
        is_mean: whether the mean is asked for.
        taken: the buffers that they were received in, if these are to be freed.
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
    """Set ``output`` to the sum or mean of two or more ``terms``, added in their order. It may be the first of them.

    The dtype of ``output``, theirs or a wider one, is the one that they are added in.
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
    """Begin to gather ``input`` (n,) of every rank into ``output`` (world_size * n,). It is done once ``works`` are."""
    rank, numel = group.rank(), input.numel()
    if numel == 0:
        return
    parts = output.split(numel)
    exchange = Exchange(group, label)
    works.append(exchange)
    exchange.launch(parts, [input] * len(parts))
    # This rank's own part is not sent; with a buffer that is gathered in place it is there already.
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
    """Begin to reduce ``input`` (world_size * n,) over the ranks, and this rank's part of it into ``output`` (n,).

    Terms are added in rank order in the dtype of ``output``. ``input`` is only read, and may be of a narrower dtype,
    in which it then travels. Callers wait for ``works``; the last of them adds. Until then n elements for each
    other rank are kept, in memory of ``arena``. If nobody ever waits, that memory never goes back to the arena, for
    messages may still arrive there.
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
    # This rank's own term is not sent. It is read from the input, which must not change before the sum.
    exchange.terms = [*arrived[:rank], parts[rank], *arrived[rank:]]
    works.append(exchange)
    exchange.launch(exchange.terms, parts)


class _SumOfAll(Exchange):
    """An all-reduce: this rank sums its piece of ``output`` and then sends it to all others.

    Attributes:
        output: the tensor that is summed in place.
        is_mean: whether the mean is asked for.
        terms: this rank's piece, as each rank has sent it.
        pieces: the pieces of ``output``, one for each rank.
    """

    output: torch.Tensor
    is_mean: bool
    terms: list[torch.Tensor]
    pieces: Sequence[torch.Tensor]
    _second: Exchange | None = None

    def wait(self) -> bool:
        """Block the host until ``output`` holds the result. A wait that Ctrl-C interrupted can be resumed."""
        super().wait()
        try:
            if self._second is None:
                # Not in place: this rank's own term is a piece of the output, and Ctrl-C may let us add again.
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
    """An all-reduce for two ranks, or few elements: ranks send each other everything. Fields as in `_SumOfAll`."""

    output: torch.Tensor
    is_mean: bool
    terms: list[torch.Tensor]

    def wait(self) -> bool:
        """Block the host until ``output`` holds the result."""
        super().wait()
        terms, self.terms = self.terms, []  # taken first: the own term is the output, which must not be added twice
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

    All ranks add the terms in rank order, so all get the same bits.
    """
    rank, world_size, numel = group.rank(), group.size(), output.numel()
    if numel == 0:
        return
    exchange: _SumOfWholes | _SumOfAll
    pieces: Sequence[torch.Tensor]
    if world_size == 2 or numel < world_size:
        exchange, pieces = _SumOfWholes(group, label), [output] * world_size
        # The first addition overwrites the output: with more than two terms the own one must lie elsewhere.
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
    """Whether `reduce_scatter` and `all_reduce` can do ``op``."""
    return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)  # type: ignore[comparison-overlap]


class PeerToPeer(Native):
    """Messages between all pairs of ranks. Terms are added in rank order, in the dtype of the output.

    Tags tell messages apart, so a rank's collectives may come in any order.
    """

    is_ordered = False
    widens = True
    way = "peer to peer"

    def compare(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        """Gather ``mine`` in an exchange of its own, which has a label as others have."""
        works: list[Any] = []
        all_gather(everyone, mine, self.group, works, self.label)
        for work in works:
            work.wait()

    def sum(self, tensor: torch.Tensor, op: Any, works: Works) -> None:
        """Reduce ``tensor`` in place. Adds one work; without works, or for other operations, gloo's own collective."""
        if works is None or not can_reduce(op):
            super().sum(tensor, op, works)
            return
        if _torch.count_dispatch_modes() or _torch.all_reduces_are_patched():
            announce.all_reduce(tensor, op, self.group)
        all_reduce(tensor, op, self.group, works, self.label)

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """Adds one work for each member; without works, gloo's own collective."""
        if works is None:
            super().all_gather(members, works)
            return
        if _torch.count_dispatch_modes() or _torch.gathers_are_patched():
            announce.all_gather(members, self.group)
        for output, input in members:
            all_gather(output, input, self.group, works, self.label)

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """Adds one work for each member; without works, or for other operations, gloo's own collective."""
        if works is None or not can_reduce(op):
            super().reduce_scatter([(output, input.to(output.dtype)) for output, input in members], op, works)
            return
        if _torch.count_dispatch_modes() or _torch.reduce_scatters_are_patched():
            announce.reduce_scatter(members, op, self.group)
        for output, input in members:
            reduce_scatter(output, input, op, self.group, works, arena, self.label)


class _OfFakeGroups(Native):
    """torch's fake backend, which simulations use, with the abilities of the gloo group that it stands for."""

    is_ordered = False
    widens = True

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """Receive members of a narrower dtype in that dtype, and cast them to that of the output."""
        received = [
            output if output.dtype is input.dtype else input.new_empty(output.shape) for output, input in members
        ]
        super().reduce_scatter([(each, input) for each, (_, input) in zip(received, members, strict=True)], op, works)
        for each, (output, _) in zip(received, members, strict=True):
            if each is not output:
                output.copy_(each)


MAX_PEERS = 64
"""Above this size the backend's own collectives are used: a rank would send many small messages, and none was timed."""


def _for_few(few: type[Native]) -> Callable[[dist.ProcessGroup], Native]:
    return lambda group: (few if group.size() <= MAX_PEERS else Native)(group)


OF_BACKENDS["cpu", "gloo"], OF_BACKENDS["cpu", "fake"] = _for_few(PeerToPeer), _for_few(_OfFakeGroups)
