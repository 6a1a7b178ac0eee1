"""`RaggedShard`: a placement that deals out the rows of dim 0 in any numbers.

torch's ``Shard`` deals out rows as ``torch.chunk`` does. Where shards must not cut through a block of rows, or a rank
holds everything, they do not: that needs a placement that says how many rows each rank has. veScale-FSDP has the same.

Three ranks, ``RaggedShard((4, 0, 3))``, a tensor of 7 rows::

    rank 0  | r0 r1 r2 r3 |        rank 1  | |        rank 2  | r4 r5 r6 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Placement

from fsdp2.arguments import checked
from fsdp2.errors import FSDPTypeError, FSDPValueError


class RaggedShard(Placement):
    """Dim 0 is cut; ``rows[r]`` consecutive rows lie on rank r of the mesh dim, in rank order.

    Immutable; equal to another of the same rows.

    Attributes:
        rows: one number for each rank of the mesh dim, 0 allowed; their sum is the tensor's size in dim 0.
    """

    rows: tuple[int, ...]

    @checked()
    def __init__(self, rows: Sequence[int]) -> None:
        """Check ``rows``.

        Raises:
            FSDPTypeError: a number of rows that is no int.
            FSDPValueError: a negative one, or none at all.
        """
        super().__init__()
        rows = tuple(rows)
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in rows):
            raise FSDPTypeError(f"RaggedShard takes one int for each rank of the mesh dim, got {rows}.")
        if not rows or min(rows) < 0:
            raise FSDPValueError(f"RaggedShard takes one number >= 0 for each rank of the mesh dim, got {rows}.")
        object.__setattr__(self, "rows", rows)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"RaggedShard is immutable; make another one to change {name}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash((RaggedShard, self.rows))

    def __repr__(self) -> str:
        return f"RaggedShard({self.rows})"

    def __reduce__(self) -> Any:
        return RaggedShard, (self.rows,)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self

    def start(self, rank: int) -> int:
        """The first row of ``rank``."""
        return sum(self.rows[:rank])
