"""Finds, for a `DeviceMesh`, the process groups, ranks and device that a group of parameters communicates over."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import _torch
from fsdp2.arguments import checked_class
from fsdp2.core.options import DataParallelMeshDims
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, FSDPValueError


@checked_class()
@dataclass
class DataParallelMeshInfo:
    """Which dims of a mesh shard parameters and which replicate them: what `ShardPlacementResult` carries.

    Attributes:
        mesh: the data-parallel mesh, with one or two dims.
        shard_mesh_dim: the dim to shard over, None to replicate only.
        replicate_mesh_dim: the dim to replicate over, None to shard only.
        dp_mesh_dims: the named dims, if ``mesh`` was taken out of a larger mesh.
        spmd_mesh: that larger mesh.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)
    is_spmd_mesh: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise FSDPValueError(f"{type(self).__name__} needs at least one of shard_mesh_dim and replicate_mesh_dim.")
        for name in ("shard_mesh_dim", "replicate_mesh_dim"):
            dim = getattr(self, name)
            if dim is not None and not 0 <= dim < self.mesh.ndim:
                raise FSDPValueError(f"{type(self).__name__}: {name}={dim} is no dim of {self.mesh}.")
        self.is_spmd_mesh = self.dp_mesh_dims is not None


@checked_class()
@dataclass
class FSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are sharded over ``shard_mesh_dim``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise FSDPValueError("FSDPMeshInfo needs shard_mesh_dim.")
        self.shard_mesh_size: int = self.mesh.size(self.shard_mesh_dim)
        self.shard_process_group = self.mesh.get_group(self.shard_mesh_dim)
        self.shard_mesh_rank: int = self.mesh.get_local_rank(self.shard_mesh_dim)


@checked_class()
@dataclass
class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are replicated over ``replicate_mesh_dim``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise FSDPValueError("DDPMeshInfo needs replicate_mesh_dim.")
        self.replicate_mesh_size: int = self.mesh.size(self.replicate_mesh_dim)
        self.replicate_process_group = self.mesh.get_group(self.replicate_mesh_dim)
        self.replicate_mesh_rank: int = self.mesh.get_local_rank(self.replicate_mesh_dim)


