"""Which dispatched operations count as copies, and how many bytes each of them writes.

Counted: operations whose purpose is to move or cast data. Not counted: arithmetic (the addition that
accumulates a gradient, say), fills (`zero_`, `fill_`), what a backend copies inside a collective, and what
one dispatched operation copies inside itself beyond its result. Bytes *written* are what a copy's
destination takes; reading and writing together move twice as much, or less where the copy casts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

ATEN_COPIES = frozenset(
    {
        # into an existing tensor, or several
        "copy_",
        "_foreach_copy_",
        "index_copy_",
        "split_with_sizes_copy",
        "_chunk_cat",
        "cat",
        "stack",
        # into a new tensor; `contiguous`, `to` and `repeat_interleave` dispatch to one of these
        "clone",
        "_to_copy",
        "copy",
        "constant_pad_nd",
        "repeat",
        "index_select",
        "index_copy",
        "slice_scatter",
        "slice_copy",
        "narrow_copy",
        "view_copy",
        "split_copy",
        "unbind_copy",
    }
)
# Operators that implementations of fully_shard register; all that torch's and fsdp2's do is move data.
COPY_NAMESPACES = frozenset({"fsdp", "fsdp2"})
# torch's all_gather_copy_in writes its inputs into a buffer that its schema does not declare as written.
WRITES_FIRST_ARGUMENT = frozenset({"fsdp::all_gather_copy_in"})


def is_copy(op: torch._ops.OpOverload) -> bool:
    """Whether `op` moves or casts data, by the lists above."""
    if op.namespace == "aten":
        return op._schema.name.removeprefix("aten::") in ATEN_COPIES
    return op.namespace in COPY_NAMESPACES


def bytes_written(
    op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object], result: object
) -> int:
    """Bytes that copy `op` wrote: to the arguments its schema marks as written, else to its result."""
    if op._schema.name in WRITES_FIRST_ARGUMENT:
        return total_nbytes(args[0])
    written = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return sum(map(total_nbytes, written)) if written else total_nbytes(result)


def total_nbytes(value: object) -> int:
    """Bytes of the elements of the tensors in `value`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in an operation's argument or result: itself, or those in (nested) lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
