"""Records the collectives that a program issues, whoever issues them and by whichever function.

Seen where torch dispatches them (`c10d` operators), so neither the function used nor the number of
parameters that one carries matters to a test: groups are told apart by their size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.threads import listening

GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
_KINDS = {
    "_allgather_base_": GATHER,
    "allgather_": GATHER,
    "allgather_into_tensor_coalesced_": GATHER,
    "_reduce_scatter_base_": SCATTER,
    "reduce_scatter_": SCATTER,
    "reduce_scatter_tensor_coalesced_": SCATTER,
    "allreduce_": REDUCE,
    "allreduce_coalesced_": REDUCE,
}
_KINDS_OF_METHODS = {
    "allgather": GATHER,
    "all_gather_single": GATHER,
    "_allgather_base": GATHER,
    "reduce_scatter": SCATTER,
    "reduce_scatter_single": SCATTER,
    "_reduce_scatter_base": SCATTER,
    "allreduce": REDUCE,
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as this rank issued it.

    Attributes:
        numel: Elements of the larger side: the gathered tensor, the tensor to be scattered.
        ranks: Global ranks that take part.
        group: Name of the process group, which tells groups of the same ranks apart.
    """

    kind: str
    numel: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    group: str

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(slots=True)
class Trace:
    """Collectives and marks, in the order in which they were issued."""

    events: list[Collective | str] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """Notes that the program has come to a point."""
        self.events.append(name)

    def of(self, kind: str) -> list[Collective]:
        """The collectives of one kind, without the bookkeeping ones (integers, objects)."""
        return [e for e in self.events if isinstance(e, Collective) and e.kind == kind and e.dtype.is_floating_point]

    def dtypes(self, kind: str, numel: int) -> set[torch.dtype]:
        """Of the collectives of one group, given its size, which may be padded."""
        return {each.dtype for each in self.of(kind) if _is_size_of(each.numel, numel)}

    def counts(self) -> dict[str, int]:
        """How many collectives of each kind."""
        return {kind: len(self.of(kind)) for kind in (GATHER, SCATTER, REDUCE)}

    def named(self, sizes: Mapping[str, int]) -> list[str]:
        """Marks as they are, collectives as ``"all_gather a"``.

        Args:
            sizes: Unsharded elements of each group by name, far enough apart to be told apart in spite of padding.
                What matches none within an eighth is left out.
        """
        names = []
        for event in self.events:
            if isinstance(event, str):
                names.append(event)
                continue
            match = [name for name, numel in sizes.items() if _is_size_of(event.numel, numel)]
            if match:
                names.append(f"{event.kind} {match[0]}")
        return names


def _is_size_of(found: int, numel: int) -> bool:
    """Whether ``found`` elements may be those of a group of ``numel``, with up to an eighth of padding."""
    return 0 <= found - numel <= numel // 8


class _Recorder(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            if name in _KINDS:
                group = next(found for found in map(_process_group, args) if found is not None)
                self.trace.events.append(_collective(_KINDS[name], args, group))
        return func(*args, **(kwargs or {}))


def _collective(kind: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> Collective:
    largest = max(_flat_tensors(args), key=Tensor.numel)
    return Collective(
        kind, largest.numel(), largest.dtype, tuple(dist.get_process_group_ranks(group)), group.group_name
    )


def _flat_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _flat_tensors(each)]
    return []


def _process_group(value: Any) -> dist.ProcessGroup | None:
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # a boxed ReduceOp
        return None


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Records what this thread issues inside; a backward on CPU runs on the thread that asked for it."""
    trace = Trace()

    def note(method: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> None:
        trace.events.append(_collective(_KINDS_OF_METHODS[method], args, group))

    with _Recorder(trace), listening(note):
        yield trace


def trace_of(action: Callable[[], object]) -> Trace:
    """The trace of one call."""
    with traced() as trace:
        action()
    return trace
