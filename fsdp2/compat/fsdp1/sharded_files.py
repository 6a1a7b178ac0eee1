"""Files with ``ShardedTensor``s, read and written without a process group.

A pickled ``ShardedTensor`` names its class, and the class refuses to be unpickled but on the rank that wrote it, in a
process group of the same size. Here another class stands in its place while a file is read, which keeps what the
record says: the whole size, and this rank's rows with their offsets. Written, it names torch's class again, so that
torch's FSDP1 reads the file. Torch's classes are looked up by name, and only to write.

Files are read with ``weights_only=True``: nothing in them is executed. Their tensors stay on disk (``mmap``) until
they are used.
"""

from __future__ import annotations

import copy
import importlib
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fsdp2

TENSORS = "torch.distributed._shard.sharded_tensor"
SPECS = "torch.distributed._shard.sharding_spec"
METADATA = "torch.distributed._shard.metadata"
SHARDED_TENSOR = f"{TENSORS}.api.ShardedTensor"


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The part of a sharded tensor that one file holds.

    Attributes:
        tensor: Its elements.
        offsets: Where they begin in the whole, one number per dim.
    """

    tensor: Tensor
    offsets: tuple[int, ...]


class ShardedRecord(Tensor):
    """What a file says of a ``ShardedTensor``; computes nothing. Its shape and dtype are the whole's.

    Attributes:
        local_shards: The parts that the file holds; none if the rank had no element.
        rank: The rank that wrote it, and ``world_size`` the number of ranks.
    """

    local_shards: tuple[LocalShard, ...]
    rank: int
    world_size: int

    @classmethod
    def of_flat(cls, shard: Tensor, *, numel: int, chunk: int, rank: int, world_size: int, requires_grad: bool) -> Any:
        """The record of rank ``rank``'s ``shard`` of a 1-D tensor of ``numel`` elements, cut every ``chunk``."""
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (numel,), (1,), dtype=shard.dtype, device=shard.device, requires_grad=requires_grad
        )
        made.local_shards = (LocalShard(shard, (rank * chunk,)),) if shard.numel() else ()
        made.rank, made.world_size = rank, world_size
        return made

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        shards, _, group, *_ = state
        self.local_shards = tuple(
            LocalShard(shard.tensor.detach(), tuple(shard.metadata.shard_offsets)) for shard in shards
        )
        self.rank, self.world_size = group.local_rank, group.local_world_size

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kinds = {name: getattr(self, name) for name in ("dtype", "device", "requires_grad")}
        made = Tensor._make_wrapper_subclass(type(self), self.shape, self.stride(), **kinds)  # type: ignore[attr-defined]
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As any subclass of a tensor without storage, but under the name of torch's class, with that class's state.
        rebuild, (inner, _, arguments, _) = _as_subclass(self, protocol)
        torchs = _torchs(TENSORS, "ShardedTensor")
        return rebuild, (inner, torchs, (torchs, *arguments[1:]), _state_for_torch(self))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise fsdp2.FSDPRuntimeError(
            f"a record of a ShardedTensor in a file computes nothing, and {func} was called on it"
        )


def _as_subclass(record: ShardedRecord, protocol: Any) -> Any:
    record_state = record.__dict__
    record.__dict__ = {}
    try:
        return Tensor.__reduce_ex__(record, protocol)
    finally:
        record.__dict__ = record_state


def _torchs(module: str, name: str) -> Any:
    try:
        return vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        raise fsdp2.FSDPRuntimeError(
            f"this torch ({torch.__version__}) has no {module}.{name}, under which FSDP1 saves flat parameters; "
            "write the checkpoint with a torch that has it, or write another format"
        ) from error


