"""Issues the collectives of a plan: many members, one launch.

Knows process groups and backends, not groups of parameters. Each function must be called by all ranks of the process
group, in the same order, with members of the same sizes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.comm import announce, peers
from fsdp2.comm.primitives import Form, form_of, is_alone
from fsdp2.params.custom_comm import AllGather, ReduceScatter
from fsdp2.params.gather import Transfer
from fsdp2.params.memory import MemoryPool

Works = list[Any] | None
"""Where asynchronous works are added as they are issued; None: synchronous, on the current stream."""

Group = dist.ProcessGroup | None
"""Who communicates; None, or a group of one rank: nobody, and values are copied."""


def all_gather(
    members: Sequence[Transfer],
    group: Group,
    works: Works,
    custom: AllGather | None = None,
    custom_async: bool = False,
    form: Form | None = None,
) -> None:
    """Gather the input (n,) of every member into its output (world_size * n,).

    Asynchronous (CPU): one work per member, or one per message, all in flight together; on gloo that beats its
    coalesced form, which flattens inside. Otherwise on the current stream, coalesced into one launch if there are
    several members. A ``custom`` one is asynchronous only where ``custom_async`` says that the user asked for it.
    ``form``: `form_of` the group, if that is known already.
    """
    form = form or form_of(group)
    if group is None or form is Form.ALONE:
        for output, input in members:
            if output.data_ptr() != input.data_ptr():
                output.copy_(input)
        return
    if custom is not None:
        for output, input in members:
            _add(works, custom(output_tensor=output, input_tensor=input, group=group, async_op=custom_async))
        return
    if form is Form.PEERS and works is not None:
        if _torch.count_dispatch_modes() or _torch.gathers_are_patched():
            announce.all_gather(members, group)
        for output, input in members:
            peers.all_gather(output, input, group, works)
        return
    if works is None and len(members) > 1:
        with _torch.coalescing(group):
            for output, input in members:
                _torch.all_gather_batched(output, input, group)
        return
    for output, input in members:
        _add(works, _torch.all_gather_single(output, input, group, works is not None))


def reduce_scatter(
    members: Sequence[Transfer],
    group: Group,
    op: Any,
    works: Works,
    custom: ReduceScatter | None = None,
    form: Form | None = None,
    memory: MemoryPool | None = None,
) -> None:
    """Reduce the input (world_size * n,) of every member over the ranks; its output (n,) is this rank's part.

    ``memory``: the pool of what is received for that.
    """
    form = form or form_of(group)
    if group is None or form is Form.ALONE:
        for output, input in members:
            output.copy_(input)
        return
    if custom is not None:
        for output, input in members:
            _add(works, custom(output_tensor=output, input_tensor=input, group=group, op=op))
        return
    if form is Form.PEERS and works is not None and peers.can_reduce(op):
        if _torch.count_dispatch_modes() or _torch.reduce_scatters_are_patched():
            announce.reduce_scatter(members, op, group)
        for output, input in members:
            peers.reduce_scatter(output, input, op, group, works, memory)
        return
    if works is None and len(members) > 1:
        with _torch.coalescing(group):
            for output, input in members:
                _torch.reduce_scatter_batched(output, input, op, group)
        return
    for output, input in members:
        _add(works, _torch.reduce_scatter_single(output, input, op, group, works is not None))


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, works: Works) -> None:
    """Reduce ``tensor`` over the ranks, in place."""
    _add(works, dist.all_reduce(tensor, op=op, group=group, async_op=works is not None))


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


def _add(works: Works, work: dist.Work | None) -> None:
    if work is None:
        return
    if works is None:
        work.wait()  # a custom collective was asynchronous all the same: the current stream follows it
    else:
        works.append(work)


def disagreement(fingerprint: int, description: str, group: Group, device: torch.device) -> str | None:
    """None if every rank of ``group`` passes the same ``fingerprint``, else how the descriptions differ.

    Collective, and seen by no patched function or dispatch mode; the second exchange takes place only on disagreement,
    and then on all ranks.
    """
    if group is None or is_alone(group):
        return None
    mine = torch.tensor([fingerprint], dtype=torch.int64, device=device)
    world_size = dist.get_world_size(group)
    everyone = mine.new_empty(world_size)
    _torch.gather_unobserved(everyone, mine, group)
    if len(set(everyone.tolist())) == 1:
        return None
    descriptions: list[str] = [""] * world_size
    dist.all_gather_object(descriptions, description, group=group)
    reference = descriptions[0].splitlines()
    for rank, text in enumerate(descriptions):
        if text != descriptions[0]:
            lines = difflib.unified_diff(reference, text.splitlines(), "rank 0", f"rank {rank}", lineterm="", n=1)
            return "\n".join(lines)
    return "the fingerprints differ, the descriptions do not"
