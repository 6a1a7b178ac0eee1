"""Decides whether ranks that wait can ever go on, from the states that they publish. Pure: no thread, no store.

A rank that waits for an exchange waits for every rank of its group that has not begun it. A rank in a collective of
torch's waits for every rank of its group that is not in it (of any group, if its frames show none). This leads

* to a rank that has begun *another* exchange in its place, or could not launch its part: they can never meet;
* to a rank whose process is gone, or stopped;
* only to ranks that wait as well, in exchanges or in collectives of torch's: a deadlock;
* to a rank that runs the program's own code, or waits in a collective that all of its ranks have begun: it may go on,
  however long that takes, so the others are only told.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp2._remedies import FEWER, RUN_ALIKE
from fsdp2.plugs.watchdog.states import COLLECTIVE, State, WaitingRank


class Silence(enum.Enum):
    """Why the state of a rank is not known."""

    NOT_YET = "has not answered yet"
    NOT_STARTED = "has not called fully_shard(), or has nothing that is sharded over several ranks"
    BUSY = "does not answer, though its process runs: something there keeps all threads from running"
    GONE = "does not answer: its process is stopped, or dead"


Known = Mapping[int, State | Silence]
"""What is known of each rank."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done for a rank that waits.

    Attributes:
        raises: whether it can never go on.
        complete: whether all ranks that matter have answered.
        text: the reason, for people.
        gone: ranks from which nothing comes any more.
    """

    raises: bool
    complete: bool
    text: str
    gone: tuple[int, ...] = ()


REMEDY = f"{RUN_ALIKE} The last exchanges of each rank: fsdp2.flight_record()."


def judge(rank: int, known: Known) -> Verdict:
    """Decide whether ``rank``, which waits, can go on."""
    seen: dict[int, None] = {rank: None}
    # Follow who waits for whom, from `rank` on. Ranks that are about to raise will free those that wait for them.
    queue = [rank]
    while queue:
        each = queue.pop(0)
        state = known.get(each, Silence.NOT_YET)
        if isinstance(state, Silence) or state.stopped:
            continue
        if state.waiting is not None:
            never, other = _never_meets(state, state.waiting, known)
            if never:
                return Verdict(True, True, f"{never}\n{_table({**seen, other: None}, known)}\n{REMEDY}")
        for other in _blockers(state, known):
            if other not in seen:
                seen[other] = None
                queue.append(other)
    return _of_all(rank, seen, known)


def _of_all(rank: int, seen: Mapping[int, None], known: Known) -> Verdict:
    waits = known[rank]
    assert isinstance(waits, State) and waits.waiting is not None, "who does not wait is not judged"
    what = f"rank {rank} has waited for {waits.waiting.label} for {waits.waiting.seconds:.0f} s"
    states = {each: known.get(each, Silence.NOT_YET) for each in seen}
    gone = tuple(each for each, state in states.items() if state is Silence.GONE)
    if gone:
        names = ", ".join(f"rank {each} {Silence.GONE.value}" for each in gone)
        return Verdict(True, True, f"{what}, and {names}.\n{_table(seen, known)}\n{FEWER}", gone)
    complete = Silence.NOT_YET not in states.values()
    # Ranks that wait for nobody may come some time. If there are none among them, all wait for each other.
    slow = [each for each, state in states.items() if isinstance(state, Silence) or not _blockers(state, known)]
    if slow or not complete:
        names = ", ".join(_of_slow(each, states[each]) for each in slow) or "others have not answered yet"
        return Verdict(False, complete, f"{what}: {names}.\n{_table(seen, known)}")
    return Verdict(True, True, f"{what}, and all that it waits for wait as well.\n{_table(seen, known)}\n{REMEDY}")


def _of_slow(rank: int, state: State | Silence) -> str:
    if isinstance(state, Silence):
        return f"rank {rank} {state.value}"
    if state.waiting is not None and not state.stopped:
        is_begun = _is_known(state) or state.waiting.line == COLLECTIVE
        way = "all ranks have begun" if is_begun else "is a collective of torch's own"
        return f"rank {rank} waits for {state.waiting.label}, which {way}"
    return f"rank {rank} has not come to it yet (it runs {state.at or 'something else'})"


def _is_known(state: State) -> bool:
    return state.waiting is not None and state.waiting.number is not None and state.waiting.line in state.lines


def _never_meets(state: State, waiting: WaitingRank, known: Known) -> tuple[str, int]:
    """Why ``state`` waits in vain, by what a rank of its group has done, and that rank; "" if none is known to have."""
    if not _is_known(state):
        return "", state.rank
    assert waiting.number is not None, "it is known"
    for other in state.lines[waiting.line].ranks:
        theirs = known.get(other)
        line = theirs.lines.get(waiting.line) if isinstance(theirs, State) else None
        if line is None or other == state.rank:
            continue
        assert isinstance(theirs, State), "it has a line"
        begun = line.find(waiting.number)
        if waiting.number in line.broken:
            return (
                f"rank {state.rank} waits for {waiting.label}, which an exception on rank {other} has interrupted "
                "while it was begun."
            ), other
        if begun is not None and begun.bits != waiting.bits:
            how = (
                "another one of it: of another root, of other sizes or scales"
                if begun.label == waiting.label
                else begun.label
            )
            return (
                f"ranks {state.rank} and {other} can never meet: rank {state.rank} waits for {waiting.label} (step "
                f"{state.step}, {state.phase}), and rank {other} has begun {how} in its place (step {begun.step}, "
                f"{begun.phase})."
            ), other
    return "", state.rank


def _blockers(state: State, known: Known) -> list[int]:
    """The ranks without which ``state`` cannot go on, as far as is known; [] if it may go on by itself."""
    waiting = state.waiting
    if state.stopped or waiting is None:
        return []
    if waiting.line == COLLECTIVE:
        return [each for each in waiting.ranks if each != state.rank and not _is_in(waiting, known.get(each))]
    if not _is_known(state):
        return []
    assert waiting.number is not None, "it is known"
    found = []
    for other in state.lines[waiting.line].ranks:
        theirs = known.get(other, Silence.NOT_YET)
        line = theirs.lines.get(waiting.line) if isinstance(theirs, State) else None
        # A rank begins exchanges in the order of their numbers: it has begun all below ``begun``.
        if other != state.rank and (line is None or line.begun <= waiting.number):
            found.append(other)
    return found


def _is_in(waiting: WaitingRank, state: State | Silence | None) -> bool:
    theirs = state.waiting if isinstance(state, State) else None
    return theirs is not None and (theirs.line, theirs.bits, theirs.ranks) == (COLLECTIVE, waiting.bits, waiting.ranks)


def _table(seen: Mapping[int, None], known: Known) -> str:
    lines = []
    for rank in sorted(seen):
        state = known.get(rank, Silence.NOT_YET)
        lines.append(f"  {state.describe()}" if isinstance(state, State) else f"  rank {rank}: {state.value}")
    return "\n".join(lines)
