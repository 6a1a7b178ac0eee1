"""Meshes in pickles: what is written down of a `DeviceMesh`, and how it is found or made again, maybe in another job.

Process groups cannot be pickled. A mesh that this process knows already is found by its ranks and names; else it is
made anew, which makes process groups unless it is one dim over all ranks: then all ranks must unpickle.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2.core.mesh import ON_MESH, DataParallelMesh, DataParallelMeshInfo
from fsdp2.core.sharding import Partition, Sharding
from fsdp2.errors import FSDPRuntimeError


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """What identifies a mesh, in any job of the same size.

    Attributes:
        device_type: as the mesh has it.
        ranks: nested, one level per dim.
        names: of the dims, if they have any.
        root: the mesh that it is a slice of, if it is one.
    """

    device_type: str
    ranks: Any
    names: tuple[str, ...] | None
    root: MeshRecord | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshRecord:
        """Write ``mesh`` down, and remember it."""
        know(mesh)
        root = _torch.root_mesh(mesh)
        return cls(*_identity(mesh), None if root is mesh or root is None else cls(*_identity(root)))

    def find(self) -> DeviceMesh:
        """The mesh, known or made anew. Collective over all ranks where it must be made.

        Raises:
            FSDPRuntimeError: it has flattened dims, or ranks that this job does not have.
        """
        known = _KNOWN.get(_key(self.device_type, self.ranks, self.names))
        if known is not None and _is_alive(known):
            return known
        ranks = torch.tensor(self.ranks, dtype=torch.int, device="cpu")
        if int(ranks.max()) >= dist.get_world_size():
            raise FSDPRuntimeError(
                f"a sharded module that was pickled on a mesh of the ranks {self.ranks} cannot be unpickled in a job "
                f"of {dist.get_world_size()} ranks; use as many, or distributed checkpoints of its state_dict()."
            )
        if self.root is None or self.names is None:
            made = DeviceMesh(self.device_type, ranks, mesh_dim_names=self.names)
        elif self.root.names is None or not set(self.names) <= set(self.root.names):
            raise FSDPRuntimeError(
                f"a sharded module was pickled on a mesh whose dims {self.names} were flattened out of "
                f"{self.root.names}, which cannot be made again in another job; use its state_dict()."
            )
        else:
            root = self.root.find()
            made = root if self.names == self.root.names else root[self.names]
        know(made)
        return made


def _identity(mesh: DeviceMesh) -> tuple[str, Any, tuple[str, ...] | None]:
    names = mesh.mesh_dim_names
    with _torch.unobserved():  # the ranks are there, also while tensors are fake
        return mesh.device_type, mesh.mesh.tolist(), None if names is None else tuple(names)


_Key = tuple[int, str, str, tuple[str, ...] | None]
_KNOWN: weakref.WeakValueDictionary[_Key, DeviceMesh] = weakref.WeakValueDictionary()


def _key(device_type: str, ranks: Any, names: tuple[str, ...] | None) -> _Key:
    """With the rank: ranks may be threads of one process, and each has meshes of its own."""
    return dist.get_rank(), device_type, str(ranks), names


def know(mesh: DeviceMesh) -> None:
    """Remember ``mesh`` as long as somebody uses it. The first of equal ones counts."""
    key = _key(*_identity(mesh))
    known = _KNOWN.get(key)
    if known is None or not _is_alive(known):
        _KNOWN[key] = mesh


def _is_alive(mesh: DeviceMesh) -> bool:
    """Whether the process groups of ``mesh`` exist still."""
    try:
        for dim in range(mesh.ndim):
            dist.get_process_group_ranks(mesh.get_group(dim))
    except Exception:  # of many kinds, by version
        return False
    return True


def _unpickled_mesh(shards: bool, replicates: bool, record: MeshRecord, dims: Any, spmd: MeshRecord | None) -> Any:
    if not dist.is_initialized():
        raise FSDPRuntimeError(
            "unpickling a sharded module needs the process group that it communicates over: call "
            "torch.distributed.init_process_group() first, with as many ranks as when it was pickled."
        )
    spmd_mesh = None if spmd is None else spmd.find()
    info = DataParallelMeshInfo(
        record.find(), int(replicates) if shards else None, 0 if replicates else None, dims, spmd_mesh
    )
    return DataParallelMesh.from_info(info)


def _pickled_mesh(mesh: DataParallelMesh) -> Any:
    spmd = None if mesh.spmd_mesh is None else MeshRecord.of(mesh.spmd_mesh)
    is_cut, is_copied = mesh.shard_group is not None, mesh.replicate_group is not None
    return _unpickled_mesh, (is_cut, is_copied, MeshRecord.of(mesh.device_mesh), mesh.dims, spmd)


def _unpickled_sharding(mesh: DataParallelMesh, partition: Partition, specs: Sequence[Any]) -> Sharding:
    made = [None if spec is None else _torch.make_spec(spec[0].find(), *spec[1:]) for spec in specs]
    return Sharding(mesh, partition, *made)


def _pickled_sharding(sharding: Sharding) -> Any:
    specs = [
        None if spec is None else (MeshRecord.of(spec.mesh), spec.placements, *spec.tensor_meta)
        for spec in (sharding.spec, sharding.unsharded_spec)
    ]
    return _unpickled_sharding, (sharding.mesh, sharding.partition, specs)


copyreg.pickle(DataParallelMesh, _pickled_mesh)  # type: ignore[arg-type]
copyreg.pickle(Sharding, _pickled_sharding)
ON_MESH.append(know)
