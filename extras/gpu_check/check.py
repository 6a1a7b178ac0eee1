"""What a check is: commands, a verdict on what they found, and a rehearsal that proves that it can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from extras.gpu_check.machine import Machine
from extras.gpu_check.runs import Found, Outcome, Place, Program, Run

Status = Literal["passed", "failed", "hung", "cannot run"]

Limits = Callable[[Mapping[str, Found]], list[str]]
"""Complaints about what the runs of a check have measured, by their titles."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A rehearsal: ``program`` on CPU is without complaint; with ``fault`` one of its complaints contains ``says``.

    Attributes:
        ranks: that run it.
    """

    program: Program
    fault: str
    says: str
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Instead:
    """A rehearsal of tests: ``right`` is without complaint, and one of ``wrong`` contains ``says``, without a GPU."""

    right: Run
    wrong: Run
    says: str


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A rehearsal of limits: measurements that are right, and the same with something wrong, by what is said of it."""

    right: Mapping[str, Found]
    wrong: Mapping[str, Mapping[str, Found]]


@dataclass(frozen=True, slots=True)
class Check:
    """One of the 21.

    Attributes:
        number: Its place in the order.
        name: On the command line.
        asks: The question, in one sentence.
        expected: What it takes to pass.
        means: What a failure means, and where to look.
        runs: What is run.
        rehearsals: How it was seen to fail.
        gpus: How many it needs; it uses all that there are if that is more than one.
        torch: The oldest release that it is about.
        limits: What is complained of beside what the runs complain of.
    """

    number: int
    name: str
    asks: str
    expected: str
    means: str
    runs: Sequence[Run]
    rehearsals: Sequence[Plant | Instead | MadeUp]
    gpus: int = 1
    torch: tuple[int, int] = (2, 11)
    limits: Limits | None = None

    @property
    def limit_s(self) -> int:
        """Seconds that all runs may take together."""
        return sum(run.limit_s for run in self.runs)

    def cannot_run(self, machine: Machine) -> str | None:
        """Why not on ``machine``; None if it can."""
        if machine.gpus < self.gpus:
            return f"needs {self.gpus} GPU{'s' * (self.gpus > 1)}; there {machine.gpus_text}"
        if machine.torch_release < self.torch:
            needed = ".".join(map(str, self.torch))
            return f"is about torch {needed} and later; here is {machine.torch} (make gpu-check TORCH={needed}.0)"
        return None

    def complaints(self, outcomes: Sequence[Outcome]) -> list[str]:
        """What is wrong; nothing, if it passed. Limits are looked at where nothing else is wrong."""
        found = [complaint for outcome in outcomes for complaint in outcome.complaints()]
        measured = {each.title: each.found for each in outcomes if not each.plants and each.found}
        if self.limits is not None and not found:
            if missing := [run.title for run in self.runs if not run.plants and run.title not in measured]:
                return [f"{title}: measured nothing" for title in missing]
            found += self.limits(measured)
        return found

    def verdict(self, place: Place, *, after: Callable[[Outcome], None] = lambda outcome: None) -> Verdict:
        """Run everything; ``after`` each run it is called with what became of it."""
        outcomes = []
        for run in self.runs:
            outcomes.append(run.run(place))
            after(outcomes[-1])
        complaints = self.complaints(outcomes)
        status: Status = "passed" if not complaints else "hung" if any(each.hung for each in outcomes) else "failed"
        found = {each.title: {**each.found, "seconds": round(each.seconds, 1)} for each in outcomes}
        return Verdict(status, complaints, found, sum(each.seconds for each in outcomes))


@dataclass(slots=True)
class Verdict:
    """What became of a check.

    Attributes:
        status: "passed", "failed", "hung" or "cannot run".
        complaints: why, if it did not pass.
        found: what was measured, by run.
        seconds: that it took.
    """

    status: Status
    complaints: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
