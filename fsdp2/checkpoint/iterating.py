"""Whole parameters out of a sharded model, in bounded memory: `iter_full_parameters`.

What travels is decided by names, shapes and dtypes, which the ranks compare before anything is sent. `travelling` hands
out whole tensors to whoever writes them; `whole_tensors` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.arguments import Rule, checked
from fsdp2.checkpoint.copies import agree_on_copies
from fsdp2.checkpoint.held import Held, company_of, held_by, refuse_unreadable, settle
from fsdp2.checkpoint.ranks import Ranks
from fsdp2.checkpoint.rules import BYTES_RULE, is_int
from fsdp2.core.param import FSDPParam
from fsdp2.errors import FSDPError, FSDPValueError
from fsdp2.plugs.parameters.whole_tensors import Part, unsharded_like, whole_tensors

_RANK_OR_NONE = Rule(
    "a rank >= 0, or None",
    lambda value: value is None or (is_int(value) and value >= 0),
    lambda value: value is None or is_int(value),
)

_ITERATES = "iter_full_parameters()"


@checked(budget_bytes=BYTES_RULE, rank=_RANK_OR_NONE)
def iter_full_parameters(
    model: nn.Module, *, budget_bytes: int = 256 << 20, dtype: torch.dtype | None = None, rank: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole parameters of ``model`` one after the other, with their names, several gathered at a time.

    For an inference engine, a file, a hash. Tied parameters come once, under their first name, in the order of the
    model, with names that no wrapper (torch.compile, activation checkpointing) has added to; those that nothing shards,
    too. Each is a plain tensor in memory of its own, on the device that its mesh computes on.

    Collective: all ranks must call it and iterate to the same place, outside of forward and backward. Arguments are
    checked, and ranks compared, in the call. Values are those of when they are gathered: write the parameters after.

    Takes no more memory than the budget beside the shards, or the largest parameter if that is larger, as long as the
    caller keeps none of those before; two and a half times the parameter where ranks do not have as many rows each, or
    ``rank`` says who gets it, and twice more where tensor parallelism cuts it. As many parameters as fit travel in one
    exchange for each mesh.

    Args:
        model: sharded, or with sharded modules below, or neither.
        budget_bytes: of all that is gathered at a time.
        dtype: of floating-point parameters, which are cast before they are sent.
        rank: the only rank of all that is given parameters; the iterators of the others are empty, but send theirs
            when they are asked. None: all are.

    Raises:
        FSDPTypeError: not a module, an int or a dtype.
        FSDPValueError: a ``rank`` that does not hold ``model``, a budget of nothing, a ``dtype`` of no floats.
        FSDPRuntimeError: inside of a forward or backward, or of `full_parameters`; something on meta; the ranks differ.
            On all ranks alike.
        FSDPNotImplementedError: a parameter that is a tensor subclass.

    Stream: the current one.
    """
    refuse_dtype(dtype, _ITERATES)
    error = settle(model, _ITERATES, frees=False)
    held = [each for each in held_by(model) if not each.is_buffer]
    _, ranks = company_of(held)
    if error is None:
        error = _refusal(held, rank, ranks)
    lines = [f"{_ITERATES} with budget_bytes={budget_bytes}, dtype={dtype}, rank={rank}"]
    lines += [f"{each.name} {each.described}" for each in held]
    agree_on_copies(held, ranks, error, lines, _ITERATES)
    return travelling([(each.name, each) for each in held], budget_bytes, dtype=dtype, rank=rank)


def refuse_dtype(dtype: torch.dtype | None, caller: str) -> None:
    """Only floating-point tensors are cast, to a dtype of the same kind.

    Raises:
        FSDPValueError: to another.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise FSDPValueError(f"{caller} casts floating-point tensors to another such dtype, got dtype={dtype}.")


def _refusal(held: Sequence[Held], rank: int | None, ranks: Ranks) -> FSDPError | None:
    try:
        refuse_unreadable(held, _ITERATES, meta=True)
        if rank is not None and rank not in ranks.numbers:
            raise FSDPValueError(f"{_ITERATES} got rank={rank}, and the model is on the ranks {ranks.numbers}.")
    except FSDPError as error:
        return error
    return None


def travelling(
    wanted: Sequence[tuple[str, Held]], budget_bytes: int, *, dtype: torch.dtype | None, rank: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole of every tensor with the name it is given, as `iter_full_parameters` has it; nothing is compared.

    Collective: all ranks that hold them must iterate to the same place.
    """
    gets = rank is None or not dist.is_initialized() or dist.get_rank() == rank
    for batch in _batches(wanted, budget_bytes, dtype, rank):
        arrived = _arrived(batch, dtype, rank)
        for name, held in batch:
            whole = arrived.pop(held, None)
            with torch.inference_mode(False), torch.no_grad():
                if held.param is None:
                    whole = _whole_of(held.tensor.detach().to(_dtype_of(held, dtype)))
                elif _joins(held.param) and whole is not None:
                    whole = _whole_of(unsharded_like(whole, held.param.sharding))
            if gets and whole is not None:
                yield name, whole
            del whole


