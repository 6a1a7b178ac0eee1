"""Turns the outcomes of all ranks into one message for the reader of a failed test.

Owns the wording; pure functions of outcomes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.harness.messages import Outcome, Status


class RanksFailed(Exception):
    """A body did not pass on every rank. The message holds each rank's traceback or stack, root cause first.

    Attributes:
        outcomes: Outcome by rank.
    """

    def __init__(self, doing: str, outcomes: Mapping[int, Outcome]) -> None:
        super().__init__(describe(doing, outcomes))
        self.outcomes = dict(outcomes)


def describe(doing: str, outcomes: Mapping[int, Outcome]) -> str:
    """The root cause in the first line, then a section per rank that did not pass, blocked ranks last.

    Args:
        doing: What the ranks were doing, for the first line.
        outcomes: Outcome by rank, of all ranks; at least one did not pass.
    """
    bad = [rank for rank, outcome in outcomes.items() if outcome.status is not Status.PASSED]
    bad.sort(key=lambda rank: (outcomes[rank].status is Status.BLOCKED, outcomes[rank].finished_at, rank))
    lines = [f"{outcomes[bad[0]].summary} [rank {bad[0]} of {len(outcomes)}, {doing}]"]
    passed = sorted(set(outcomes) - set(bad))
    if passed:
        lines.append(f"passed on rank(s) {', '.join(map(str, passed))}")
    seen: dict[str, int] = {}
    for position, rank in enumerate(bad):
        outcome = outcomes[rank]
        first = " first" if position == 0 and len(bad) > 1 and outcome.status is not Status.BLOCKED else ""
        lines += ["", f"=== rank {rank} {outcome.status.value}{first}: {outcome.summary} ==="]
        twin = seen.setdefault(_without_rank(outcome.details, rank), rank)
        lines.append(_own_frames(outcome.details).rstrip() if twin == rank else f"(as on rank {twin})")
    return "\n".join(lines)


def _without_rank(details: str, rank: int) -> str:
    """`details` as another rank would have them."""
    return re.sub(rf"\brank {rank}\b", "rank *", details)


def _own_frames(stacks: str) -> str:
    """Faulthandler's stacks, innermost frame first, each without what lies below the test's body."""
    return re.sub(r'^  File "[^"]*/harness/worker.py"(.*\n  File)*.*\n', "", stacks, flags=re.MULTILINE)