def _state_for_torch(record: ShardedRecord) -> tuple[Any, ...]:
    """The state of torch's ``ShardedTensor``, from its own classes."""
    numel, device = record.shape[0], record.device
    chunk = -(-numel // record.world_size)
    placements = [f"rank:{rank}/{device}" for rank in range(record.world_size)]
    shard_metadata = _torchs(METADATA, "ShardMetadata")
    parts = []
    for rank, placement in enumerate(placements):
        start = rank * chunk
        parts.append(shard_metadata([min(start, numel)], [max(0, min(chunk, numel - start))], placement))
    properties = _torchs(TENSORS, "TensorProperties")(
        dtype=record.dtype, layout=torch.strided, requires_grad=record.requires_grad, pin_memory=False
    )
    metadata = _torchs(TENSORS, "ShardedTensorMetadata")(parts, record.shape, properties)
    shards = [_torchs(TENSORS, "Shard")(each.tensor, parts[record.rank]) for each in record.local_shards]
    group = _torchs(TENSORS, "ShardedTensor").ProcessGroupState(
        record.rank, record.rank, record.world_size, record.world_size
    )
    return shards, metadata, group, _torchs(SPECS, "ChunkShardingSpec")(0, placements), False


class _Said:
    """In the place of the other classes in such a record: keeps the attributes that it is given, and no more."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        for attributes in state if isinstance(state, tuple) else (state,):
            if isinstance(attributes, Mapping):
                for name, value in attributes.items():
                    setattr(self, str(name), value)


def _attribute(owner: object, name: str) -> type:
    """In the place of ``getattr``, by which pickles name a class within a class."""
    if owner is ShardedRecord and name == "ProcessGroupState":
        return _Said
    raise pickle.UnpicklingError(
        f"the file takes the attribute {name} of {owner}, which no ShardedTensor's record does"
    )


STAND_INS: Mapping[str, Any] = {
    SHARDED_TENSOR: ShardedRecord,
    f"{TENSORS}.shard.Shard": _Said,
    f"{TENSORS}.metadata.ShardedTensorMetadata": _Said,
    f"{TENSORS}.metadata.TensorProperties": _Said,
    f"{TENSORS}.metadata.MEM_FORMAT_ENCODING": _Said,
    f"{METADATA}.ShardMetadata": _Said,
    f"{SPECS}.chunk_sharding_spec.ChunkShardingSpec": _Said,
    f"{SPECS}.api.EnumerableShardingSpec": _Said,
    "torch.distributed.remote_device._remote_device": _Said,
    "__builtin__.getattr": _attribute,
    "builtins.getattr": _attribute,
}
"""What stands in the place of which name in a file."""


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Any:
    """Read a file of ``torch.save`` onto the CPU, ``ShardedTensor``s as `ShardedRecord`s. No process group is needed.

    Args:
        path: The file. Its tensors are mapped into memory, so that only what is used is read.
        trust: Let the file execute code, as it may if it holds more than tensors and Python's own types.

    Raises:
        FSDPValueError: It is no such file, or holds other objects and is not trusted.
    """
    # Files of torch before 1.6 cannot be mapped.
    options: dict[str, Any] = {"map_location": "cpu", "mmap": _is_zip(path)}
    try:
        if trust:
            return torch.load(path, weights_only=False, pickle_module=_Pickles(), **options)
        with torch.serialization.safe_globals([(each, name) for name, each in STAND_INS.items()]):
            return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise fsdp2.FSDPValueError(
            f"{os.fspath(path)} cannot be read, or holds more than tensors and Python's own types; if you know where "
            f"it comes from, let it execute code (--trust, trust=True). {error}"
        ) from error


def _is_zip(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand_in = STAND_INS.get(f"{module}.{name}")
        if stand_in is None or stand_in is _attribute:  # a trusted file may take any attribute
            return _trusted_attribute if stand_in is _attribute else super().find_class(module, name)
        return stand_in


def _trusted_attribute(owner: object, name: str) -> Any:
    return _Said if owner is ShardedRecord else getattr(owner, name)


class _Pickles:
    """What `torch.load` wants of a ``pickle_module``."""

    Unpickler = _Unpickler
    load = staticmethod(pickle.load)
    __name__ = "pickle"
