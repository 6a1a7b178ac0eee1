"""The settings of a `ShardingConfig` as a file holds them: strings, numbers, bools, lists and mappings; and back.

Dtypes are written by name ("bfloat16"), sizes also with a unit ("1 GiB"), placements as in Python ("Shard(1)").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement, Shard

from fsdp2.api.policies import CPUOffloadPolicy, OffloadPolicy
from fsdp2.arguments import nearest, shown
from fsdp2.core.options import DataParallelMeshDims, MixedPrecisionPolicy
from fsdp2.core.sharding import RowPlacement
from fsdp2.errors import FSDPTypeError, FSDPValueError
from fsdp2.grouping.config_text import Place
from fsdp2.plugs.parameters.owned import Owned
from fsdp2.plugs.parameters.row_blocks import RowBlocks
from fsdp2.ragged.placement import BlockShard

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_PLACEMENTS: dict[str, Callable[[int], Placement | RowPlacement]] = {
    "Shard": Shard,
    "RowBlocks": RowBlocks,
    "Owned": Owned,
    "BlockShard": lambda row_numel: BlockShard((row_numel,)),
}
_DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "grad_dtype")
_POLICY_FIELDS = (*_DTYPE_FIELDS, "cast_forward_inputs", "cache_shards")
_OFFLOAD_FIELDS = tuple(each.name for each in dataclasses.fields(CPUOffloadPolicy))


# ---- to a file --------------------------------------------------------------------------------------


def written(name: str, value: Any) -> Any:
    """The setting ``name`` as a file holds it."""
    if name in ("mp_policy_of", "shard_placement"):
        return {pattern: _written(each) for pattern, each in value.items()}
    return _written(value)


def _written(value: Any) -> Any:
    if isinstance(value, MixedPrecisionPolicy):
        return _written_policy(value)
    if isinstance(value, CPUOffloadPolicy):
        return {name: getattr(value, name) for name in _OFFLOAD_FIELDS}
    if isinstance(value, OffloadPolicy):
        return None
    if isinstance(value, DataParallelMeshDims):
        pairs = (("shard", value.shard), ("replicate", value.replicate))
        return {name: list(each) if isinstance(each, tuple) else each for name, each in pairs if each is not None}
    if isinstance(value, Shard):
        return f"Shard({value.dim})"
    if isinstance(value, BlockShard):
        return f"BlockShard({value.block_numels[0]})"
    if isinstance(value, (RowBlocks, Owned)):
        return f"{type(value).__name__}({value.rows if isinstance(value, RowBlocks) else value.rank})"
    return list(value) if isinstance(value, tuple) else value


def _written_policy(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in _POLICY_FIELDS:
        value = getattr(policy, name)
        if value != getattr(MixedPrecisionPolicy(), name):
            dtype = str(value).removeprefix("torch.")
            made[name] = dtype if isinstance(value, torch.dtype) else list(value) if isinstance(value, tuple) else value
    return made


# ---- from a file ------------------------------------------------------------------------------------


def read(place: Place, tree: Any, known: Sequence[str]) -> dict[str, Any]:
    """The settings of ``tree`` by name.

    Raises:
        FSDPValueError: it is no mapping, a name that is not in ``known``, a value that cannot be what it stands for.
    """
    settings = _mapping(place, {} if tree is None else tree, known)
    return {name: _READERS.get(name, _as_it_is)(place.within(name), value) for name, value in settings.items()}


def _mapping(place: Place, value: Any, known: Sequence[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FSDPValueError(f"{place}: a mapping is needed here (name: value), got {shown(value)}.")
    for key in value:
        at = place.within(key)
        if not isinstance(key, str):
            raise FSDPValueError(f"{at}: a name must be a string, got {shown(key)}.")
        if known is not None and key not in known:
            raise FSDPValueError(
                f"{at}: there is no setting '{key}'.{nearest(key, known)} There are: {', '.join(known)}."
            )
    return dict(value)


def _as_it_is(place: Place, value: Any) -> Any:
    return value


def _names(place: Place, value: Any) -> Any:
    """A list, or one name by itself."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _size(place: Place, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    scale = _UNITS.get(found[2].upper()) if found else None
    if found is None or scale is None:
        raise FSDPValueError(f"{place}: a size is a number of bytes, or '512 KiB', '64 MiB', '1 GiB', got {value!r}.")
    return round(float(found[1]) * scale)


