"""How ranks meet at the beginning of a timeline, and how the first rank gets what all have seen.

They use the store of the default process group and no collectives: a rank that is missing is named after some seconds,
on any backend, and nothing comes between the exchanges of a training step.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.errors import FSDPRuntimeError
from fsdp2.tools.timeline.records import RankRecord

_LONGEST_POLL_SECONDS = 0.05
_MEETINGS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The number of the next meeting, a part of its keys. It increases only once all ranks have come."""


class Meeting:
    """Ranks that are observed together.

    Attributes:
        ranks: their numbers in the world, sorted.
        rank: this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, seconds: float) -> None:
        """``group``: the ranks that meet; None: all ranks. ``seconds``: how long they wait for each other."""
        self._seconds = seconds
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks: tuple[int, ...] = (self.rank,)
        world = dist.group.WORLD if dist.is_initialized() else None
        self._group = world if group is None else group
        if world is None or self._group is None or "fake" in _torch.backend_names(world):
            return
        self.ranks = tuple(sorted(dist.get_process_group_ranks(self._group)))
        if len(self.ranks) > 1:
            self._store, _ = _torch.shared_store("fsdp2/timeline")
            name = "world" if group is None else "-".join(map(str, self.ranks))
            self._key = f"{name}/{_MEETINGS.get(self._group, 0)}"

    @property
    def is_first(self) -> bool:
        """Whether this rank gets what all have seen."""
        return self.rank == self.ranks[0]

    def begin(self) -> None:
        """Wait until all ranks have come. All ranks must call it.

        Raises:
            FSDPRuntimeError: some have not come within the time; the message names them.
        """
        if len(self.ranks) == 1 or self._group is None:
            return
        self._store.set(f"{self._key}/here/{self.rank}", b"1")
        missing = self._missing("here")
        if missing:
            self._store.delete_key(f"{self._key}/here/{self.rank}")  # so that all ranks can meet another time
            raise FSDPRuntimeError(
                f"fsdp2.timeline() was entered on {_named(set(self.ranks) - set(missing))} and not on "
                f"{_named(missing)} within {self._seconds:g} s. All ranks must enter it, in the same step: enter it "
                "outside of conditions on the rank, or name the ranks that do by group=, or raise timeout=."
            )
        _MEETINGS[self._group] = _MEETINGS.get(self._group, 0) + 1

    def tell(self, mine: RankRecord) -> None:
        """Leave ``mine`` in the store for the first rank. Waits for nobody."""
        if len(self.ranks) > 1:
            self._store.set(f"{self._key}/seen/{self.rank}", zlib.compress(pickle.dumps(mine)))

    def collect(self, mine: RankRecord) -> list[RankRecord]:
        """All records on the first rank; ``mine`` elsewhere. All ranks must call it.

        Raises:
            FSDPRuntimeError: some ranks have not left theirs within the time; the message names them.
        """
        self.tell(mine)
        if len(self.ranks) == 1 or not self.is_first:
            return [mine]
        missing = self._missing("seen")
        if missing:
            raise FSDPRuntimeError(
                f"fsdp2.timeline() ended on rank {self.rank}, and {_named(missing)} did not leave it within "
                f"{self._seconds:g} s: all ranks must leave it after the same step. What this rank has seen is there."
            )
        keys = [f"{self._key}/seen/{rank}" for rank in self.ranks]
        found = [pickle.loads(zlib.decompress(self._store.get(key))) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return found

    def _missing(self, what: str) -> list[int]:
        """The ranks whose key ``what`` is not set when the time is over."""
        deadline, poll = time.monotonic() + self._seconds, 0.001
        missing = list(self.ranks)
        while missing:
            missing = [rank for rank in missing if not self._store.check([f"{self._key}/{what}/{rank}"])]
            if missing and time.monotonic() > deadline:
                break
            time.sleep(poll if missing else 0)
            poll = min(2 * poll, _LONGEST_POLL_SECONDS)
        return missing


def _named(ranks: Iterable[int]) -> str:
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def on_one_scale(records: Sequence[RankRecord]) -> tuple[list[RankRecord], bool]:
    """The records, with times since the first rank's beginning; and whether all ranks share a clock.

    Ranks on other machines are compared by the time of day, which network time keeps within milliseconds.
    """
    first = records[0]
    shared = all(each.clock_id == first.clock_id for each in records)
    moved = []
    for each in records:
        same = each.clock_id == first.clock_id
        moved.append(each.moved(-first.begin if same else each.wall - first.wall - first.begin))
    return moved, shared
