"""`Scaling`: how the mean of gradients comes about, by the operations of collectives and divisions around them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a mean comes about: by the collectives' own operations, and by divisions before and after them.

    Attributes:
        before: divides what the reduce-scatter sends.
        scatter_op: of the reduce-scatter.
        replicate_op: of the all-reduce over replicas.
        after: divides the result.
        factor: by which ``scatter_op`` itself divides.
    """

    before: float
    scatter_op: Any
    replicate_op: Any
    after: float
    factor: float = 1.0

    @classmethod
    def choose(
        cls,
        dtype: torch.dtype,
        world_size: int,
        replicate_size: int,
        *,
        factor: float | None = None,
        only_sums: bool = False,
        premultiplies: bool = False,
    ) -> Scaling:
        """The mean over all ranks, or the sum divided by ``factor``.

        In dtypes of small range the division is shared out before and after the sum, so that neither overflows nor
        underflows. ``premultiplies``: the backend has an operation that scales and sums.
        """
        total, mean = dist.ReduceOp.SUM, dist.ReduceOp.AVG
        is_narrow = dtype not in (torch.float64, torch.float32, torch.bfloat16)
        if not is_narrow and not only_sums:
            if factor is None:
                op = total if world_size * replicate_size == 1 else mean
                return cls(1.0, op, op, 1.0)
            if factor == world_size and world_size > 1:
                return cls(1.0, mean, total, 1.0)
            if premultiplies and world_size > 1:
                return cls(1.0, _torch.premultiplied_sum(1 / factor), total, 1.0, factor)
        divisor = float(world_size * replicate_size) if factor is None else float(factor)
        before = 2.0 ** math.ceil(math.log2(divisor) / 2) if is_narrow and divisor > 1 else 1.0
        return cls(before, total, total, divisor / before)

    def of_any_backend(self) -> Scaling:
        """The same mean, without an operation that scales by a factor."""
        plain = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if self.scatter_op in plain:
            return self
        return Scaling(1.0, dist.ReduceOp.SUM, self.replicate_op, self.factor)
