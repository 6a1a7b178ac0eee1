"""What programs read of FSDP1's flat parameters and their handles, of a unit that has none: views, made when asked for.

A view's ``data`` is a copy of this rank's elements, parameter by parameter, brought up to date when it is asked for
again. Set to a tensor of another dtype, or on another device, it converts or moves the unit, whose parameters stay the
ones that an optimizer has. What is not offered raises an AttributeError that says what to use.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.compat.fsdp1.config import HandleShardingStrategy
from fsdp2.compat.fsdp1.layout import FlatParamShardMetadata
from fsdp2.compat.fsdp1.whole import placed_as
from fsdp2.compat.fsdp1.wrapped_layout import unit_of

_INSTEAD = {
    "unshard": "use wrapper.module.unshard()",
    "_full_param_padded": "use fsdp2.full_parameters(wrapper)",
    "_saved_grad_shard": "use parameter.grad.to_local()",
    "_params": "use wrapper.parameters()",
    "_param_infos": "use wrapper.named_parameters()",
    "_shard_param_infos": "use fsdp2.compat.fsdp1.flat_layout(model)",
}


def _refuse(what: str, name: str) -> NoReturn:
    instead = _INSTEAD.get(name, "'Programs written for FSDP1' in the documentation lists what can be read")
    raise AttributeError(f"{what} of fsdp2 has no '{name}', which is private to torch's FSDP1: {instead}.", name=name)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


class FlatParameterView:
    """The sharded parameters of one unit, as if they were one."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._kept: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        _refuse("A flat parameter", name)

    def _parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(self._wrapper._fsdp1_own_parameters().values()))

    @property
    def dtype(self) -> torch.dtype:
        """Of the first parameter; those of a unit may differ."""
        return self._parameters()[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the shards are."""
        return _local(self._parameters()[0]).device

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter does."""
        return any(parameter.requires_grad for parameter in self._parameters())

    @property
    def _fqns(self) -> tuple[str, ...]:
        return tuple(self._wrapper._fsdp1_own_parameters())

    def numel(self) -> int:
        """Of this rank's elements."""
        return sum(_local(parameter).numel() for parameter in self._parameters())

    @property
    def data(self) -> torch.Tensor:
        """(numel,): a copy of this rank's elements, in the promoted dtype of the parameters."""
        return self._local_shard.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take the elements; of another dtype, or on another device, the unit is converted or moved."""
        parameters = self._parameters()
        locals_ = [_local(parameter).detach() for parameter in parameters]
        if value.numel() != self.numel():
            raise fsdp2.FSDPValueError(
                f"the flat parameter of this unit has {self.numel()} elements on this rank, got a tensor of "
                f"{value.numel()}."
            )
        pieces = value.detach().reshape(-1).split([local.numel() for local in locals_])
        if all(local.dtype == value.dtype and local.device == value.device for local in locals_):
            with torch.no_grad():
                for local, piece in zip(locals_, pieces, strict=True):
                    local.copy_(piece.view(local.shape))
            return
        state = self._wrapper._unit._get_fsdp_state()
        state.quiesce()
        for parameter, local, piece in zip(parameters, locals_, pieces, strict=True):
            _become(parameter, _with_local(parameter, piece.clone().reshape(local.shape)))
        state.adopt_replaced()

    @property
    def grad(self) -> torch.Tensor | None:
        """(numel,): a copy of this rank's elements of the gradients, zeros where there is none; None without any."""
        parameters = self._parameters()
        if all(parameter.grad is None for parameter in parameters):
            return None
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        return torch.cat([_local(each).detach().reshape(-1) for each in found])

    @property
    def _local_shard(self) -> torch.Tensor:
        # One tensor, of which `data` is another view each time: verl compares where they lie, and that they are two.
        elements = torch.cat([_local(parameter).detach().reshape(-1) for parameter in self._parameters()])
        kept = self._kept
        if kept is None or (kept.dtype, kept.device, kept.shape) != (elements.dtype, elements.device, elements.shape):
            self._kept = elements
            return elements
        return kept.copy_(elements)

    @_local_shard.setter
    def _local_shard(self, value: torch.Tensor) -> None:
        self.data = value


def _become(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Let ``parameter``, which stays the same object, have the value of ``other``, and its gradient likewise."""
    gradient, parameter.grad = parameter.grad, None
    torch.utils.swap_tensors(parameter, other)
    if gradient is not None:
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def _with_local(parameter: nn.Parameter, local: torch.Tensor) -> nn.Parameter:
    """A parameter like ``parameter``, in the dtype and place of ``local``, its values on this rank."""
    return nn.Parameter(placed_as(parameter, local), requires_grad=parameter.requires_grad)


class FlatParamHandleView:
    """What FSDP1 calls the handle of a unit."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._orig_param_dtype: Any = None  # set by programs that convert a unit; the parameters say it themselves

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse("A handle", name)

    @property
    def flat_param(self) -> FlatParameterView:
        """Its parameters, as if they were one."""
        return FlatParameterView(self._wrapper)

    @property
    def _sharding_strategy(self) -> Any:
        return HandleShardingStrategy[self._wrapper.sharding_strategy.name]

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether anything is sharded."""
        return bool(self._wrapper._fsdp1_is_sharded)

    def shard_metadata(self) -> FlatParamShardMetadata:
        """What of the unit this rank would hold under torch's FSDP1."""
        unit = unit_of(self._wrapper)
        assert unit is not None, "a handle has parameters"
        return unit.shard_metadata(self._wrapper.rank if self._wrapper._fsdp1_is_sharded else 0)

    @property
    def _offload_params(self) -> bool:
        return bool(self._wrapper.cpu_offload.offload_params)

    def flat_param_to(self, device: torch.device | str, non_blocking: bool = False) -> None:
        """Move the unit's shards."""
        flat = self.flat_param
        to_host = torch.device(device).type == "cpu"  # where the values are read at once
        flat.data = flat.data.to(device, non_blocking=non_blocking and not to_host)

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unit's unsharded parameters."""
        if free_unsharded_flat_param:
            self._wrapper._unit.reshard()
