"""What ranks tell each other about where they are: JSON in the process group's store, when one of them waits long."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

COLLECTIVE = "a collective of torch's"
"""`WaitingRank.line` for collectives that carry no name: the program's own, and those of DTensors."""


@dataclass(frozen=True, slots=True)
class Begun:
    """One exchange that a rank has begun; fields as in `gloo_p2p.Record`."""

    number: int
    label: str
    bits: int
    step: int
    phase: str


@dataclass(frozen=True, slots=True)
class LineState:
    """The exchanges of one process group, as one of its ranks has begun them.

    Attributes:
        ranks: the ranks of the group, counted in the world.
        begun: how many exchanges have begun.
        broken: numbers of the exchanges whose launch an exception interrupted.
        recent: the last exchanges.
    """

    ranks: tuple[int, ...]
    begun: int
    broken: tuple[int, ...] = ()
    recent: tuple[Begun, ...] = ()

    def find(self, number: int) -> Begun | None:
        """The exchange of this number, if it was begun and is remembered."""
        return next((each for each in self.recent if each.number == number), None)


@dataclass(frozen=True, slots=True)
class WaitingRank:
    """What a rank waits for.

    Attributes:
        line: the key of its process group, or `COLLECTIVE`.
        number: the number of the exchange there; None if it has none.
        label: what the exchange is for.
        bits: the bits of that label.
        seconds: how long the rank has waited.
        ranks: the ranks that an exchange without a number may be over.
    """

    line: str
    number: int | None
    label: str
    bits: int
    seconds: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """Where a rank is.

    Attributes:
        rank: its number in the world.
        round: the number of the question that it answers.
        step: how many forwards of roots have begun on it.
        phase: which pass runs, or ran last.
        at: the line of the user's code that its main thread is in.
        failure: which exception has left its last pass; "" if none has.
        waiting: what it waits for, also in a collective of torch's; None if it does not wait.
        stopped: whether it is about to raise, as ranks were found that can never meet.
        lines: its exchanges, by the keys of their groups.
    """

    rank: int
    round: int
    step: int
    phase: str
    at: str = ""
    failure: str = ""
    waiting: WaitingRank | None = None
    stopped: bool = False
    lines: Mapping[str, LineState] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> State:
        """Read what another rank has written to the store."""
        found: dict[str, Any] = json.loads(text)
        waiting = found.pop("waiting")
        lines = {
            key: LineState(
                tuple(line["ranks"]),
                line["begun"],
                tuple(line["broken"]),
                tuple(Begun(**each) for each in line["recent"]),
            )
            for key, line in found.pop("lines").items()
        }
        return cls(
            **found,
            waiting=None if waiting is None else WaitingRank(**waiting | {"ranks": tuple(waiting["ranks"])}),
            lines=lines,
        )

    def describe(self) -> str:
        """Describe the rank in one line, for messages."""
        place = f"rank {self.rank}: step {self.step}, {self.phase}"
        if self.stopped:
            doing = "is about to raise"
        elif self.waiting is not None:
            doing = f"waits for {self.waiting.label}, for {self.waiting.seconds:.0f} s"
        else:
            doing = "runs the program's own code"
        failure = f"; {self.failure}" if self.failure else ""
        return f"{place}; {doing}{f', at {self.at}' if self.at else ''}{failure}"