def _dtype(place: Place, value: Any) -> torch.dtype | None:
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    dtype = _DTYPES.get(_SHORT.get(name, name))
    if dtype is None:
        known = ", ".join(_DTYPES)
        raise FSDPValueError(
            f"{place}: there is no floating-point dtype {value!r}.{nearest(name, [*_DTYPES, *_SHORT])} There are: "
            f"{known}."
        )
    return dtype  # type: ignore[no-any-return]


def _policy(place: Place, value: Any) -> MixedPrecisionPolicy:
    settings = _mapping(place, {} if value is None else value, _POLICY_FIELDS)
    for name in _DTYPE_FIELDS:
        if name in settings:
            settings[name] = _dtype(place.within(name), settings[name])
    return _made(place, MixedPrecisionPolicy, settings)


def _policies(place: Place, value: Any) -> dict[str, MixedPrecisionPolicy]:
    return {name: _policy(place.within(name), each) for name, each in _mapping(place, value or {}).items()}


def _offload(place: Place, value: Any) -> OffloadPolicy:
    if value is None or value is False:
        return OffloadPolicy()
    settings = {} if value is True else _mapping(place, value, _OFFLOAD_FIELDS)
    return _made(place, CPUOffloadPolicy, settings)


def _mesh_dims(place: Place, value: Any) -> DataParallelMeshDims | None:
    if value is None:
        return None
    settings = _mapping(place, value, ("shard", "replicate"))
    return _made(place, DataParallelMeshDims, {key: _listed(each) for key, each in settings.items()})


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _made(place: Place, kind: Callable[..., Any], settings: dict[str, Any]) -> Any:
    try:
        return kind(**settings)
    except (FSDPValueError, FSDPTypeError) as error:
        raise FSDPValueError(f"{place}: {error}") from error


def _placements(place: Place, value: Any) -> dict[str, Placement | RowPlacement]:
    return {name: _placement(place.within(name), each) for name, each in _mapping(place, value or {}).items()}


def _placement(place: Place, value: Any) -> Placement | RowPlacement:
    found = (
        re.fullmatch(r"\s*(\w+)\s*\(\s*(?:\w+\s*=\s*)?(-?[0-9]+)\s*\)\s*", value) if isinstance(value, str) else None
    )
    kind = _PLACEMENTS.get(found[1]) if found else None
    if found is None or kind is None:
        raise FSDPValueError(
            f"{place}: a placement is 'Shard(1)', 'RowBlocks(64)', 'Owned(0)' or 'BlockShard(1024)', got "
            f"{shown(value)}."
        )
    return _made(place, lambda: kind(int(found[2])), {})  # type: ignore[no-any-return]


_READERS: dict[str, Callable[[Place, Any], Any]] = {
    "mesh_shape": lambda place, value: (value,) if isinstance(value, int) else _listed(value),
    "mesh_dim_names": _names,
    "blocks": _names,
    "ignored_params": lambda place, value: () if value is None else _names(place, value),
    "no_unshard_in_backward": lambda place, value: () if value is None else _names(place, value),
    "dp_mesh_dims": _mesh_dims,
    "mp_policy": _policy,
    "mp_policy_of": _policies,
    "offload_policy": _offload,
    "shard_placement": _placements,
    "max_bytes": _size,
    "min_bytes": _size,
    "prefetch_budget": _size,
}
"""By the names of settings that a file holds as something else."""
