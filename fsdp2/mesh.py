"""From a `DeviceMesh` to the process group, rank and device that a group of parameters is sharded over."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.common import FSDPRuntimeError, FSDPTypeError, FSDPValueError


@dataclass(frozen=True, slots=True)
class ShardMesh:
    """The mesh axis over which parameters are sharded.

    Attributes:
        device_mesh: one-dimensional.
        group: the process group of that axis.
        world_size: ranks in it.
        rank: this process's place in it.
        device: where this process's shards live.
    """

    device_mesh: DeviceMesh
    group: dist.ProcessGroup
    world_size: int
    rank: int
    device: torch.device

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> ShardMesh:
        """Validate ``mesh`` and read it.

        Raises:
            FSDPTypeError: not a `DeviceMesh`.
            FSDPValueError: more than one dim, a device type that this process does not have, or a mesh that
                does not contain this rank.
        """
        if not isinstance(mesh, DeviceMesh):
            raise FSDPTypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}; see init_device_mesh().")
        if mesh.ndim != 1:
            raise FSDPValueError(
                f"fully_shard supports a mesh of 1 dim (sharding), got {mesh.ndim} dims {mesh.mesh_dim_names}; "
                "pass one dim of it, e.g. mesh['shard']."
            )
        if mesh.get_coordinate() is None:
            raise FSDPValueError(
                f"rank {dist.get_rank()} is not part of {mesh}; call fully_shard only on the ranks of its mesh."
            )
        return cls(mesh, mesh.get_group(), mesh.size(), mesh.get_local_rank(), device_of(mesh))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this process in ``mesh``: the current one of its type.

    Raises:
        FSDPValueError: there is no such device here.
    """
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, mesh.device_type, None)
    if module is None or not module.is_available():
        raise FSDPValueError(
            f"the mesh is of device type '{mesh.device_type}', which is not available in this process; "
            "build the mesh with the device type of the processes' own devices, e.g. init_device_mesh('cpu', ...)."
        )
    return torch.device(mesh.device_type, module.current_device())


def default_mesh() -> DeviceMesh:
    """One dim over all ranks, on the current accelerator if there is one, else on CPU.

    Under a launcher such as ``torchrun`` the default process group is initialized from the environment if the program
    has not done so. Collective over all ranks.

    Raises:
        FSDPRuntimeError: there is no process group and no launcher's environment to make one from.
    """
    if not dist.is_initialized():
        if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            raise FSDPRuntimeError(
                "fully_shard needs a process group, and none is initialized: call "
                "torch.distributed.init_process_group() first, or start the program with torchrun."
            )
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))
