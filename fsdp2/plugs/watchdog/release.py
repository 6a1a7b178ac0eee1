"""Ends waits that are in vain, on all ranks: each rank's thread sends and receives what other ranks wait for.

Nothing can be sent to a rank whose process is gone: the connection to it is closed, and the process group with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.places import ORDERS, PLACE
from fsdp2.plugs.transports.gloo_p2p import LINES, Exchange, tag_of

_TELLS_SECONDS = 3.0
"""How long a rank may need to log a verdict, before the error of a closed connection comes."""
_SECONDS = 30.0
"""How long after a verdict ranks may still come that wait in vain as well."""
_UNUSED_TAG = (1 << 30) - 1
_HELD: list[Any] = []
"""Messages of all verdicts with their memory, until the end of the process: nobody knows when they arrive."""


def is_live(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` exists, and was not destroyed."""
    return _torch.knows_group(group)


def live_groups() -> list[dist.ProcessGroup]:
    """The groups over which there were exchanges, and that were not destroyed."""
    return [group for group in list(LINES) if is_live(group)]


def key_of(group: dist.ProcessGroup) -> str:
    """The name of ``group``, the same on its ranks; no other group has it."""
    return f"{group.group_name}:{','.join(map(str, dist.get_process_group_ranks(group)))}"


def first_number(epoch: int) -> int:
    """The number of the first exchange after ``epoch`` verdicts: the same on all ranks, and higher than any before.

    Tags tell numbers apart that differ by less than 2 ** 30. So messages of exchanges that a verdict has ended, which
    may still be under way, are not taken for those of later exchanges.
    """
    return epoch * ((1 << 32) + 12_345_677)


class Releases:
    """What this rank does after one verdict.

    Args:
        store: the store that all ranks share.
        epoch: the number of the verdict.
        rank: this rank, counted in the world.
        gone: the ranks whose processes are gone.
        now: the time at which it began.
        ends: whether collectives without a name did not match. Then groups are closed that this rank waits in for one.
    """

    def __init__(
        self, store: Any, epoch: int, rank: int, gone: Iterable[int], now: float, *, ends: bool = False
    ) -> None:
        self._store, self._epoch, self._rank, self._began = store, epoch, rank, now
        self._ends = ends
        self._gone = frozenset(gone)
        self._done: set[tuple[Any, ...]] = set()
        self._closed: set[tuple[str, int]] = set()
        self.to_close: list[dist.ProcessGroup] = []  # groups that this rank waits over, in a collective of torch's
        self.told_first: list[int] = []  # ranks that wait likewise: each logs the verdict before connections close

    def go_on(self, now: float) -> bool:
        """Serve what other ranks have asked for since the last call. Returns whether there may be more."""
        told = [f"pending/{self._epoch}/{rank}" for rank in self.told_first]
        if self.to_close and (now - self._began > _TELLS_SECONDS or self._store.check(told)):
            for group in self.to_close:
                self.close(group)
            self.to_close = []
        groups = {key_of(group): group for group in live_groups()}
        if self._ends and PLACE.stopped and PLACE.waiting is not None and not isinstance(PLACE.waiting, Exchange):
            for group in list(ORDERS):
                if is_live(group) and "gloo" in _torch.backend_names(group):
                    self.close(group)
        mine = []
        for exchange in self._open():
            key, ranks = key_of(exchange.group), dist.get_process_group_ranks(exchange.group)
            if exchange.number >= first_number(self._epoch):
                continue  # begun since all have raised
            for message in exchange.pending():
                peer = ranks[message.peer]
                # A closed connection ends the wait with an error; a living rank is asked for the message instead.
                if peer in self._gone:
                    self._close(key, exchange.group, message.peer)
                else:
                    nbytes = message.part.numel() * message.part.element_size()
                    mine.append([key, exchange.tag, peer, message.arrives, nbytes])
        self._store.set(f"pending/{self._epoch}/{self._rank}", json.dumps(mine))
        others = {rank for group in groups.values() for rank in dist.get_process_group_ranks(group)}
        for rank in others - {self._rank} - self._gone:
            key = f"pending/{self._epoch}/{rank}"
            if self._store.check([key]):
                for line, tag, peer, arrives, nbytes in json.loads(self._store.get(key)):
                    if peer == self._rank and line in groups:
                        self._serve(groups[line], rank, line, tag, arrives, nbytes)
        return now - self._began < _SECONDS

    def _open(self) -> list[Exchange]:
        """The exchanges that may have messages under way: the one that is waited for, and those that are kept."""
        found = {id(each): each for group in live_groups() for each in list(LINES[group].kept.values())}
        waiting = PLACE.waiting
        if isinstance(waiting, Exchange) and waiting.number >= 0 and is_live(waiting.group):
            found[id(waiting)] = waiting
        return list(found.values())

    def _serve(self, group: dist.ProcessGroup, rank: int, line: str, tag: int, arrives: bool, nbytes: int) -> None:
        """Send or receive, in place of this rank, a message that ``rank`` waits for, unless this rank has begun it."""
        done = (line, rank, tag, arrives, nbytes)
        records = [each for each in list(LINES[group].recent) if each.number not in LINES[group].broken]
        if done in self._done or tag in {tag_of(each.label, each.number) for each in records}:
            return
        self._done.add(done)
        part = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        peer = dist.get_group_rank(group, rank)
        exchange = _torch.send if arrives else _torch.receive
        _HELD.extend([part, exchange(part, peer, group, tag)])

    def close(self, group: dist.ProcessGroup) -> None:
        """End whatever waits for ranks of ``group``. The group is of no use afterwards."""
        for peer in range(group.size()):
            if peer != group.rank():
                self._close(key_of(group), group, peer)

    def _close(self, key: str, group: dist.ProcessGroup, peer: int) -> None:
        """Close the connection to a rank of ``group``, which ends all waits for it: gloo closes it after a timeout."""
        if (key, peer) in self._closed or not PLACE.stopped:
            return
        self._closed.add((key, peer))
        try:
            _torch.receive(torch.zeros(1, device="cpu"), peer, group, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # the timeout has closed the connection, as intended
