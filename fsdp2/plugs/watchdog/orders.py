"""Compares what ranks have begun over groups whose collectives carry no name: NCCL's, and gloo's among many ranks.

Every rank publishes now and then what it has begun last over each group, and the group's first rank compares. If ranks
have begun different exchanges as their n-th, they have received each other's values, or will, if sizes are equal; else
they wait for ever. Neither can be mended, so all ranks are told, and raise.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fsdp2._remedies import RUN_ALIKE
from fsdp2.core.places import ORDERS, Order, label_of_bits
from fsdp2.plugs.watchdog.release import is_live, key_of

REMEDY = (
    f"{RUN_ALIKE} These collectives carry no name, so what the modules hold, and the steps since, may be wrong: end "
    "the program, and go on from the last checkpoint."
)


@dataclass(frozen=True, slots=True)
class Published:
    """What one rank has begun over one group.

    Attributes:
        begun: how many exchanges have begun.
        bits: the bits of the labels of the last exchanges.
        marks: pairs of how many had begun at some earlier time, and the digest at that time.
    """

    begun: int
    bits: tuple[int, ...]
    marks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, order: Order) -> Published:
        """Read ``order``. Called by the watchdog's thread, while the training thread begins exchanges."""
        # `begun` comes from the copy: read by itself, it might count an exchange that the copy does not have.
        recent = list(order.recent)
        begun = recent[-1].number + 1 if recent else 0
        return cls(begun, tuple(each.label.bits for each in recent), tuple(order.marks))

    def to_json(self) -> str:
        """The text for the store."""
        packed = base64.b64encode(struct.pack(f"<{len(self.bits)}I", *self.bits)).decode()
        return json.dumps([self.begun, packed, self.marks])

    @classmethod
    def from_json(cls, text: str) -> Published:
        """Read what another rank has written to the store."""
        begun, packed, marks = json.loads(text)
        raw = base64.b64decode(packed)
        bits = struct.unpack(f"<{len(raw) // 4}I", raw)
        return cls(begun, bits, tuple((number, digest) for number, digest in marks))


def difference(published: Mapping[int, Published], name: Callable[[int], str] = label_of_bits) -> str:
    """How the orders of the ranks differ, at the first exchange that does; "" if what can be compared is equal.

    >>> difference({0: Published(2, (7, 8), ()), 3: Published(3, (7, 9, 8), ())}, "exchange {}".format)
    'ranks 0 and 3 differ in exchange 1 of their process group: rank 0 has begun exchange 8, and rank 3 exchange 9.'
    """
    ranks = sorted(published)
    first: tuple[int, int, str] | None = None
    for rank in ranks[1:]:
        found = _first_difference(ranks[0], published[ranks[0]], rank, published[rank], name)
        if found is not None and (first is None or found[0] < first[0]):
            first = found
    return "" if first is None else first[2]


def _first_difference(
    one: int, mine: Published, other: int, theirs: Published, name: Callable[[int], str]
) -> tuple[int, int, str] | None:
    # Digests show that the orders differed at some time; the labels that are still remembered show where.
    marks = dict(mine.marks)
    wrong = sorted(number for number, digest in theirs.marks if marks.get(number, digest) != digest)
    start = max(mine.begun - len(mine.bits), theirs.begun - len(theirs.bits))
    for number in range(start, min(mine.begun, theirs.begun)):
        bits, others = _at(mine, number), _at(theirs, number)
        if bits != others:
            known = (name(bits) or "something else", name(others) or "something else")
            what = (
                known
                if known[0] != known[1]
                else (known[0], "another one of it: of another root, of other sizes or scales")
            )
            text = (
                f"ranks {one} and {other} differ in exchange {number} of their process group: rank {one} has begun "
                f"{what[0]}, and rank {other} {what[1]}."
            )
            return number, other, text
    if wrong:
        text = f"ranks {one} and {other} have begun different exchanges, before exchange {wrong[0]} of their group."
        return wrong[0], other, text
    return None


def _at(published: Published, number: int) -> int:
    return published.bits[number - published.begun]


class Comparison:
    """One rank's part in the comparison.

    Args:
        store: the store that all ranks share.
        rank: this rank, counted in the world.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._told: dict[str, int] = {}

    def look(self, epoch: int) -> str:
        """Publish what is new, and compare the groups that this rank is the first of. Returns the difference, or ""."""
        for group, order in list(ORDERS.items()):
            if not order.begun or not is_live(group):
                continue
            key, ranks = f"order/{epoch}/{key_of(group)}", dist.get_process_group_ranks(group)
            mine = Published.of(order)
            if self._told.get(key) != mine.begun:
                self._told[key] = mine.begun
                self._store.set(f"{key}/{self._rank}", mine.to_json())
            if ranks[0] == self._rank:
                found = difference({self._rank: mine, **self._of_others(key, ranks[1:])})
                if found:
                    return f"{found}\n{REMEDY}"
        return ""

    def _of_others(self, key: str, ranks: Sequence[int]) -> dict[int, Published]:
        found = {}
        for rank in ranks:
            if self._store.check([f"{key}/{rank}"]):
                found[rank] = Published.from_json(self._store.get(f"{key}/{rank}").decode())
        return found


def orders_of_live_groups() -> dict[dist.ProcessGroup, Order]:
    """The orders of groups that are alive, and over which something was begun."""
    return {group: order for group, order in list(ORDERS.items()) if order.begun and is_live(group)}