def _dtype_of(held: Held, dtype: torch.dtype | None) -> torch.dtype:
    """In which it travels."""
    return dtype if dtype is not None and held.tensor.dtype.is_floating_point else held.tensor.dtype


def _joins(param: FSDPParam) -> bool:
    """Whether tensor parallelism cuts it as well: it is made whole over those ranks, on all of them."""
    spec = param.sharding.unsharded_spec
    return spec is not None and any(
        not placement.is_replicate() and spec.mesh.size(dim) > 1 for dim, placement in enumerate(spec.placements)
    )


def _receiver(param: FSDPParam, rank: int | None) -> tuple[bool, int | None]:
    """Whether its shards meet, and the place of who alone gets the whole; None: all do."""
    group = param.sharding.mesh.shard_group
    if rank is None or group is None or _joins(param):
        return True, None
    members = dist.get_process_group_ranks(group)
    return (True, members.index(rank)) if rank in members else (False, None)


def _batches(
    wanted: Sequence[tuple[str, Held]], budget: int, dtype: torch.dtype | None, rank: int | None
) -> Iterator[list[tuple[str, Held]]]:
    """Runs of what is whole at the same time; the same on all ranks."""
    batch: list[tuple[str, Held]] = []
    taken = 0
    for name, held in wanted:
        nbytes = _bytes_of(held, _dtype_of(held, dtype).itemsize, rank)
        if batch and taken + nbytes > budget:
            yield batch
            batch, taken = [], 0
        batch.append((name, held))
        taken += nbytes
    if batch:
        yield batch


def _bytes_of(held: Held, itemsize: int, rank: int | None) -> int:
    """That are taken until it is handed out: by the whole, and by what is sent, received and then copied to it."""
    whole = held.tensor.numel() * itemsize
    if held.param is None:
        return whole
    part, size = Part(held.local, held.param.sharding.partition), held.param.sharding.mesh.shard_size
    is_received_there = size == 1 or part.is_sent_by_owner() or (rank is None and part.arrives_in_place(size, itemsize))
    packed = 0 if is_received_there else (size + 1) * part.room(size) * itemsize
    return part.partition.numel * itemsize + packed + (2 * whole if _joins(held.param) else 0)


def _arrived(
    batch: Sequence[tuple[str, Held]], dtype: torch.dtype | None, rank: int | None
) -> dict[Held, torch.Tensor]:
    """Gather a batch over its data-parallel meshes, in one exchange for each. Empty on ranks that get nothing."""
    by_mesh: dict[Any, list[tuple[Held, FSDPParam]]] = {}
    for _, held in batch:
        if held.param is not None:
            key = (held.param.sharding.mesh.key, _joins(held.param))
            by_mesh.setdefault(key, []).append((held, held.param))
    arrived: dict[Held, torch.Tensor] = {}
    for found in by_mesh.values():
        meets, only = _receiver(found[0][1], rank)
        if meets:
            mesh = found[0][1].sharding.mesh
            with torch.inference_mode(False), torch.no_grad():
                parts = [Part(each.local.to(_dtype_of(each, dtype)), param.sharding.partition) for each, param in found]
                wholes = whole_tensors(parts, mesh, device=mesh.device, only=only)
            arrived.update(zip([each for each, _ in found], wholes, strict=False))
    return arrived


def _whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole, in memory of its own. Collective where it is a DTensor."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    is_shared = whole.data_ptr() == _torch.plain_of(tensor).data_ptr()
    return whole.clone() if is_shared else whole
