"""How ranks meet at the beginning of a timeline, and how the first of them gets what all have seen.

Over the store of the default process group, not by collectives: a rank that is missing is named after some seconds, on
any backend, and nothing comes between the exchanges of a training step. Keys of one meeting have a number, which moves
on only when all have come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.errors import FSDPRuntimeError
from fsdp2.tools.timeline.records import RankRecord

_PREFIX = "fsdp2/timeline"
_LONGEST_POLL_SECONDS = 0.05


@dataclass(slots=True)
class _Met:
    """Meetings over one process group.

    Attributes:
        store: with keys of its own.
        number: of meetings at which all ranks were.
    """

    store: Any
    number: int = 0


_MEETINGS: WeakKeyDictionary[dist.ProcessGroup, _Met] = WeakKeyDictionary()


class Meeting:
    """Ranks that are observed together.

    Attributes:
        ranks: of the whole world, in order.
        rank: this one.
    """

    def __init__(self, group: dist.ProcessGroup | None, seconds: float) -> None:
        """``group``: whose ranks they are; None: all that there are. ``seconds``: for how long they wait."""
        self._seconds = seconds
        self._met: _Met | None = None
        self._key = ""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks: tuple[int, ...] = (self.rank,)
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None or "fake" in _torch.backend_names(world):
            return
        over = world if group is None else group
        self.ranks = tuple(sorted(dist.get_process_group_ranks(over)))
        if len(self.ranks) > 1:
            if over not in _MEETINGS:
                _MEETINGS[over] = _Met(_torch.shared_store(_PREFIX)[0])
            self._met = _MEETINGS[over]
            self._key = "-".join(map(str, self.ranks)) if group is not None else "world"

    @property
    def is_first(self) -> bool:
        """Whether this rank gets what all have seen."""
        return self.rank == self.ranks[0]

    def begin(self) -> None:
        """Wait until all have come. All ranks must call it.

        Raises:
            FSDPRuntimeError: some have not, within the time; with their numbers.
        """
        if self._met is None:
            return
        key = f"{self._key}/{self._met.number}"
        self._come(f"{key}/here", b"1")
        missing = self._missing_at(f"{key}/here")
        if missing:
            self._met.store.delete_key(f"{key}/here/{self.rank}")  # so that they can all meet another time
            self._met.store.add(f"{key}/here", -1)
            raise FSDPRuntimeError(
                f"fsdp2.timeline() was entered on {_named(set(self.ranks) - set(missing))} and not on "
                f"{_named(missing)} within {self._seconds:g} s. All ranks must enter it, in the same step: enter it "
                "outside of conditions on the rank, or name the ranks that do by group=, or raise timeout=."
            )
        self._met.number += 1
        self._key = key

    def collect(self, mine: RankRecord) -> list[RankRecord]:
        """All records, on the first rank; elsewhere ``mine``. All ranks must call it.

        Raises:
            FSDPRuntimeError: some ranks have not told theirs within the time; with their numbers.
        """
        if self._met is None:
            return [mine]
        self.tell(mine)
        if not self.is_first:
            return [mine]
        missing = self._missing_at(f"{self._key}/seen")
        if missing:
            raise FSDPRuntimeError(
                f"fsdp2.timeline() ended on rank {self.rank}, and {_named(missing)} did not leave it within "
                f"{self._seconds:g} s: all ranks must leave it after the same step. What this rank has seen is there."
            )
        found = []
        for rank in self.ranks:
            key = f"{self._key}/seen/{rank}"
            found.append(mine if rank == self.rank else RankRecord.unpacked(self._met.store.get(key)))
            self._met.store.delete_key(key)
        return found

    def tell(self, mine: RankRecord) -> None:
        """Leave ``mine`` for the first rank; waits for nobody."""
        if self._met is not None:
            self._come(f"{self._key}/seen", mine.packed())

    def _come(self, key: str, value: bytes) -> None:
        assert self._met is not None, "there are others"
        self._met.store.set(f"{key}/{self.rank}", value)
        self._met.store.add(key, 1)

    def _missing_at(self, key: str) -> list[int]:
        """The ranks that have not set theirs when the time is over."""
        assert self._met is not None, "there are others"
        deadline, poll = time.monotonic() + self._seconds, 0.001
        while self._met.store.add(key, 0) < len(self.ranks):
            if time.monotonic() > deadline:
                return [rank for rank in self.ranks if not self._met.store.check([f"{key}/{rank}"])]
            time.sleep(poll)
            poll = min(2 * poll, _LONGEST_POLL_SECONDS)
        return []


def _named(ranks: Sequence[int] | set[int]) -> str:
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def on_one_scale(records: Sequence[RankRecord]) -> tuple[list[RankRecord], bool]:
    """Records with times since the first rank's beginning; and whether all ranks share a clock.

    Ranks of other machines are compared by the time of day, which network time keeps within milliseconds.
    """
    first = records[0]
    shared = all(each.clock_id == first.clock_id for each in records)
    moved = []
    for each in records:
        same = each.clock_id == first.clock_id
        moved.append(each.moved(-first.begin if same else each.wall - first.wall - first.begin))
    return moved, shared
