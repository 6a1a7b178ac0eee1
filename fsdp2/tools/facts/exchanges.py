"""What a group exchanges in one step, and how much of it leaves a node: arithmetic on plans, and a walk of the step.

[Note: bytes per link]
A rank of W gives n bytes to an all-gather, and gets n bytes of a reduce-scatter: it sends (W - 1) n in either. In an
all-reduce of n bytes it sends 2 n (W - 1) / W. The best algorithms for large messages send this much (Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). If a ring goes through
one node after the other, k of its W edges lead to another node if there are k > 1 nodes, and every edge carries the
same. Where ranks exchange in pairs, as on gloo, each sends its part to every other rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.layout import BufferLayout, joined_row
from fsdp2.core.plan import ReducePlan
from fsdp2.core.state import FSDPState
from fsdp2.tools.facts.data import ExchangeFacts, Kind, Pass

Rests = Literal["whole", "sharded", "fewer"]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """What one rank sends in a gather, in bytes.

    Attributes:
        nbytes: bytes of the packed row; 0 if nothing is packed.
        direct: bytes of each parameter that travels by itself.
    """

    nbytes: int
    direct: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """Bytes of each collective."""
        return ((self.nbytes,) if self.nbytes else ()) + self.direct


def row_of(layouts: Sequence[tuple[BufferLayout, int]], extended_bytes: int = 0) -> PackedRow:
    """What a rank sends of several buffers, given as layouts with the bytes of an element on the wire.

    ``extended_bytes``: what it sends of tensors that gather themselves.
    """
    packed = [layout.packed_numel * itemsize for layout, itemsize in layouts if layout.packed_numel]
    _, nbytes = joined_row(packed)
    direct = [
        slot.shard_numel * itemsize
        for layout, itemsize in layouts
        for slot in layout.carried
        if slot.direct and slot.shard_numel
    ]
    if extended_bytes:
        direct.append(extended_bytes)
    return PackedRow(nbytes, tuple(direct))


def members_of_reduction(plan: ReducePlan) -> tuple[int, ...]:
    """Bytes that one rank gets from each collective of a reduce-scatter."""
    layout = plan.layout
    direct = [slot.shard_numel * plan.sent.itemsize for slot in layout.carried if slot.direct and slot.shard_numel]
    return (layout.packed_numel * plan.dtype.itemsize, *direct)


@dataclass(frozen=True, slots=True)
class Gathers:
    """How often a group is gathered in one step: from its shards, and from those that it has after forward."""

    forward: int = 0
    forward_from_fewer: int = 0
    backward: int = 0
    backward_from_fewer: int = 0


class Visits:
    """Follows one group through a step: which states need it, in which order, and whether it is unsharded then.

    Args:
        frees: for each state, whether the end of its forward frees the parameters.
    """

    def __init__(self, group: FSDPParamGroup, frees: dict[FSDPState, bool]) -> None:
        self._group = group
        self._frees = frees
        self._is_free_at: Rests = "sharded" if group.storage.post_forward is None else "fewer"

    def count(self, forward: Sequence[FSDPState], backward: Sequence[FSDPState]) -> Gathers:
        """How often the group is gathered if ``forward`` and ``backward`` come to states in these orders."""
        stands: Rests = "sharded"
        counts = {"forward": 0, "forward fewer": 0, "backward": 0, "backward fewer": 0}
        for state in self._outermost(forward):
            if stands != "whole":
                counts["forward" if stands == "sharded" else "forward fewer"] += 1
            stands = self._is_free_at if self._frees.get(state, True) else "whole"
        needs = self._outermost(backward) if self._group.settings.unshards_in_backward else []
        for state in needs:
            if stands != "whole":
                counts["backward" if stands == "sharded" else "backward fewer"] += 1
            stands = "whole" if state.reshard_after_backward is False else "sharded"
        return Gathers(*counts.values())

    def _outermost(self, states: Sequence[FSDPState]) -> list[FSDPState]:
        """The states that need the group. One that runs inside of another finds it unsharded, and does not count."""
        users = [state for state in states if self._group in state.unit]
        if len(users) < 2:
            return users
        inside = {user: {module for each in user.modules for module in each.modules()} for user in set(users)}
        return [
            user
            for user in users
            if not any(user is not other and user.modules[0] in inside[other] for other in inside)
        ]


def sent(
    kind: Kind, part_bytes: int, ranks: Sequence[int], rank: int, ranks_per_node: int, way: str
) -> tuple[int, int]:
    """Bytes that one rank sends inside its node and to other nodes. [Note: bytes per link]"""
    world_size = len(ranks)
    total = (world_size - 1) * part_bytes
    if kind == "all-reduce":
        total = 2 * total // world_size
    nodes = [each // ranks_per_node for each in ranks]
    different = len(set(nodes))
    if way == "pairs":
        others = world_size - nodes.count(rank // ranks_per_node)
        between = total * others // (world_size - 1) if world_size > 1 else 0
    else:
        between = total * different // world_size if different > 1 else 0
    return total - between, between


@dataclass(frozen=True, slots=True)
class Links:
    """What decides which bytes of an exchange leave a node.

    Attributes:
        rank: the rank of this process.
        ranks_per_node: how many ranks share a node.
    """

    rank: int
    ranks_per_node: int

    def exchange(
        self,
        group: int,
        during: Pass,
        kind: Kind,
        ranks: tuple[int, ...],
        times: int,
        members: tuple[int, ...],
        way: Literal["ring", "pairs"],
    ) -> ExchangeFacts:
        """The facts of ``times`` collectives of ``members`` in a step."""
        part_bytes = times * sum(members)
        inside, between = sent(kind, part_bytes, ranks, self.rank, self.ranks_per_node, way)
        return ExchangeFacts(group, during, kind, ranks, times, members, inside, between, way)
