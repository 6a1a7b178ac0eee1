"""How the ranks of a save or a load tell each other what they found: objects, few and small, outside of any step.

What the thread that trains exchanges goes the way of the engine's own comparisons, so that the watchdog names ranks
that never come, or are gone, on all ranks. A background thread has a process group of its own.
"""

from __future__ import annotations

import ctypes
import difflib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.checkpoint.errors import CheckpointError
from fsdp2.core.places import label, raise_if_stopped
from fsdp2.core.plan import fingerprint
from fsdp2.core.transport import of_backend
from fsdp2.errors import FSDPRuntimeError
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
        self._own = group_of(tuple(self.numbers), "fsdp2.checkpoint, in the background")
        self.rank, self.size = dist.get_rank(self._own), self._own.size()

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


_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], str], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of some of the ranks, by that of all. Kept: torch cannot make one of the same ranks again."""


def group_of(members: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
    """A process group of these ranks for one purpose. Collective over them, the first time."""
    everyone = dist.group.WORLD
    assert everyone is not None, "it is initialized"
    made = _MADE.setdefault(everyone, {})
    if (members, purpose) not in made:
        # What NCCL splits off the group of all ranks, all ranks would have to make.
        is_fake = _torch.backend_name(everyone, torch.device("cpu")) == "fake"
        backend = "gloo" if dist.is_gloo_available() and not is_fake else None
        found = dist.new_group(list(members), backend=backend, use_local_synchronization=True, group_desc=purpose)
        made[members, purpose] = cast(dist.ProcessGroup, found)  # this rank is one of them
    return made[members, purpose]


def who_has(failure: object, found: Sequence[object], numbers: Sequence[int]) -> str:
    """The ranks that have ``failure``, of all that have ``found`` something, in words; "" where all of them have it.

    An error is the same on all ranks, so it has to say who it is of; but not where that is everybody.

    >>> who_has("full", ["full", "", "full"], [0, 1, 2]), who_has("full", ["", "full"], [4, 5])
    ('ranks 0 and 2', 'rank 5')
    """
    *ours, last = (str(number) for number, each in zip(numbers, found, strict=True) if each == failure)
    if len(ours) + 1 == len(found):
        return ""
    if len(ours) >= _SHOWN:
        return f"ranks {', '.join(ours[:_SHOWN])} and {len(ours) + 1 - _SHOWN} more"
    return f"ranks {', '.join(ours)} and {last}" if ours else f"rank {last}"


_SHOWN, _LINES = 8, 40
"""Ranks, and lines of a difference."""


def agree(ranks: Ranks, error: Exception | None, lines: Sequence[str], caller: str, own: Any = None) -> list[Any]:
    """Go on only if no rank has an ``error``, and all would do the same, which ``lines`` describe. Collective.

    Returns:
        What each rank has of its ``own``.

    Raises:
        FSDPError: the first rank's error, of the same class and text on all; or the ranks differ.
    """
    failure = None if error is None else _sent(error)
    found = ranks.all_gather((failure, fingerprint("\n".join(lines)), own), f"what {caller} is to do")
    if any(each is not None for each, _, _ in found):
        failures = [each for each, _, _ in found]
        first = next(each for each in failures if each is not None)
        who = who_has(first, failures, ranks.numbers)
        raise _made(first[0], f"{who}: {first[1]}" if who else first[1]) from error
    if len({each for _, each, _ in found}) == 1:
        return [each for _, _, each in found]
    everyone = ranks.all_gather(list(lines), f"how the ranks differ in what {caller} is to do")
    other = next(place for place, each in enumerate(everyone) if each != everyone[0])
    ours, theirs = (f"rank {ranks.numbers[place]}" for place in (0, other))
    difference = difflib.unified_diff(everyone[0], everyone[other], ours, theirs, lineterm="", n=1)
    shown = "\n".join(list(difference)[:_LINES])
    raise FSDPRuntimeError(f"the ranks differ in what {caller} is to do. Difference:\n{shown}")


def _sent(error: Exception) -> tuple[type[Exception], str]:
    """What other ranks make it of: of a class that they cannot know, one of ours that names it."""
    try:
        pickle.dumps(type(error))
    except Exception:
        return FSDPRuntimeError, f"{type(error).__name__}: {error}"
    return type(error), str(error)


def _made(kind: type[Exception], text: str) -> Exception:
    """An error of a rank's, on another; of classes that take more than a text, one of ours that names them."""
    try:
        return kind(text)
    except TypeError:
        return FSDPRuntimeError(f"{kind.__name__}: {text}")


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
