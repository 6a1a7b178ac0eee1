"""Order and overlap in a recording: which group's collectives run beside which group's compute.

Operations are attributed to groups by the buffers that they touch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tests.harness.happens_before import Mark, Operation, Order
from tests.harness.recording.recorder import COMPUTE
from tests.harness.recording.scenarios import Recording
from tests.harness.recording.training import BACKWARD, ROOT, UPDATE, gradients_of


@dataclass(frozen=True, slots=True)
class Passes:
    """The operations of the last whole step of a recording, group by group."""

    recorded: Recording

    def operations(self, begin: str, end: str) -> list[tuple[int, Operation]]:
        """Those between the last mark ``begin`` and the ``end`` after it, with their indices in the trace."""
        trace = self.recorded.trace
        start = max(index for index, event in enumerate(trace) if event == Mark(begin))
        stop = trace.index(Mark(end), start)
        return [(index, event) for index in range(start, stop) if isinstance(event := trace[index], Operation)]

    def compute(self, begin: str, end: str) -> dict[str, list[int]]:
        """By group, in the order of first use: compute that reads its unsharded parameters."""
        return self._touching(begin, end, lambda event: event.stream == COMPUTE)

    def gathers(self, begin: str, end: str) -> dict[str, list[int]]:
        """By group, in the order of issue: what writes its unsharded parameters (a collective, the copy after it)."""
        return self._touching(begin, end, lambda event: event.stream != COMPUTE)

    def reduces(self) -> dict[str, list[int]]:
        """By group, in the order of issue: the collectives that its gradients come from, with copies in between or not.

        Followed back from the gradients, through what communication streams have written.
        """
        operations = [(index, event) for index, event in self.operations(BACKWARD, UPDATE) if event.stream != COMPUTE]
        found: dict[str, list[int]] = {}
        for group in self._groups():
            wanted = {block for block, name in self.recorded.names.items() if name == gradients_of(group)}
            for index, event in reversed(operations):
                if any(access.writes and access.block in wanted for access in event.accesses):
                    wanted |= {access.block for access in event.accesses if access.reads}
                    if "reduce" in event.name:
                        found.setdefault(group, []).insert(0, index)
        return found

    def _groups(self) -> list[str]:
        return sorted({name for name in self.recorded.names.values() if not name.startswith(gradients_of(""))})

    def _touching(self, begin: str, end: str, accept: Callable[[Operation], bool]) -> dict[str, list[int]]:
        names, groups = self.recorded.names, self._groups()
        found: dict[str, list[int]] = {}
        for index, event in self.operations(begin, end):
            if accept(event):
                for group in dict.fromkeys(names.get(access.block, "") for access in event.accesses):
                    if group in groups:
                        found.setdefault(group, []).append(index)
        return found


def gathers_ahead(recorded: Recording, begin: str, end: str) -> bool:
    """Whether each all-gather is issued before the compute of the group before, free to run beside it, and no earlier.

    Not earlier: after the compute of the last group but one, which bounds what is unsharded at a time.
    """
    passes, order = Passes(recorded), Order(recorded.trace)
    compute, gathers = passes.compute(begin, end), passes.gathers(begin, end)
    assert len(compute) == 4 and len(gathers) >= 3
    groups = list(compute)
    ahead = [
        max(gathers[following]) < compute[current][0] and order.concurrent(gathers[following][0], compute[current][0])
        for current, following in pairwise(groups)
        if following in gathers
    ]
    bounded = [
        order.before(compute[first][-1], gathers[third][0])
        for first, third in zip(groups, groups[2:], strict=False)
        if first != ROOT
    ]
    return all(ahead) and all(bounded)


def reduces_overlap(recorded: Recording) -> bool:
    """Whether each reduction is free to run beside the next group's backward, and what comes after that follows it.

    The backward follows its reduce-scatter, which reads unsharded gradients; the reduction follows all of it.
    """
    passes, order = Passes(recorded), Order(recorded.trace)
    compute, reduces = passes.compute(BACKWARD, UPDATE), passes.reduces()
    groups = [group for group in compute if group != ROOT]  # the root's backward ends last
    assert len(groups) == 3 and set(reduces) == set(compute)
    beside = [
        order.concurrent(reduce, index)
        for current, following in pairwise(groups)
        for reduce in reduces[current]
        for index in compute[following]
    ]
    bounded = []
    for first, third in zip(groups, groups[2:], strict=False):
        bounded += [order.before(reduce, reduces[third][0]) for reduce in reduces[first]]
        bounded += [
            order.before(reduce, compute[third][0])
            for reduce in reduces[first]
            if "reduce_scatter" in recorded.trace[reduce].name  # type: ignore[union-attr]
        ]
    return all(beside) and all(bounded)
