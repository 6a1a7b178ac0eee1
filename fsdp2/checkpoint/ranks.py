"""How the ranks of a save or a load tell each other what they found: objects, few and small, outside of any step.

What the thread that trains exchanges goes the way of the engine's own comparisons, so that the watchdog names ranks
that never come, or are gone, on all ranks. A background thread has a process group of its own.
"""

from __future__ import annotations

import ctypes
import pickle
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from fsdp2 import _torch
from fsdp2.checkpoint.errors import CheckpointError
from fsdp2.core.places import label, raise_if_stopped
from fsdp2.core.transport import of_backend
from fsdp2.model.broadcast_parameters import device_that_travels
from fsdp2.plugs.watchdog.public import gone_among


class Ranks(ABC):
    """The ranks that save or load together.

    Attributes:
        rank: of this process among them.
        size: how many there are.
        numbers: of all, in the whole world: for messages.
    """

    rank: int
    size: int
    numbers: list[int]

    @abstractmethod
    def all_gather(self, value: Any, what: str) -> list[Any]:
        """The ``value`` of every rank. Collective; ``what`` it is of, for messages."""


class Alone(Ranks):
    """There is nobody else."""

    def __init__(self) -> None:
        self.rank, self.size, self.numbers = 0, 1, [0]

    def all_gather(self, value: Any, what: str) -> list[Any]:
        """Nothing to do."""
        return [value]


class Watched(Ranks):
    """The ranks of ``group``, in the thread that trains."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), group.size()
        self.numbers = dist.get_process_group_ranks(group)
        self._group = group
        self._device = device_that_travels(torch.device("cpu"), group)

    def all_gather(self, value: Any, what: str) -> list[Any]:
        """Two exchanges: of sizes, and of what is padded to the largest.

        Raises:
            FSDPRuntimeError: ranks can never meet here, or are gone; on all ranks.
        """
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        try:
            with _torch.unobserved(), torch.inference_mode(False), torch.no_grad():
                sizes = self._exchange(torch.tensor([len(data)], device="cpu"), f"{what}: sizes").tolist()
                mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
                mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                everyone = self._exchange(mine, what).view(self.size, -1)
        except RuntimeError:
            raise_if_stopped()
            raise
        places = [everyone[index].data_ptr() for index in range(self.size)]
        return [pickle.loads(ctypes.string_at(place, size)) for place, size in zip(places, sizes, strict=True)]

    def _exchange(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        mine = mine.to(self._device)
        everyone = mine.new_empty(self.size * mine.numel())
        transport = of_backend(self._group, self._device)
        transport.label = label(what)
        transport.compare(everyone, mine)
        return everyone.cpu()


class InBackground(Ranks):
    """The same ranks, in a thread that does nothing else.

    Collective: all ranks of ``group`` make it together, in the thread that trains.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.numbers = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), group.size()

    @abstractmethod
    def close(self) -> None:
        """The thread has ended: give back what there is of it."""


