"""`MemoryLog`: every allocation of a simulated rank, in order, and the peaks of memory by phase and by use.

It knows storages and numbers, but nothing of models or the engine. What a storage is used for may become known after it
was allocated (a gradient is one once it is in ``.grad``), so the log is added up at the end.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch


class Use(str, Enum):
    """What memory is used for."""

    SHARDS = "shards"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    UNSHARDED = "unsharded parameters"
    UNSHARDED_GRADIENTS = "unsharded gradients"
    COMMUNICATION = "communication buffers"
    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer temporaries"
    INPUTS = "inputs and buffers"


class Phase(str, Enum):
    """The phases of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer step"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that were alive at once in a phase, and what they were used for."""

    nbytes: int
    by_use: dict[Use, int]


@dataclass(slots=True)
class _Block:
    """One storage, while it lives. ``nbytes``: its present size."""

    number: int
    nbytes: int
    reference: weakref.ref[torch.UntypedStorage] | None = None


@dataclass(slots=True)
class MemoryLog:
    """Allocations and releases in order.

    Attributes:
        events: (number of a block, the bytes by which it grew), in order.
        uses: what each block is used for, by its number.
        on_host: numbers of blocks that offloading keeps in host memory.
        marks: where in ``events`` each phase begins; None: where it ends.
    """

    events: list[tuple[int, int]] = field(default_factory=list)
    uses: dict[int, Use] = field(default_factory=dict)
    on_host: set[int] = field(default_factory=set)
    marks: list[tuple[int, Phase | None]] = field(default_factory=list)
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _borrowed: dict[str, int] = field(default_factory=dict)
    _count: int = 0

    def is_known(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` is in the log, and alive."""
        return id(storage) in self._blocks

    def add(self, storage: torch.UntypedStorage, use: Use, *, on_host: bool = False) -> None:
        """Note that ``storage``, which is not in the log, was allocated."""
        key, block = id(storage), self._new_block(storage.nbytes(), use)
        if on_host:
            self.on_host.add(block.number)
        block.reference = weakref.ref(storage, lambda _: self._released(key))
        self._blocks[key] = block

    def _new_block(self, nbytes: int, use: Use) -> _Block:
        block = _Block(self._count, nbytes)
        self._count += 1
        self.uses[block.number] = use
        if nbytes:
            self.events.append((block.number, nbytes))
        return block

    def _released(self, key: int) -> None:
        block = self._blocks.pop(key)
        if block.nbytes:
            self.events.append((block.number, -block.nbytes))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that the memory of ``storage`` may have another size than before."""
        block = self._blocks.get(id(storage))
        if block is not None and block.nbytes != storage.nbytes():
            self.events.append((block.number, storage.nbytes() - block.nbytes))
            block.nbytes = storage.nbytes()

    def use(self, storage: torch.UntypedStorage, use: Use, *, on_host: bool = False) -> None:
        """Note what ``storage`` is used for, and whether it is in host memory. It holds since its allocation."""
        if id(storage) not in self._blocks:
            self.add(storage, use)
        number = self._blocks[id(storage)].number
        self.uses[number] = use
        if on_host:
            self.on_host.add(number)

    def use_of(self, storage: torch.UntypedStorage) -> Use | None:
        """What ``storage`` is used for, as far as is known."""
        block = self._blocks.get(id(storage))
        return None if block is None else self.uses[block.number]

    def take(self, nbytes: int, use: Use, *, on_host: bool = False) -> None:
        """Note that ``nbytes`` are allocated, and freed at once."""
        if nbytes:
            number = self._new_block(nbytes, use).number
            if on_host:
                self.on_host.add(number)
            self.events.append((number, -nbytes))

    def borrow(self, name: str, nbytes: int) -> None:
        """Let a buffer ``name`` have ``nbytes`` from now on, which a device would have and the simulation has not."""
        if not nbytes and name not in self._borrowed:
            return
        before = self._borrowed.get(name, 0)
        number = self._new_block(0, Use.COMMUNICATION).number
        self._borrowed[name] = nbytes
        self.events.append((number, nbytes - before))

    def begin(self, phase: Phase | None) -> None:
        """Note that a phase begins; None: that the last one ends."""
        self.marks.append((len(self.events), phase))

    # -- at the end

    def peaks(self, *, on_host: bool = False) -> dict[Phase, Peak]:
        """The peak of each phase, on the device or ``on_host``; the highest, if a phase has run several times."""
        found: dict[Phase, Peak] = {}
        for phase, now in self._states(on_host):
            if phase is not None and (phase not in found or sum(now.values()) > found[phase].nbytes):
                found[phase] = Peak(sum(now.values()), {use: nbytes for use, nbytes in now.items() if nbytes})
        return found

    def _states(self, on_host: bool) -> Iterator[tuple[Phase | None, dict[Use, int]]]:
        """The phase and its bytes by use: when it begins, and after each event that may be its peak."""
        now: dict[Use, int] = defaultdict(int)
        total, done = 0, 0
        for (start, phase), (end, _) in zip(self.marks, [*self.marks[1:], (len(self.events), None)], strict=True):
            for number, change in self.events[done:start]:
                if (number in self.on_host) is on_host:
                    now[self.uses[number]] += change
                    total += change
            yield phase, now
            highest = total
            for number, change in self.events[start:end]:
                if (number in self.on_host) is on_host:
                    now[self.uses[number]] += change
                    total += change
                    if total > highest:
                        highest = total
                        yield phase, now
            done = end

    def at_end_of(self, phase: Phase, counts: Callable[[Use], bool]) -> dict[Use, int]:
        """Bytes on the device by use, where ``phase`` last ended, of the uses that ``counts`` says."""
        ends = [after for (_, each), (after, _) in zip(self.marks, self.marks[1:], strict=False) if each is phase]
        now: dict[Use, int] = defaultdict(int)
        for number, change in self.events[: ends[-1] if ends else 0]:
            if number not in self.on_host and counts(self.uses[number]):
                now[self.uses[number]] += change
        return {use: nbytes for use, nbytes in now.items() if nbytes}


@contextmanager
def resizes_seen(log: MemoryLog) -> Iterator[None]:
    """Inside, ``log`` hears of storages that are resized, which no dispatch mode sees."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = resize(storage, nbytes)
        log.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
