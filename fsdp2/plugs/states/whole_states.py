"""`load_state_dict` of full tensors, or of DTensors with another sharding: each rank takes its own rows of them.

torch refuses both. Every rank passes the same values, as with `set_model_state_dict(full_state_dict=True)`; where only
one rank has the tensors, `fsdp2.checkpoint.load_full` sends the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2 import _torch
from fsdp2.core.hooks import STATE
from fsdp2.core.param import FSDPParam, fsdp_param_of
from fsdp2.core.sharding import dtensor_like, local_shard
from fsdp2.errors import FSDPValueError

_ASSIGNS = "assign_to_params_buffers"


def take_rows(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
) -> None:
    """Replace full values of the sharded parameters of ``module`` itself by this rank's rows of them.

    This is a hook of `nn.Module.load_state_dict`, and changes its copy of the user's dict. Values of another shape are
    left to torch, which names them all. Collective where a value is a DTensor with another mesh or placements.
    """
    for each in module.modules():
        state = each.__dict__.get(STATE)
        if state is not None:
            state.quiesce()  # it may refuse: then nothing has been loaded yet
    for name, parameter in module._parameters.items():
        # A full parameter that is registered for a time (`full_parameters`) has no `FSDPParam`, and loads as any.
        param = None if parameter is None else fsdp_param_of(parameter)
        value = state_dict.get(f"{prefix}{name}")
        if param is not None and isinstance(value, torch.Tensor) and _is_otherwise(value, param):
            state_dict[f"{prefix}{name}"] = _rows(value, param, copies=bool(local_metadata.get(_ASSIGNS)))


def refuse_of_another_rank(value: torch.Tensor, name: str) -> None:
    """Refuse a DTensor that another rank has pickled: its local tensor has that rank's rows, not this one's.

    Raises:
        FSDPValueError: ``value`` is such a DTensor.
    """
    if not isinstance(value, DTensor) or not dist.is_initialized():
        return
    mesh = value.device_mesh
    known, here = mesh.get_coordinate(), (mesh.mesh == dist.get_rank()).nonzero()
    if known is None or not len(here) or tuple(known) == tuple(here[0].tolist()):
        return
    raise FSDPValueError(
        f"'{name}' of the state dict is a DTensor that rank {int(mesh.mesh[tuple(known)])} has saved, with the rows of "
        f"that rank; those of rank {dist.get_rank()} are not in the file. What one rank writes by torch.save() of a "
        "sharded model's state dict is a part of it. Save on all ranks by fsdp2.checkpoint.save(), or let one rank "
        "save inside of fsdp2.full_parameters(model)."
    )


def _is_otherwise(value: torch.Tensor, param: FSDPParam) -> bool:
    """Whether ``value`` has the shape of ``param``, but another mesh or placements, or is no DTensor."""
    refuse_of_another_rank(value, param.path)
    sharded = param.sharded
    if value.shape != sharded.shape:
        return False
    if not isinstance(value, DTensor):
        return True
    spec = _torch.spec_of(sharded)
    return value.device_mesh != spec.mesh or tuple(value.placements) != tuple(spec.placements)


def _rows(value: torch.Tensor, param: FSDPParam, *, copies: bool) -> DTensor:
    """This rank's rows of ``value`` as a DTensor: on the memory of ``value``, unless it ``copies``."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
    mesh, partition, spec = param.sharding.mesh, param.sharding.partition, param.sharding.unsharded_spec
    if spec is not None:  # tensor parallelism has cut it first
        whole = _torch.local_of(distribute_tensor(whole, spec.mesh, spec.placements, src_data_rank=None))
    rows = local_shard(whole, partition, partition.rows(mesh.shard_size), mesh.shard_rank)
    if copies:
        rows = rows.to(rows.device if param.local.is_meta else param.local.device, copy=True)
    return dtensor_like(param.sharded, rows)
