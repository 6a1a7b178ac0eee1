"""The `fully_shard` calls of a drawn program: its meshes, its policies, and which unit reduces which parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import (
    BlockShard,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Owned,
    RowBlocks,
    balanced_owners,
    fully_shard,
)
from fsdp2.plugs.parameters.owned import noted_owner
from tests.multi_rank.combinations.helpers.drawn.model import OWN, Drawn
from tests.multi_rank.combinations.helpers.drawn.programs import Program, UnitDraw


def _matrices_on_host(name: str, parameter: nn.Parameter) -> CPUOffloadPolicy | None:
    """Units have both kinds of parameters, in a group each."""
    return CPUOffloadPolicy() if parameter.dim() > 1 else None


_OFFLOADING: dict[str, Any] = {
    "no": OffloadPolicy(),
    "all": CPUOffloadPolicy(),
    "some": _matrices_on_host,
    "gradients": CPUOffloadPolicy(parameters=False, gradients=True),
    "state": CPUOffloadPolicy(parameters=False, optimizer_state=True),
    "both": CPUOffloadPolicy(parameters=False, gradients=True, optimizer_state=True),
}


class Builder:
    """Shards the model of a program, as often as it is asked to.

    Attributes:
        mesh: The whole mesh; None for a mesh of one dim.
        data_size, data_rank: Of this rank among the data-parallel ones.
        unit_of: The unit that reduces each parameter: the first that holds it.
        modules_of: The names of the modules for which that unit is gathered; none if the root's is among them.
    """

    def __init__(self, program: Program, model: Drawn) -> None:
        self.program = program
        self.mesh, self._data_mesh, self._dims, tensor_size = _meshes(program, model)
        self.data_size = dist.get_world_size() // tensor_size
        self.data_rank = dist.get_rank() // tensor_size
        self.unit_of, self.modules_of = _owners(program, model)
        self._placement = None if program.placement == "default" else _placement(program)
        self._policies = {is_root: _policy(program, is_root) for is_root in (True, False)}

    def modules(self, model: nn.Module) -> list[list[Any]]:
        """The modules of each unit."""
        return [[model.get_submodule(name) for name in unit.names] for unit in self.program.units]

    def wrap(self, model: Drawn) -> None:
        """All calls of `fully_shard`, always with equal arguments. Called on all ranks."""
        program = self.program
        if program.placement == "balanced" and not isinstance(model, FSDPModule):
            mesh = self._data_mesh or init_device_mesh("cpu", (dist.get_world_size(),))
            assert balanced_owners(model, mesh, units=self.modules(model)) is self._placement
        for unit, modules in zip(program.units, self.modules(model), strict=True):
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=self._data_mesh,
                dp_mesh_dims=self._dims,
                reshard_after_forward=unit.reshard,
                shard_placement_fn=None if unit.strategy == "replicate" else self._placement,
                mp_policy=self._policies[unit.names == ("",)],
                offload_policy=_OFFLOADING[program.offload],
                strategy=unit.strategy,  # type: ignore[arg-type]
                ignored_params={model.own} if model.own is not None else None,
            )


def _meshes(
    program: Program, model: Drawn
) -> tuple[DeviceMesh | None, DeviceMesh | None, DataParallelMeshDims | None, int]:
    """The whole mesh, the one to shard over, its dims, and the tensor parallel size."""
    if program.mesh == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return mesh, mesh, None, 1
    if program.mesh == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan: dict[str, Any] = {"feed.up": ColwiseParallel(), "feed.down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        return mesh, mesh["dp"], None, 2
    if program.mesh == "dims":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = program.dims.get("tp")
        distribute_module(model, mesh, partition_fn=_partition(tensor))
        dims = {key: value for key, value in program.dims.items() if key != "tp"}
        return mesh, mesh, DataParallelMeshDims(**dims), 2 if tensor else 1
    return None, None, None, 1


def _partition(tensor: str | None) -> Callable[[str, nn.Module, DeviceMesh], None]:
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            cut: Any = Replicate()
            if name.endswith("feed.up"):
                cut = Shard(0)
            elif name.endswith("feed.down") and key == "weight":
                cut = Shard(1)
            placements = [cut if axis == tensor else Replicate() for axis in mesh.mesh_dim_names or ()]
            if parameter not in made:
                distributed = distribute_tensor(parameter.detach(), mesh, placements)
                made[parameter] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
            module.register_parameter(key, made[parameter])

    return partition


def _owners(program: Program, model: Drawn) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    unit_of: dict[str, int] = {}
    modules_of_unit: list[set[str]] = [set(unit.names) for unit in program.units]
    managed: set[nn.Module] = set()
    for index, unit in enumerate(program.units):
        for name, parameter in model.named_parameters():
            if name == OWN or not _holds(model, unit, parameter, managed):
                continue
            owner = unit_of.setdefault(name, index)
            modules_of_unit[owner].update(unit.names)
        managed.update(module for name in unit.names for module in model.get_submodule(name).modules())
    modules = {name: modules_of_unit[index] for name, index in unit_of.items()}
    return unit_of, {name: () if "" in names else tuple(sorted(names)) for name, names in modules.items()}


def _holds(model: Drawn, unit: UnitDraw, parameter: nn.Parameter, managed: set[nn.Module]) -> bool:
    """Whether a module of this unit, and of none before it, has the parameter."""
    modules = {module for name in unit.names for module in model.get_submodule(name).modules()} - managed
    return any(parameter is each for module in modules for each in module.parameters(recurse=False))


def _placement(program: Program) -> Callable[[nn.Parameter], Shard | RowBlocks | BlockShard | Owned | None]:
    kind, shards = program.placement, _shards(program)
    if kind == "balanced":
        return noted_owner

    def placement(parameter: nn.Parameter) -> Shard | RowBlocks | BlockShard | Owned | None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() == 0:
            return None
        if kind == "owned" and parameter.dim() > 1:  # what tensor parallelism cuts, no rank can own
            return Owned(sum(parameter.shape) % shards) if local.shape == parameter.shape else None
        if kind in ("owned", "row blocks"):  # nor can rows be kept together that it cuts apart
            return RowBlocks(2 if parameter.dim() == 1 else 3) if local.shape[0] == parameter.shape[0] else None
        if kind == "merged rows":  # of what tensor parallelism has not cut, and lies in order
            merges = math.prod(local.shape[1:]) > 1 and local.shape == parameter.shape and local.is_contiguous()
            return BlockShard.split_leading(parameter.shape, 2) if merges else None
        if kind == "zero" or parameter.dim() == 1:
            return Shard(0)
        if kind == "uneven":
            return Shard(parameter.dim() - 1)
        if local.shape[1] % dist.get_world_size() or (kind == "mixed" and local.shape[0] <= local.shape[1]):
            return None
        return Shard(1)

    return placement


def _shards(program: Program) -> int:
    """Into how many parts a parameter is cut by data parallelism."""
    if program.mesh == "dims":
        return 2 ** len(program.dims.get("shard", ()))  # "a", "b" or both, of two ranks each
    return 4 if program.mesh == "1d_4" else 2


def _policy(program: Program, is_root: bool) -> Any:
    """The ``mp_policy`` of a unit."""

    def policy(fqn: str, parameter: nn.Parameter | None = None) -> MixedPrecisionPolicy:
        param_dtype, reduce_dtype = (dtype_of(name) for name in program.dtypes_of(fqn))
        return MixedPrecisionPolicy(
            param_dtype,
            reduce_dtype,
            dtype_of(program.output_dtype) if is_root else None,
            cast_forward_inputs=("x",) if program.cast == "named" else program.cast == "all",
            buffer_dtype=dtype_of(program.buffer_dtype),
        )

    return policy if program.by_parameter else policy("")


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype of this name."""
    return getattr(torch, name) if name else None
