"""`step_on_owners`: the step of an optimizer that computes with full matrices, each on the rank that owns it.

This is for optimizers that know nothing of DTensors, such as ``torch.optim.Muon``. While they step, owned parameters,
their gradients and their state are plain tensors. Between steps all are DTensors, which checkpoints rely on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch
from fsdp2.arguments import checked
from fsdp2.core.param import FSDPParam, fsdp_param_of
from fsdp2.core.sharding import dtensor_like
from fsdp2.errors import FSDPNotImplementedError, FSDPValueError
from fsdp2.optim.guard import GUARD
from fsdp2.optim.offload import is_offloaded


@checked()
def step_on_owners(optimizer: Optimizer) -> None:
    """``optimizer.step()`` in which each owned parameter is a plain tensor: full on its owner, of 0 rows elsewhere.

        >>> muon = torch.optim.Muon([p for p in matrices if p.dim() == 2])
        >>> loss.backward()
        >>> fsdp2.step_on_owners(muon)

    No communication: every rank may call it on its own. Other parameters of ``optimizer`` stay as they are. State is
    kept as DTensors with the parameters' placements, so that distributed checkpoints contain it, for any ranks.

    Raises:
        FSDPTypeError: ``optimizer`` is not an optimizer.
        FSDPValueError: it holds no owned parameter.
        FSDPNotImplementedError: the optimizer's state is offloaded. Raised after the step: a state tensor has neither
            the shape of its parameter nor one element (factors of a matrix, for example), and would be lost in a
            checkpoint. Keep such state outside of ``optimizer.state``.
    """
    GUARD.look_through(optimizer)  # now, as it will see plain tensors during the step
    if is_offloaded(optimizer):
        raise FSDPNotImplementedError(
            "step_on_owners got an optimizer whose state is offloaded (by offload_optimizer_state, or by the "
            "offload_policy of its parameters), which it cannot bring to the device; leave the state there."
        )
    stand_ins: dict[nn.Parameter, FSDPParam] = {}
    swapped: dict[torch.Tensor, nn.Parameter] = {}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        owner = fsdp_param_of(parameter)
        if owner is not None and owner.sharding.partition.owner is not None:
            stand_in = swapped[parameter] = _stand_in(owner)  # may raise: nothing is swapped yet
            stand_ins[stand_in] = owner
    if not stand_ins:
        raise FSDPValueError(
            "step_on_owners got an optimizer without owned parameters: call its step(), or give matrices an owner with "
            "fully_shard(..., shard_placement_fn=fsdp2.balanced_owners(...))."
        )
    try:
        for group in optimizer.param_groups:
            group["params"][:] = [swapped.get(parameter, parameter) for parameter in group["params"]]
        for parameter, stand_in in swapped.items():
            if parameter in optimizer.state:
                optimizer.state[stand_in] = _mapped(optimizer.state.pop(parameter), _torch.plain_of)
        # The guard would look through the swapped parameters as new ones; it is told that they are known.
        with GUARD.knows_parameters_of(optimizer):
            optimizer.step()
    finally:
        for group in optimizer.param_groups:
            group["params"][:] = [stand_ins[p].sharded if p in stand_ins else p for p in group["params"]]
        states = {owner: optimizer.state.pop(p) for p, owner in stand_ins.items() if p in optimizer.state}
        for owner, state in states.items():
            optimizer.state[owner.sharded] = _mapped(state, lambda value, owner=owner: _like(value, owner))
    # A step may replace the memory of a parameter, by setting ``.data``: its values belong on the shard buffer.
    for stand_in, owner in stand_ins.items():
        if not _torch.is_fake(stand_in) and stand_in.data_ptr() != owner.local.data_ptr():
            owner.local.copy_(stand_in.detach())
    for owner in states:
        _refuse_other_shapes(owner, optimizer.state[owner.sharded])


def _stand_in(owner: FSDPParam) -> nn.Parameter:
    stand_in = nn.Parameter(owner.local.detach(), requires_grad=owner.requires_grad)
    gradient = owner.sharded.grad
    if gradient is not None:
        if gradient.dtype != stand_in.dtype:
            stand_in.grad_dtype = gradient.dtype
        stand_in.grad = _torch.plain_of(gradient)
    return stand_in


def _mapped(state: Any, change: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: change(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _like(value: torch.Tensor, owner: FSDPParam) -> torch.Tensor:
    """``value`` as a DTensor with the parameter's placements, if it has the shape of this rank's part of it."""
    if value.dim() == 0 or value.shape != owner.local.shape:
        return value
    dtensor = dtensor_like(owner.sharded, value.new_empty(0))
    _torch.set_local(dtensor, value)
    return dtensor


def _refuse_other_shapes(owner: FSDPParam, state: Any) -> None:
    if not isinstance(state, dict):
        return
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() and value.numel() != 1:
            raise FSDPNotImplementedError(
                f"the optimizer's state '{key}' of parameter '{owner.path}' has shape {tuple(value.shape)}, where this "
                f"rank has {tuple(owner.local.shape)} of the parameter. It differs between ranks, and a checkpoint "
                "would keep that of one of them: keep such state outside of optimizer.state, and save it yourself."
            )
