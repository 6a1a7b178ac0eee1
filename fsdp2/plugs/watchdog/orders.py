"""Compares what ranks have begun over groups whose collectives carry no name: NCCL's, and gloo's among many ranks.

Every rank publishes, now and then, what it has begun last over each group; the group's first rank compares. Ranks that
have begun different exchanges as their n-th have received each other's values, or will, if the sizes are equal; they
wait for ever if not. Either way that cannot be mended: all are told, and raise.
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
        begun: how many exchanges.
        bits: of the labels of the last ones.
        marks: how many there had been, and the digest then.
    """

    begun: int
    bits: tuple[int, ...]
    marks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, order: Order) -> Published:
        """What ``order`` says, by another thread than that which begins exchanges."""
        recent = list(order.recent)
        begun = recent[-1].number + 1 if recent else 0
        return cls(begun, tuple(each.label.bits for each in recent), tuple(order.marks))

    def to_json(self) -> str:
        """For the store."""
        packed = base64.b64encode(struct.pack(f"<{len(self.bits)}I", *self.bits)).decode()
        return json.dumps([self.begun, packed, self.marks])

    @classmethod
    def from_json(cls, text: str) -> Published:
        """What another rank has written."""
        begun, packed, marks = json.loads(text)
        raw = base64.b64decode(packed)
        bits = struct.unpack(f"<{len(raw) // 4}I", raw)
        return cls(begun, bits, tuple((number, digest) for number, digest in marks))


def difference(published: Mapping[int, Published], name: Callable[[int], str] = label_of_bits) -> str:
    """How the ranks' orders differ, which one first; "" if they do not, as far as they can be compared.

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
    """One rank's part in it.

    Args:
        store: that all ranks share.
        rank: this one's, in the world.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._told: dict[str, int] = {}

    def look(self, epoch: int) -> str:
        """Publish what is new, and compare what is where this rank is the first of a group; "" if nothing differs."""
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
    """Those in which something was begun."""
    return {group: order for group, order in list(ORDERS.items()) if order.begun and is_live(group)}
