"""`WriteCounter`: what the optimizer guard tells groups of writes that version counters may miss."""

from __future__ import annotations

from typing import ClassVar


class WriteCounter:
    """What is seen of writes to the sharded parameters of a `fully_shard` call, beside their version counters.

    Attributes:
        writes: how many steps of optimizers, and replacements, there were.
        steps: (of the class) how many steps of any optimizers there were, of other parameters too.
        unwatched: (of the class) whether steps are not seen, or one is under way, of any rank of this process.
    """

    __slots__ = ("writes",)
    steps: ClassVar[int] = 0
    unwatched: ClassVar[bool] = True

    def __init__(self) -> None:
        self.writes = 0
