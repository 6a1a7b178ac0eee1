"""`load_state_dict` of whole tensors, or of DTensors that lie otherwise: each rank takes its own rows of them.

torch refuses both. Every rank passes the same, as of `set_model_state_dict(full_state_dict=True)`; where only one rank
has the tensors, `fsdp2.checkpoint.load_full` sends the rows.
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
    """Put this rank's rows in the place of what is whole, of the sharded parameters of ``module`` itself.

    A hook of `nn.Module.load_state_dict`, whose copy of the user's dict it changes. Values of another shape are left to
    torch, which names them all. Collective where a value is a DTensor that lies otherwise.
    """
    for each in module.modules():
        state = each.__dict__.get(STATE)
        if state is not None:
            state.quiesce()  # or refuse to, before anything is loaded
    for name, parameter in module._parameters.items():
        param = None if parameter is None else fsdp_param_of(parameter)  # none of a whole one, registered for a time
        value = state_dict.get(f"{prefix}{name}")
        if param is not None and isinstance(value, torch.Tensor) and _is_otherwise(value, param):
            state_dict[f"{prefix}{name}"] = _rows(value, param, copies=bool(local_metadata.get(_ASSIGNS)))


def refuse_of_another_rank(value: torch.Tensor, name: str) -> None:
    """Refuse a DTensor that another rank has pickled: what lies under it are that rank's rows, and not this one's.

    Raises:
        FSDPValueError: it is one.
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
    """Whether ``value`` is of the shape of ``param``, and does not lie as it does."""
    refuse_of_another_rank(value, param.path)
    sharded = param.sharded
    if value.shape != sharded.shape:
        return False
    if not isinstance(value, DTensor):
        return True
    spec = _torch.spec_of(sharded)
    return value.device_mesh != spec.mesh or tuple(value.placements) != tuple(spec.placements)


def _rows(value: torch.Tensor, param: FSDPParam, *, copies: bool) -> DTensor:
    """This rank's part of ``value``; on the memory of ``value``, unless it ``copies``."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
    mesh, partition, spec = param.sharding.mesh, param.sharding.partition, param.sharding.unsharded_spec
    if spec is not None:  # tensor parallelism has cut it first
        whole = _torch.local_of(distribute_tensor(whole, spec.mesh, spec.placements, src_data_rank=None))
    rows = local_shard(whole, partition, partition.rows(mesh.shard_size), mesh.shard_rank)
    if copies:
        rows = rows.to(rows.device if param.local.is_meta else param.local.device, copy=True)
    return dtensor_like(param.sharded, rows)
