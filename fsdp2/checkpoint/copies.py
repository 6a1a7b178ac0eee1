"""What ranks hold under one name, each for itself: copies of one tensor, or tensors that only have a name in common.

Beside tensor parallelism, a parameter that it does not cut is on several meshes of data parallelism, and is the same on
all; so is one that nothing shards, on all ranks. Experts that each rank of expert parallelism has for itself lie no
other way, and are different tensors.

[Note: which of both]
Where ``shard_placement_fn`` has put a parameter on fewer ranks than the others of its module, its values are the same
only if nobody has ever changed them: any difference counts. Else all ranks should have computed the same, but kernels
may have rounded otherwise on some; so only what is far apart counts, and vectors do not: the gradient of a bias may be
nothing but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.checkpoint.boxes import boxes_here
from fsdp2.checkpoint.held import Held
from fsdp2.checkpoint.ranks import Ranks, agree
from fsdp2.core.param import is_subclass
from fsdp2.errors import FSDPRuntimeError
from fsdp2.ragged.placement import Box

_LOOKED_AT = 16
"""Elements of each, at equal distances."""

_APART = 0.05
"""Of the length of what is compared."""


class Sample(NamedTuple):
    """Some elements of a rank's part of a parameter.

    Attributes:
        values: of them.
        is_exact: whether any difference counts. See [Note: which of both].
    """

    values: tuple[float, ...]
    is_exact: bool


Samples = Mapping[tuple[str, tuple[Box, ...]], Sample]
"""By the name of the parameter, and which entries they are of."""


def samples_of(held: Iterable[Held], ranks: Ranks) -> Samples:
    """Of the parameters on meshes that not all of ``ranks`` are on, and of those on none: mostly of none.

    Stream: the current one, which the host waits for if there is one.
    """
    held = [each for each in held if not each.is_buffer]
    everyone = frozenset(ranks.numbers)
    chosen: dict[tuple[str, tuple[Box, ...]], bool] = {}
    parts: list[torch.Tensor] = []
    covering: dict[DeviceMesh | None, bool] = {}
    for each in held if len(everyone) > 1 else ():
        mesh, local = _torch.spec_of(each.tensor).mesh if isinstance(each.tensor, DTensor) else None, each.local
        if mesh not in covering:
            covering[mesh] = mesh is not None and everyone.issubset(mesh.mesh.flatten().tolist())
        is_slice = _is_slice(each)
        # (What FSDP1 has in the place of its parameters are vectors: each rank's own part.)
        is_looked_at = not covering[mesh] and (is_slice or each.tensor.dim() > 1) and _is_readable(local)
        boxes = boxes_here(each.tensor) if is_looked_at else None
        if boxes is None or not local.numel():
            continue
        flat, is_rounded = local.detach().reshape(-1), _is_rounded(local)
        numbers = flat if is_rounded else flat.view(torch.uint8)
        chosen[each.name, boxes] = is_slice or not is_rounded
        parts.append(numbers[:: -(-numbers.numel() // _LOOKED_AT)].float().nan_to_num())
    if not parts:
        return {}
    values = iter(torch.cat([part.to(parts[0].device) for part in parts]).tolist())
    return {
        key: Sample(tuple(islice(values, part.numel())), is_exact)
        for (key, is_exact), part in zip(chosen.items(), parts, strict=True)
    }


def _is_readable(local: torch.Tensor) -> bool:
    is_dense = local.layout is torch.strided and not (local.is_meta or is_subclass(local))
    return is_dense and not (local.is_complex() or local.is_quantized)


def _is_rounded(local: torch.Tensor) -> bool:
    """Whether its numbers are results of arithmetic, and not codes, or two of them in a byte."""
    return local.is_floating_point() and local.dtype is not torch.float4_e2m1fn_x2


def _is_slice(held: Held) -> bool:
    return held.param is not None and held.param.group is not None and held.param.group.placed_within is not None


def refusal_of_copies(found: Sequence[Samples], numbers: Sequence[int]) -> str:
    """Why what ranks have ``found`` is no one tensor for each name; "" if it is.

    Args:
        found: by each rank.
        numbers: of the ranks, for the message.
    """
    first: dict[object, tuple[int, Sample]] = {}
    for number, samples in zip(numbers, found, strict=True):
        for key, sample in samples.items():
            other, known = first.setdefault(key, (number, sample))
            if not _are_copies(known, sample):
                return (
                    f"'{key[0]}' is on no mesh of all ranks, and rank {number} has other values in it than rank "
                    f"{other}: they are different tensors of one name, of which one would be kept. Make it a DTensor "
                    "on a mesh of all of these ranks, as experts on (edp, ep) that are sharded over both; or take the "
                    "ranks that have the same by themselves: save(..., process_group=) to a folder for each, of the "
                    "module that holds the experts; iter_full_parameters() of it, if they are on a mesh of their own."
                )
    return ""


def agree_on_copies(
    held: Sequence[Held], ranks: Ranks, error: Exception | None, lines: Sequence[str], caller: str
) -> None:
    """`agree`, and go on only if each name is of one tensor. Collective.

    Raises:
        FSDPRuntimeError: it is not.
        FSDPError: as of `agree`.
    """
    samples: Samples = {}
    if error is None:
        try:
            samples = samples_of(held, ranks)
        except Exception as raised:  # the other ranks wait
            error = raised
    found = agree(ranks, error, lines, caller, samples)
    refusal = refusal_of_copies(found, ranks.numbers)
    if refusal:
        raise FSDPRuntimeError(f"{caller}: {refusal}")


def _are_copies(one: Sample, other: Sample) -> bool:
    if one.values == other.values:
        return True
    if one.is_exact or other.is_exact:
        return False
    return math.dist(one.values, other.values) <= _APART * max(math.hypot(*one.values), math.hypot(*other.values))
