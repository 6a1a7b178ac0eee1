"""Parameters that live whole on one rank: where they lie in the region that they share. Pure arithmetic.

All owned parameters of one buffer form one *region*. Every rank has room for ``capacity`` elements there, the most that
any rank owns, in which its own parameters follow each other. Three ranks, an alignment of one element (the engine's is
128 bytes); rank 0 owns ``a`` and ``b``, rank 2 ``c``::

    shard buffers, rank by rank   | a a b |   | 0 0 0 |   | c c 0 |       capacity = 3
    unsharded buffer              | a a b | 0 0 0 | c c 0 |

One all-gather of even parts fills it, and every parameter is contiguous in it. Of gradients the same buffer is made,
and one reduce-scatter gives each owner its own, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """The places of owned parameters, in elements.

    Attributes:
        capacity: room on every rank.
        offsets: of each parameter, from the start of the unsharded region: ``owner * capacity`` and its place there.
            None: of those that nobody owns.
        filling: what the unsharded region holds, in order: ``(index, numel)`` of a parameter, ``(None, numel)`` of a
            gap. Parameters of no elements are left out.
    """

    capacity: int
    offsets: tuple[int | None, ...]
    filling: tuple[tuple[int | None, int], ...]

    @classmethod
    def build(cls, owners: Sequence[int | None], numels: Sequence[int], *, world_size: int, alignment: int) -> Region:
        """Lay out those parameters that have an owner, each at a multiple of ``alignment`` elements."""
        ends = [0] * world_size
        starts = [0] * len(owners)
        for index, (owner, numel) in enumerate(zip(owners, numels, strict=True)):
            if owner is not None:
                starts[index] = ends[owner]
                ends[owner] += -(-numel // alignment) * alignment
        capacity = max(ends)
        offsets = tuple(
            None if owner is None else owner * capacity + start for owner, start in zip(owners, starts, strict=True)
        )
        lying = sorted((offset, index) for index, offset in enumerate(offsets) if offset is not None and numels[index])
        filling: list[tuple[int | None, int]] = []
        position = 0
        for offset, index in lying:
            if offset > position:
                filling.append((None, offset - position))
            filling.append((index, numels[index]))
            position = offset + numels[index]
        if world_size * capacity > position:
            filling.append((None, world_size * capacity - position))
        return cls(capacity, offsets, tuple(filling))


def assign_ranks(groups: Sequence[Sequence[float]], world_size: int) -> list[list[int]]:
    """A rank for each item of each group, given what the items cost.

    Within a group, longest first, to the hand that has least (Graham, 1969: at most 4/3 of the best). Then the heaviest
    hand goes to the rank that has least so far. Ties go to the earlier item, hand and rank.
    """
    totals = [0.0] * world_size
    dealt = []
    for costs in groups:
        hands = [0.0] * world_size
        hand_of = [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            hand = hands.index(min(hands))
            hand_of[index] = hand
            hands[hand] += costs[index]
        heaviest_first = sorted(range(world_size), key=lambda hand: -hands[hand])
        least_first = sorted(range(world_size), key=totals.__getitem__)
        rank_of = dict(zip(heaviest_first, least_first, strict=True))
        for hand, load in enumerate(hands):
            totals[rank_of[hand]] += load
        dealt.append([rank_of[hand] for hand in hand_of])
    return dealt
