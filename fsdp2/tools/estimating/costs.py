"""What operators cost: operations, bytes, seconds. A roofline for each, and chains of them that a compiler fuses.

    seconds of a matrix product  = max(operations / (peak * achieved), bytes / (bandwidth * achieved), kernel) + casts
    seconds of anything else     = max(bytes / (bandwidth * achieved), kernel)

``bytes`` are those of the tensors that are read, and of those that are written. Formulas for operations are those of
``torch.utils.flop_counter``. A product in 8 bits casts its operands first: each element is read for the largest of all,
by which it is scaled, read again, and written; a compiler finds the largest where the operand is made.

Of causal attention half is computed (`Cost.flops`), and all of it counted for the utilization (`Cost.model_flops`), as
torchtitan, Megatron and the PaLM paper do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2.tools.estimating.hardware import Hardware

_ATTENTION = "_scaled_dot_product"
_ROWS_ONLY = frozenset({"embedding", "gather", "index", "index_select", "slice", "select"})
"""Operators that read of their first input no more than they write."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one operator.

    Attributes:
        flops: operations that are computed, of matrix products and attention.
        model_flops: operations that count for the utilization.
        nbytes: read and written.
        dtype: in which matrices are multiplied; None: no matrix product.
        is_attention: fused attention.
        operands: elements of what a matrix product multiplies.
    """

    flops: float
    model_flops: float
    nbytes: int
    dtype: torch.dtype | None = None
    is_attention: bool = False
    operands: int = 0


def written_by(func: Any, args: Sequence[Any], kwargs: Any, new: Sequence[Any]) -> list[torch.Tensor]:
    """What one call of ``func`` writes: what was ``new`` in its result, and what it changes in place."""
    return [*new, *(_mutated(func, args, kwargs) if func._schema.is_mutable else ())]


def bytes_read(func: Any, inputs: Sequence[Any], written: Sequence[Any]) -> list[tuple[torch.Tensor, int]]:
    """What of its ``inputs`` it reads, and how many bytes of each."""
    if inputs and _name(func) in _ROWS_ONLY:
        return [(inputs[0], sum(map(_nbytes, written)))]
    return [(tensor, _nbytes(tensor)) for tensor in inputs]


def _name(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::"))


def cost_of(
    func: Any, args: Sequence[Any], kwargs: Any, out: Any, inputs: Sequence[Any], written: Sequence[Any]
) -> Cost:
    """The cost of one call of ``func``, given its tensors: all ``inputs``, and what is ``written``."""
    name = _name(func)
    if not written:
        return Cost(0.0, 0.0, 0)  # a view
    nbytes = sum(read for _, read in bytes_read(func, inputs, written)) + sum(map(_nbytes, written))
    if name.startswith(_ATTENTION):
        flops = _attention_flops(args, is_backward="backward" in name)
        causal = any(arg is True for arg in (*args, *kwargs.values()))
        return Cost(flops / 2 if causal else flops, flops, nbytes, args[0].dtype, True)
    formula = _formulas().get(func._overloadpacket)
    if formula is None:
        return Cost(0.0, 0.0, nbytes)
    flops = float(formula(*args, **kwargs, out_val=out))
    matrices = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1]
    return Cost(flops, flops, nbytes, matrices[-1].dtype, operands=sum(each.numel() for each in matrices[-2:]))


@functools.cache
def _formulas() -> dict[Any, Any]:
    """By operator. (Imported late, as it takes a while, and only estimates need it.)"""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _nbytes(tensor: torch.Tensor) -> int:
    """Of its elements; an expanded one is read from where it lies."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or size == 0 else 1
    return numel * tensor.element_size()


def _mutated(func: Any, args: Sequence[Any], kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [each for each in (value if isinstance(value, (list, tuple)) else [value]) if _is_tensor(each)]
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _attention_flops(args: Sequence[Any], *, is_backward: bool) -> float:
    """Of query, key, value of shapes (batch, heads, length, width): two products, five of that size in backward."""
    query, key, value = [arg for arg in args if _is_tensor(arg) and arg.dim() == 4][is_backward:][:3]
    batch, heads, queries, width = query.shape
    pairs = 2.0 * batch * heads * queries * key.shape[-2]
    if is_backward:
        return pairs * (3 * width + 2 * value.shape[-1])
    return pairs * (width + value.shape[-1])


@dataclass(slots=True)
class Fusion:
    """A chain of operators between two matrix products that a compiler makes one kernel of.

    It reads what comes from outside of it, and writes what is still needed when it ends.

    Attributes:
        read: bytes from outside, by where they lie.
        written: what is made or changed inside, by where it lies: a weak reference to its storage, and bytes.
        made: storages that are made inside.
    """

    read: dict[tuple[int, int], int] = field(default_factory=dict)
    written: dict[tuple[int, int], tuple[Any, int]] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)

    def add(
        self, read: Sequence[tuple[torch.Tensor, int]], written: Sequence[torch.Tensor], new: Sequence[torch.Tensor]
    ) -> None:
        """One more operator: what it reads and how much of it, what it writes, and which of that is new."""
        for tensor, nbytes in read:
            place = _place(tensor)
            if place[0] not in self.made and place not in self.written:
                self.read[place] = max(self.read.get(place, 0), nbytes)
        for tensor in written:
            self.written[_place(tensor)] = (weakref.ref(tensor.untyped_storage()), _nbytes(tensor))
        self.made.update(id(tensor.untyped_storage()) for tensor in new)

    def end(self) -> int:
        """The bytes that it reads and writes; a new chain begins."""
        written = sum(nbytes for reference, nbytes in self.written.values() if reference() is not None)
        nbytes = sum(self.read.values()) + written
        self.read, self.written, self.made = {}, {}, set()
        return nbytes


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor.untyped_storage()), int(tensor.storage_offset())


def seconds_of(cost: Cost, hardware: Hardware, dtype: torch.dtype | None, *, fuses: bool = False) -> float:
    """How long it runs. ``dtype``: of matrix products, if another than that of their tensors; ``fuses``: compiled."""
    if not cost.nbytes:
        return 0.0
    moved = cost.nbytes / (hardware.memory_bandwidth * hardware.achieved_memory)
    computed = 0.0
    if cost.dtype is not None and cost.flops:
        achieved = hardware.achieved_attention if cost.is_attention else hardware.achieved_flops
        peak = hardware.flops_of(cost.dtype if dtype is None or cost.is_attention else dtype)
        computed = cost.flops / (peak * achieved) if peak else 0.0
    return max(moved, computed, hardware.kernel_seconds) + _cast_seconds(cost, hardware, dtype, fuses)


def _cast_seconds(cost: Cost, hardware: Hardware, dtype: torch.dtype | None, fuses: bool) -> float:
    """Of the operands of a product, to the narrower dtype that it is computed in."""
    if cost.dtype is None or dtype is None or cost.is_attention or dtype.itemsize >= cost.dtype.itemsize:
        return 0.0
    nbytes = cost.operands * ((1 if fuses else 2) * cost.dtype.itemsize + dtype.itemsize)
    return nbytes / (hardware.memory_bandwidth * hardware.achieved_memory)
