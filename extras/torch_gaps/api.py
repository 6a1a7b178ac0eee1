"""The handle that cases are written against: public names, and options that an implementation may or may not have.

A name or an argument that is missing is a `NoSuchOption`, not an error. For wishes that no implementation grants yet,
the cases use the names that fsdp2 would give them: change a case when fsdp2 gets the option under another name. Where
implementations express one wish differently, the handle has a method for it, the only place that knows which one runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fsdp2 import checkpoint

_MODULES = {
    "torch": (
        "torch.distributed.fsdp",
        "torch.distributed.fsdp._fully_shard",
        "torch.distributed.fsdp._fully_shard._fsdp_api",
        "torch.distributed.fsdp._fully_shard._fsdp_common",
    ),
    "fsdp2": ("fsdp2",),
}
IMPLEMENTATIONS = tuple(_MODULES)


class NoSuchOption(Exception):
    """The implementation has no function, method or argument that says what the case wants."""


class Api:
    """The public names of one implementation, as attributes: ``api.fully_shard``.

    Args:
        name: one of `IMPLEMENTATIONS`.

    Raises:
        ValueError: for another name.
    """

    def __init__(self, name: str) -> None:
        if name not in _MODULES:
            raise ValueError(f"unknown implementation {name!r}: expected one of {', '.join(_MODULES)}")
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return self.find(name, otherwise=f"no `{name}`")

    def find(self, name: str, *, otherwise: str) -> Any:
        """The public object of that name; ``otherwise`` says what torch has instead, if there is none."""
        for module_name in _MODULES[self.name]:
            module = importlib.import_module(module_name)
            if hasattr(module, name):
                return getattr(module, name)
        raise NoSuchOption(otherwise)

    def options(self, name: str, **arguments: Any) -> Any:
        """``api.name(**arguments)``, where it takes arguments of these names."""
        function = getattr(self, name)
        self.require(name, *arguments)
        return function(**arguments)

    def require(self, name: str, *arguments: str) -> None:
        """Raises `NoSuchOption` unless the function or class of that name takes all of these arguments."""
        parameters = inspect.signature(getattr(self, name)).parameters
        for argument in arguments:
            if argument not in parameters:
                raise NoSuchOption(f"`{name}` has no argument `{argument}`")

    def method(self, module: nn.Module, name: str, *arguments: str) -> Callable[..., Any]:
        """A method that sharding adds to ``module``, where it exists and takes arguments of these names."""
        if not hasattr(self.FSDPModule, name):
            raise NoSuchOption(f"`FSDPModule` has no `{name}`")
        self._require_of_method(name, arguments)
        return getattr(module, name)  # type: ignore[no-any-return]

    def _require_of_method(self, name: str, arguments: tuple[str, ...]) -> None:
        parameters = inspect.signature(getattr(self.FSDPModule, name)).parameters
        for argument in arguments:
            if argument not in parameters:
                raise NoSuchOption(f"`FSDPModule.{name}` has no argument `{argument}`")

    def gradient_sum(self, model: nn.Module, divide_by: Any = 1.0) -> None:
        """Gradients of all groups in ``model`` are summed over ranks, then divided by ``divide_by``.

        With torch on gloo this takes two setters on each sharded module: its divide factor alone is NCCL's.
        """
        for module in model.modules():
            if isinstance(module, self.FSDPModule):
                module.set_gradient_divide_factor(divide_by)
                module.set_force_sum_reduction_for_comms(True)

    def gradient_sum_by_one_call(self, model: nn.Module) -> None:
        """The same without a divisor, by one call on ``model``."""
        if self.name == "fsdp2":
            self.method(model, "set_gradient_reduction", "recurse")("sum")
        else:
            self.method(model, "set_gradient_divide_factor", "recurse")(1.0, recurse=True)

    def without_communication(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Backward in it exchanges nothing, and the next one outside reduces the sum."""
        if self.name == "fsdp2":
            return self.accumulate(model, last=False)  # type: ignore[no-any-return]
        return self.method(model, "no_sync")()  # type: ignore[no-any-return]

    def whole_parameters(self, model: nn.Module) -> AbstractContextManager[Any]:
        """All parameters of ``model`` are whole in it, and what is written to them stays."""
        if self.name == "fsdp2":
            return self.full_parameters(model, writeback=True)  # type: ignore[no-any-return]
        summon = self.find("summon_full_params", otherwise="`unshard()` is of one module, and writes nothing back")
        return summon(model, writeback=True)  # type: ignore[no-any-return]

    def shard_the_first_rank_s_values(self, model: nn.Module) -> None:
        """``fully_shard(model)``, of the values that rank 0 has."""
        if self.name == "fsdp2":
            self.broadcast_parameters(model)
            self.fully_shard(model)
            return
        self.require("fully_shard", "sync_module_states")
        self.fully_shard(model, sync_module_states=True)

    def precision_per_parameter(self, model: nn.Module, choose: Callable[[str, nn.Parameter], Any]) -> None:
        """``fully_shard(model)`` with ``choose(fqn, parameter)`` as the policy of each parameter."""
        if self.name == "torch":
            raise NoSuchOption("`mp_policy` is one policy for the group")
        try:
            self.fully_shard(model, mp_policy=choose)
        except (TypeError, AttributeError) as error:
            raise NoSuchOption("`mp_policy` is one policy for the group") from error

    def casting_inputs(self, names: tuple[str, ...], dtype: torch.dtype) -> Any:
        """A policy that casts forward inputs of these names to ``dtype`` and no others."""
        fields = {field.name: field.type for field in dataclasses.fields(self.MixedPrecisionPolicy)}
        if fields["cast_forward_inputs"] in (bool, "bool"):
            raise NoSuchOption("`cast_forward_inputs` is a bool: all inputs or none")
        return self.MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=names)

    def save_checkpoint(self, path: Path, model: nn.Module, optimizer: Any, place: int | None = None) -> None:
        """All of it, by the implementation's way; ``place`` is this rank's own."""
        if self.name == "fsdp2":
            per_rank = None if place is None else {"place": place}
            checkpoint.save(path, model, optimizer, per_rank=per_rank)
        else:
            dcp.save(self._state(model, optimizer, place), checkpoint_id=path)

    def load_checkpoint(self, path: Path, model: nn.Module, optimizer: Any, place: int | None = None) -> Any:
        """The same in; returns what was saved as ``place``."""
        if self.name == "fsdp2":
            per_rank = None if place is None else {"place": place}
            checkpoint.load(path, model, optimizer, per_rank=per_rank)
            return None if per_rank is None else per_rank["place"]
        state = self._state(model, optimizer, place)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return state.get("place")

    def _state(self, model: nn.Module, optimizer: Any, place: int | None) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        if optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        return state if place is None else {**state, "place": place}

    def load_full(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """`fsdp2.checkpoint.load_full`."""
        checkpoint.load_full(model, state)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, **arguments: Any) -> Any:
        """The implementation's own, where it has one, else `torch.nn.utils.clip_grad_norm_`."""
        try:
            clip = self.find("clip_grad_norm_", otherwise="")
        except NoSuchOption:
            clip = torch.nn.utils.clip_grad_norm_
        return clip(parameters, max_norm, **arguments)
