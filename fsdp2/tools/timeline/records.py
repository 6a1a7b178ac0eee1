"""What was seen on one rank: `RankRecord`, its `Span`s and `MemorySample`s. Facts alone; all times in seconds.

Times are those of `time.perf_counter` on that rank until `Timeline` puts ranks on one scale.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted.

    Attributes:
        what: "forward", "recompute", "backward", "optimizer", "pack and launch" (activities); "all-gather",
            "reduce-scatter", "all-reduce" (exchanges); "wait for all-gather" and so on (waits).
        name: of the module, group or optimizer.
        begin: seconds.
        end: seconds. Of an exchange without streams: when it had been waited for, at which it may have been over for
            long.
        nbytes: of an exchange, the whole buffers.
        sent_bytes: of an exchange, what this rank sends at the least.
        collectives: of an exchange, how many buffers.
        for_backward: of an exchange.
        ahead: of an all-gather, whether it was issued before its module was come to.
        blocks: of an exchange, whether the program stood still while it lasted.
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
        """How long."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What memory held at one time, in bytes.

    Attributes:
        time: seconds.
        unsharded_bytes: unsharded parameters.
        staged_bytes: what is gathered into and sent from, beside them.
        reducing_bytes: gradients that are being reduced.
    """

    time: float
    unsharded_bytes: int
    staged_bytes: int
    reducing_bytes: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    """All that was seen on one rank.

    Attributes:
        rank: its number.
        host: name of the machine, to be read.
        clock_id: ranks of the same one share `time.perf_counter`.
        has_streams: whether times are the device's.
        begin: seconds, when the context was entered.
        end: seconds, when it was left.
        wall: `time.time` minus `time.perf_counter`, for ranks that do not share it.
        forwards: when forwards of roots began.
        updates: when an optimizer of the model had stepped.
        reductions: when a backward had ended that reduced gradients.
        spans: in the order of their ends.
        memory: in the order of time.
        in_graphs: groups whose communication is part of graphs of `torch.compile`, where nothing sees it.
        failure: the exception that has left the context; "" if none.
        model: what was observed, by class.
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
        """The same, ``by`` seconds later."""

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
