"""What was seen on one rank: `RankRecord`, with its `Span`s and `MemorySample`s. Only facts; all times in seconds.

Times are those of `time.perf_counter` on that rank, until `Timeline` puts all ranks on one scale.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        what: "forward", "recompute", "backward", "optimizer", "pack and launch" (activities); "all-gather",
            "reduce-scatter", "all-reduce" (exchanges); "wait for all-gather" and so on (waits).
        name: the name of the module, group or optimizer.
        begin: its begin, in seconds.
        end: its end, in seconds. For an exchange without streams it is when the wait for it ended; the exchange itself
            may have been over for long.
        nbytes: for an exchange, bytes of the full buffers.
        sent_bytes: for an exchange, bytes that this rank must send at least.
        collectives: for an exchange, how many buffers it carries.
        for_backward: for an exchange, whether a backward needs it.
        ahead: for an all-gather, whether it was issued before its module was needed.
        blocks: for an exchange, whether the program stood still while it lasted.
    """

    what: str
    name: str
    begin: float
    end: float
    nbytes: int = 0
    sent_bytes: int = 0
    collectives: int = 0
    for_backward: bool = False
    ahead: bool = False
    blocks: bool = False

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class MemorySample:
    """How much memory there was for what at one time, in bytes.

    Attributes:
        time: the time, in seconds.
        unsharded_bytes: unsharded parameters.
        staged_bytes: buffers that gathers send from and receive into, beside these.
        reducing_bytes: gradients that are being reduced.
    """

    time: float
    unsharded_bytes: int
    staged_bytes: int
    reducing_bytes: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Everything that was seen on one rank.

    Attributes:
        rank: its number.
        host: the name of its machine, for people.
        clock_id: ranks with equal ids share `time.perf_counter`.
        has_streams: whether times are the device's.
        begin: when the context was entered, in seconds.
        end: when it was left, in seconds.
        wall: `time.time` minus `time.perf_counter`, for ranks that do not share the latter.
        forwards: when forwards of roots began.
        updates: when an optimizer of the model had stepped.
        reductions: when a backward had ended that reduced gradients.
        spans: the spans, sorted by their begin.
        memory: samples in the order of time.
        in_graphs: groups whose communication is part of graphs of `torch.compile`, where nothing sees it.
        failure: the exception that has left the context; "" if none has.
        model: the class of what was observed.
    """

    rank: int
    host: str
    clock_id: str
    has_streams: bool
    begin: float
    end: float
    wall: float
    forwards: tuple[float, ...]
    updates: tuple[float, ...]
    reductions: tuple[float, ...]
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...]
    in_graphs: tuple[str, ...] = ()
    failure: str = ""
    model: str = ""

    def moved(self, by: float) -> RankRecord:
        """This record, ``by`` seconds later."""

        def shift(times: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(each + by for each in times)

        return dataclasses.replace(
            self,
            begin=self.begin + by,
            end=self.end + by,
            forwards=shift(self.forwards),
            updates=shift(self.updates),
            reductions=shift(self.reductions),
            spans=tuple(dataclasses.replace(each, begin=each.begin + by, end=each.end + by) for each in self.spans),
            memory=tuple(dataclasses.replace(each, time=each.time + by) for each in self.memory),
        )