@checked_class()
@dataclass
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Parameters are sharded over one dim and replicated over the other."""


UNFUSED = frozenset({"nccl2"})
"""Backends that launch each of several coalesced collectives by itself: torch 2.15's new one for NCCL, in its
`allgather_into_tensor_coalesced` and `reduce_scatter_tensor_coalesced`. (Earlier backends launch one NCCL group.)"""


@dataclass(frozen=True, slots=True, eq=False)
class DataParallelMesh:
    """The ranks over which a group of parameters is sharded and replicated.

    Attributes:
        device_mesh: the data-parallel dims: (shard,), (replicate, shard) or (replicate,).
        device: the device that this process computes on.
        shard_group: the ranks that hold the shards of one replica; None if parameters are not sharded.
        shard_size: how many shards there are.
        shard_rank: which of them this process holds.
        replicate_group: the ranks that hold the same shard; None if there is one replica.
        replicate_size: how many replicas there are.
        dims: the named dims, if the mesh was taken out of a larger mesh.
        spmd_mesh: that larger mesh, which every parameter must be a DTensor on.
    """

    device_mesh: DeviceMesh
    device: torch.device
    shard_group: dist.ProcessGroup | None
    shard_size: int
    shard_rank: int
    replicate_group: dist.ProcessGroup | None
    replicate_size: int
    dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = None

    @classmethod
    def from_info(cls, info: Any) -> DataParallelMesh:
        """Read a mesh info, of this package or of torch's.

        Raises:
            FSDPValueError: this process has no device of the mesh's type, or the info does not use all mesh dims.
        """
        mesh, shard, replicate = info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim
        used = [dim for dim in (replicate, shard) if dim is not None]
        if used != list(range(mesh.ndim)):
            raise FSDPValueError(
                "a mesh info must use all dims of its mesh, (replicate, shard) in this order; got "
                f"{type(info).__name__} with shard_mesh_dim={shard}, replicate_mesh_dim={replicate} on {mesh}. Take "
                "the dims out of a larger mesh first, e.g. FSDPMeshInfo(mesh['shard'], shard_mesh_dim=0)."
            )
        return cls(
            mesh,
            device_of(mesh),
            None if shard is None else mesh.get_group(shard),
            1 if shard is None else mesh.size(shard),
            0 if shard is None else mesh.get_local_rank(shard),
            None if replicate is None else mesh.get_group(replicate),
            1 if replicate is None else mesh.size(replicate),
            getattr(info, "dp_mesh_dims", None),  # infos of torch 2.11 have neither attribute
            getattr(info, "spmd_mesh", None),
        )

    @property
    def fuses(self) -> bool:
        """Whether several collectives over the shards, issued together, are one launch. Packing is decided by it."""
        return self.shard_group is None or _torch.backend_name(self.shard_group, self.device) not in UNFUSED

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The dim to shard over, as a mesh of one dim. If nothing is sharded, it is the only dim that there is."""
        if self.device_mesh.ndim == 1:
            return self.device_mesh
        names = self.device_mesh.mesh_dim_names
        assert names is not None, "a mesh of two dims has names"
        return self.device_mesh[names[-1]]

    @property
    def key(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Parameters with equal keys can be communicated together."""
        return self.shard_group, self.replicate_group

    def __str__(self) -> str:
        sizes = f"{self.shard_size} ranks"
        return sizes if self.replicate_group is None else f"{sizes} x {self.replicate_size} replicas"


def is_part_of(mesh: DeviceMesh, whole: DeviceMesh) -> bool:
    """Whether the ranks of ``mesh`` are some of those of ``whole``, and not all."""
    if mesh is whole or mesh.size() >= whole.size():
        return False
    with _torch.unobserved():  # the ranks are real numbers, also while tensors are fake
        return set(mesh.mesh.flatten().tolist()).issubset(whole.mesh.flatten().tolist())


SHARDED: WeakSet[DeviceMesh] = WeakSet()
"""The meshes that something is sharded over."""


_OF_MODELS = frozenset({"tp", "tensor", "tensor_parallel", "pp", "pipeline", "pipeline_parallel"})
"""Common names of mesh dims whose ranks have different parts of the model and the same data."""


def mesh_info(mesh: Any, dims: Any = None) -> DataParallelMeshInfo:
    """How ``mesh`` is used: a 1D mesh shards, a 2D mesh is (replicate, shard), an N-D mesh is used as ``dims`` says.

    Several named dims are flattened into one, which makes process groups: then all ranks must call this.

    Raises:
        FSDPTypeError: ``mesh`` is not a `DeviceMesh`, or ``dims`` is not a `DataParallelMeshDims`.
        FSDPValueError: the number of dims, or their names, do not fit.
    """
    if not isinstance(mesh, DeviceMesh):
        raise FSDPTypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}; see init_device_mesh().")
    if dims is not None:
        dims = _validated_dims(mesh, dims)
    if mesh.get_coordinate() is None:
        raise FSDPValueError(
            f"rank {dist.get_rank()} is not part of {mesh}; call fully_shard only on the ranks of its mesh."
        )
    if dims is not None:
        return _info_of_named_dims(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise FSDPValueError(
            f"fully_shard expects a 1D or 2D mesh, (shard) or (replicate, shard), got {mesh.ndim} dims "
            f"{mesh.mesh_dim_names}; pass some of its dims, e.g. mesh['shard'], or name them in dp_mesh_dims."
        )
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.mesh_dim_names is None:
        raise FSDPValueError(
            "a mesh of 2 dims (replicate, shard) needs names: init_device_mesh(..., mesh_dim_names=('replicate', "
            "'shard'))."
        )
    for index, name in enumerate(mesh.mesh_dim_names):
        if name in _OF_MODELS:
            raise FSDPValueError(
                f"the mesh has the dims {mesh.mesh_dim_names}, and fully_shard would take '{name}' for ranks that "
                f"{('copy', 'shard')[index]} the parameters, with other data each: pass the other dim, "
                f"mesh['{mesh.mesh_dim_names[1 - index]}'], or say in dp_mesh_dims what each of them is for."
            )
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def replicating_info(info: DataParallelMeshInfo) -> DDPMeshInfo:
    """The mesh info that replicates over all ranks of ``info``. Two dims are flattened into one.

    Flattening makes process groups, so all ranks must call this.
    """
    mesh = info.mesh
    if mesh.ndim > 1:
        assert mesh.mesh_dim_names is not None, "a mesh of two dims has names"
        mesh = _torch.flatten_mesh(mesh, "_".join(mesh.mesh_dim_names))
    return DDPMeshInfo(mesh, replicate_mesh_dim=0, dp_mesh_dims=info.dp_mesh_dims, spmd_mesh=info.spmd_mesh)


def _validated_dims(mesh: DeviceMesh, dims: Any) -> DataParallelMeshDims:
    if not (hasattr(dims, "shard_names") and hasattr(dims, "replicate_names")):
        raise FSDPTypeError(f"dp_mesh_dims must be a DataParallelMeshDims, got {dims!r}.")
    ours = DataParallelMeshDims(dims.shard, dims.replicate)
    if mesh.mesh_dim_names is None:
        raise FSDPValueError(f"dp_mesh_dims names dims of the mesh, but {mesh} has no mesh_dim_names.")
    names = ours.shard_names + ours.replicate_names
    for name in names:
        if name not in mesh.mesh_dim_names:
            raise FSDPValueError(f"dp_mesh_dims names '{name}', but the mesh has the dims {mesh.mesh_dim_names}.")
    if len(set(names)) != len(names):
        raise FSDPValueError(f"dp_mesh_dims names a dim twice: {names}; a dim either shards or replicates.")
    return ours


def _info_of_named_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    named = {"dp_mesh_dims": dims, "spmd_mesh": mesh}
    if not dims.shard_names:
        return DDPMeshInfo(_flattened(mesh, dims.replicate_names), replicate_mesh_dim=0, **named)  # type: ignore[arg-type]
    shard = _flattened(mesh, dims.shard_names)
    if not dims.replicate_names:
        return FSDPMeshInfo(shard, shard_mesh_dim=0, **named)  # type: ignore[arg-type]
    both = _torch.concatenate_meshes([_flattened(mesh, dims.replicate_names), shard])
    return HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0, **named)  # type: ignore[arg-type]


def _flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else _torch.flatten_mesh(mesh[names], "_".join(names))


_SCATTERING: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def own_reduce_scatter_group(mesh: DataParallelMesh) -> dist.ProcessGroup | None:
    """A second process group of the ranks that ``mesh`` shards over. It is made once, so all of them must call this."""
    if mesh.shard_group is None:
        return None
    if mesh.shard_group not in _SCATTERING:
        _SCATTERING[mesh.shard_group] = new_group_like(mesh.shard_group)
    return _SCATTERING[mesh.shard_group]


def new_group_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another process group of the ranks of ``group``. All of them must call this."""
    ranks = dist.get_process_group_ranks(group)
    return cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=True))  # this rank is one of them


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this process in ``mesh``: the current one of its type.

    Raises:
        FSDPValueError: there is no such device here.
        FSDPNotImplementedError: it is neither a CPU nor a device with streams.
    """
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, mesh.device_type, None)
    if module is None or not module.is_available():
        raise FSDPValueError(
            f"the mesh is of device type '{mesh.device_type}', which is not available in this process; "
            "build the mesh with the device type of the processes' own devices, e.g. init_device_mesh('cpu', ...)."
        )
    if not all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")):
        raise FSDPNotImplementedError(
            f"fsdp2 runs on CPUs and on devices with streams, as CUDA's and XPU's; torch.{mesh.device_type} has none. "
            f"Build the mesh on the CPU: fully_shard(module, mesh=init_device_mesh('cpu', ({mesh.size()},)))."
        )
    return torch.device(mesh.device_type, module.current_device())


def make_process_group(caller: str) -> None:
    """Make the default process group from a launcher's environment, if there is none yet.

    Raises:
        FSDPRuntimeError: there is no launcher's environment either.
    """
    if dist.is_initialized():
        return
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        raise FSDPRuntimeError(
            f"{caller} needs a process group, and none is initialized: call torch.distributed.init_process_group() "
            "first, or start the program with torchrun."
        )
    dist.init_process_group()


def default_mesh() -> DeviceMesh:
    """A mesh of one dim over all ranks, on the current accelerator or else on CPU. It is reused while it is alive.

    Under a launcher such as ``torchrun`` the default process group is initialized from the environment if the program
    has not done so. Collective over all ranks.

    Raises:
        FSDPRuntimeError: there is no process group and no launcher's environment to make one from.
    """
    make_process_group("fully_shard")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    world, (known_world, known_mesh) = dist.group.WORLD, _DEFAULT.get(device_type, (None, None))
    if known_world is not None and known_mesh is not None and known_world() is world:
        known = known_mesh()
        if known is not None:
            return known
    with _torch.unobserved():  # the ranks are real numbers, also while tensors are fake
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    # A mesh that has made a process group of its own is not kept: whether it is still alive may differ between ranks,
    # and all must make the same groups.
    if mesh.get_group() is world:
        _DEFAULT[device_type] = ref(world), ref(mesh)
    return mesh


_DEFAULT: dict[str, tuple[ref[Any], ref[DeviceMesh]]] = {}
"""For each device type, the world that the last `default_mesh` was made over, and the mesh."""