class OfEveryRank(InBackground):
    """All ranks that there are, by a process group of their own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        made = dist.new_group(backend="gloo", group_desc="fsdp2.checkpoint")
        self._own = cast(dist.ProcessGroup, made)  # this rank is one of them
        super().__init__(self._own)

    def all_gather(self, value: Any, what: str) -> list[Any]:
        """torch.distributed's own way, for as long as the group's timeout lets it; its error names who is gone."""
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self._own)
        except RuntimeError as error:
            gone = gone_among(self.numbers)
            who = f"the processes of the ranks {gone} are gone" if gone else "a rank is gone, or cannot be reached"
            raise RuntimeError(f"{who}, and do not come to {what}: see what they said.") from error
        return found

    def close(self) -> None:
        """Destroy the group."""
        if dist.is_initialized() and _torch.knows_group(self._own):
            dist.destroy_process_group(self._own)


_POLLED_EVERY, _ASKED_EVERY = 0.02, 2.0
"""Seconds."""

_LOST = "lost"
"""The key of what is said once ranks do not meet any more."""


class OfSomeRanks(InBackground):
    """Some of the ranks, through the store that all have: a process group would have to be made by all ranks together.

    What is exchanged are plans and outcomes, once or twice in a save. A key is looked for, not waited for, as others
    use the store meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        # Keys that nobody has had: the store may be older than the process groups, and has what was left in it.
        drawn = Watched(group).all_gather(uuid.uuid4().hex, "the key of saves in the background")[0]
        self._store: Any = _torch.shared_store(f"fsdp2.checkpoint/{drawn}")[0]
        self._round = 0

    def all_gather(self, value: Any, what: str) -> list[Any]:
        """For as long as the default timeout of process groups lets it, and as the ranks that are missing live.

        Raises:
            RuntimeError: a rank has not come, or the default process group was destroyed meanwhile; from then on for
                all ranks, as they are not at the same exchange any more.
        """
        self._refuse_lost()
        number, self._round = self._round, self._round + 1
        self._store.set(f"{number}/{self.rank}", pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        began = asked = time.monotonic()
        while not self._store.check(keys):
            now = time.monotonic()
            if now - asked > _ASKED_EVERY or not dist.is_initialized():
                asked = now
                self._refuse_missing(keys, what, is_late=now - began > default_pg_timeout.total_seconds())
            time.sleep(_POLLED_EVERY)
        self._refuse_lost()  # as by ranks that waited for this one, and have gone on without it
        found = [pickle.loads(self._store.get(key)) for key in keys]
        if number > 1:  # all have come to the round before this one, so that nobody reads what came before that
            self._store.delete_key(f"{number - 2}/{self.rank}")
        return found

    def _refuse_lost(self) -> None:
        if self._store.check([_LOST]):
            raise RuntimeError(self._store.get(_LOST).decode())

    def _refuse_missing(self, keys: Sequence[str], what: str, *, is_late: bool) -> None:
        self._refuse_lost()
        missing = [self.numbers[rank] for rank, key in enumerate(keys) if not self._store.check([key])]
        gone = gone_among(missing)
        if gone or is_late or not dist.is_initialized():
            why = f", as the processes of {gone} are gone" if gone else ""
            self._store.set(_LOST, f"ranks {missing} have not come to {what}{why}.")
            raise RuntimeError(self._store.get(_LOST).decode())

    def close(self) -> None:
        """Nothing: what lies in the store are two small values of each rank."""


def in_background(group: dist.ProcessGroup) -> InBackground:
    """The ranks of ``group``, for a thread. Collective over them, in the thread that trains."""
    is_everyone = group.size() == dist.get_world_size()
    return OfEveryRank(group) if is_everyone else OfSomeRanks(group)


def who_has(failure: object, found: Sequence[object], numbers: Sequence[int]) -> str:
    """The ranks that have ``failure``, of all that have ``found`` something, in words; "" where all of them have it.

    An error is the same on all ranks, so it has to say who it is of; but not where that is everybody.

    Args:
        failure: one of ``found``.
        found: for each rank.
        numbers: of the ranks.

    >>> who_has("full", ["full", "", "full"], [0, 1, 2]), who_has("full", ["", "full"], [4, 5])
    ('ranks 0 and 2', 'rank 5')
    """
    ours = [number for number, each in zip(numbers, found, strict=True) if each == failure]
    if len(ours) == len(found):
        return ""
    if len(ours) == 1:
        return f"rank {ours[0]}"
    if len(ours) > _SHOWN:
        return f"ranks {', '.join(map(str, ours[:_SHOWN]))} and {len(ours) - _SHOWN} more"
    return f"ranks {', '.join(map(str, ours[:-1]))} and {ours[-1]}"


_SHOWN = 8


def ranks_of(process_group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of ``process_group``; None: all there are, or this process alone.

    Raises:
        CheckpointError: they are simulated.
    """
    group = process_group
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or group.size() == 1:
        return Alone()
    if _torch.backend_name(group, torch.device("cpu")) == "fake":
        raise CheckpointError(
            f"the process group is a fake one of {group.size()} ranks, of which {group.size() - 1} are not there to "
            "save or load their parts: checkpoints need real ranks."
        )
    return Watched(group)
