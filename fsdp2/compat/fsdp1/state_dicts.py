"""The state dicts of a wrapped module: hooks that change what the module's own ``state_dict`` holds, and how it loads.

A wrapper's hook handles the parameters of its own unit: those of nested wrappers were handled by theirs, which ran
before. Whole parameters are gathered for all of them at once, by the first that asks: a state dict keeps them anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like

import fsdp2
from fsdp2.compat.fsdp1 import local_state_dicts, whole
from fsdp2.compat.fsdp1.config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp2.compat.fsdp1.names import WRAPPED, cleaned

_CONFIGS = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def settings_of(state_dict_type: Any, state_dict_config: Any, optim_state_dict_config: Any) -> Any:
    """The settings of a type of state dict, with the default configurations where none is given.

    Raises:
        FSDPRuntimeError: a configuration is of another type of state dict.
    """
    found = []
    configs = {"state_dict_config": state_dict_config, "optim_state_dict_config": optim_state_dict_config}
    for (name, given), wanted in zip(configs.items(), _CONFIGS[state_dict_type], strict=True):
        if given is not None and type(given) is not wanted:
            raise fsdp2.FSDPRuntimeError(
                f"Expected {name} of type {wanted.__name__} for {state_dict_type.name}, got a {type(given).__name__}."
            )
        found.append(wanted() if given is None else given)
    return StateDictSettings(state_dict_type, *found)


_EXTRA_STATE = "_extra_state"
"""With which the names end of what modules' ``get_extra_state()`` returns: every rank has its own."""


def after_state_dict(
    wrapper: Any, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Hook: names without the wrapper's, and values as the type of state dict says."""
    inner = f"{prefix}{WRAPPED}."
    settings = wrapper._fsdp1_settings
    kind, config = settings.state_dict_type, settings.state_dict_config
    offload, is_full = config.offload_to_cpu, kind is StateDictType.FULL_STATE_DICT
    is_local = kind is StateDictType.LOCAL_STATE_DICT and wrapper._fsdp1_is_sharded
    is_dropped = is_full and config.rank0_only and not wrapper._fsdp1_ranks.is_first
    is_whole = is_full or not wrapper._fsdp1_is_sharded
    same = _first_names(wrapper, inner)
    buffers = {f"{inner}{name}": dtype for name, dtype in wrapper._fsdp1_buffer_dtypes().items()}
    first_only = is_full and config.rank0_only and not _is_cut_further(wrapper, wrapper._fsdp1_own_tensors())
    below = tuple(f"{name}." for name, _ in wrapper._fsdp1_named_wrappers())  # their hooks have seen to what is theirs
    own_to_rank = _own_to_rank(wrapper)
    wholes = _whole_parameters(wrapper, offload=offload, first_only=first_only) if is_whole else {}
    done: dict[str, Any] = {}
    for key in [key for key in state_dict if key.startswith(inner)]:
        value = state_dict.pop(key)
        name = key.removeprefix(inner)
        is_kept = name.startswith(below) or name.endswith(_EXTRA_STATE) or own_to_rank(name)
        drops = is_dropped and not is_kept
        if isinstance(value, torch.Tensor):
            first = same.get(key, key)
            if first in done:
                value = done[first]
            else:
                if key in buffers:
                    value = value.to(buffers[key])
                value = wholes.get(name, value)
                is_own = not name.startswith(below)
                if isinstance(value, DTensor) and is_whole and not first_only and is_own:
                    value = whole.whole(value, offload=offload)
                elif offload and not drops:
                    value = value.cpu()
                done[first] = None if drops else value
                value = done[first]
        if not drops:
            state_dict[prefix + name] = value
    if is_local:
        keys = {name: f"{prefix}{name}" for name in wrapper._fsdp1_own_parameters() if f"{prefix}{name}" in state_dict}
        values = {name: state_dict.pop(key) for name, key in keys.items()}
        local = local_state_dicts.written(wrapper, values, offload=offload)
        state_dict.update({f"{prefix}{name}": value for name, value in local.items()})


def _own_to_rank(wrapper: Any) -> Callable[[str], bool]:
    """Whether a name, below what is wrapped, is of something ignored, of which ranks may have different ones."""
    params = {name for name, each in wrapper._fsdp1_own_tensors().items() if each in wrapper._fsdp1_ignored.params}
    named = cleaned(wrapper._fsdp_wrapped_module.named_modules(remove_duplicate=False))
    modules = tuple(f"{name}." if name else "" for name, each in named if each in wrapper._fsdp1_ignored.modules)
    return lambda name: name in params or name.startswith(modules)


def _is_cut_further(wrapper: Any, own: Mapping[str, torch.Tensor]) -> bool:
    """Whether whole parameters of ``wrapper``'s unit are DTensors still, which all ranks have to gather.

    Of tensor parallelism; or of the user's own, as ignored parameters and buffers.
    """
    gathered = {id(each) for each in wrapper._fsdp1_own_parameters().values()}
    further = (each for each in own.values() if isinstance(each, DTensor))
    return any(id(each) not in gathered or each.device_mesh.ndim > wrapper._device_mesh.ndim for each in further)


def _whole_parameters(wrapper: Any, *, offload: bool, first_only: bool) -> dict[str, torch.Tensor]:
    """The sharded parameters of the wrapper's unit, whole (of tensor parallelism, DTensors of that), in own memory.

    With ``first_only`` the other ranks get nothing. Collective.
    """
    gathering = _GATHERING.get()
    if gathering is None:  # a part of the tree, whose state_dict() was not called
        gathering = _Gathering([wrapper])
    return gathering.of(wrapper, offload=offload, first_only=first_only)


class _Gathering:
    """Whole parameters for one call of ``state_dict()``: the first unit that asks gathers those of all like it.

    Args:
        units: the wrappers whose hooks are going to ask.
    """

    def __init__(self, units: Iterable[Any]) -> None:
        self._waiting = list(units)
        self._kinds = {each: _kind_of(each) for each in self._waiting}
        self._found: dict[Any, dict[str, torch.Tensor]] = {}

    def of(self, unit: Any, *, offload: bool, first_only: bool) -> dict[str, torch.Tensor]:
        """Those of ``unit``, by all of their names there. Each unit once. Collective."""
        if unit not in self._found:
            self._gather(unit, offload=offload, first_only=first_only)
        return self._found.pop(unit)

    def _gather(self, unit: Any, *, offload: bool, first_only: bool) -> None:
        of_unit = self._kinds[unit] if unit in self._kinds else _kind_of(unit)
        alike = [each for each in self._waiting if self._kinds[each] == of_unit]
        if unit not in alike:  # it was asked for before, or is none of those below
            alike = [unit]
        self._waiting = [each for each in self._waiting if each not in alike]
        own = {each: each._fsdp1_own_parameters().items() for each in alike}
        sharded = {each: [name for name, p in items if isinstance(p, DTensor)] for each, items in own.items()}
        modules = [each._unit for each, names in sharded.items() if names]
        with fsdp2.full_parameters(
            modules, recurse=False, writeback=False, rank0_only=first_only, offload_to_cpu=offload
        ):
            for each, names in sharded.items():
                whole_ones = each._fsdp1_own_parameters() if names else {}
                self._found[each] = {name: whole_ones[name].detach() for name in names}


def _kind_of(unit: Any) -> tuple[Any, ...]:
    """Units of one kind are gathered for the same ranks."""
    return unit._fsdp1_settings, unit._fsdp1_is_sharded, _is_cut_further(unit, unit._fsdp1_own_tensors())


_GATHERING: ContextVar[_Gathering | None] = ContextVar("_GATHERING", default=None)


@contextmanager
def gathering_below(wrapper: Any) -> Iterator[None]:
    """A call of ``wrapper.state_dict()``: the hooks of all wrappers below run inside, the innermost first."""
    is_full = wrapper._fsdp1_settings.state_dict_type is StateDictType.FULL_STATE_DICT
    is_whole = is_full or not wrapper._fsdp1_is_sharded
    if not is_whole or _GATHERING.get() is not None:
        yield
        return
    token = _GATHERING.set(_Gathering(type(wrapper).fsdp_modules(wrapper)))
    try:
        yield
    finally:
        _GATHERING.reset(token)


def _first_names(wrapper: Any, inner: str) -> dict[str, str]:
    """The first name of each parameter and buffer, by its names: ties are gathered once, and stay one tensor."""
    first: dict[int, str] = {}
    module = wrapper._fsdp_wrapped_module
    named: Iterable[tuple[str, torch.Tensor]] = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {f"{inner}{name}": first.setdefault(id(tensor), f"{inner}{name}") for name, tensor in cleaned(named)}


_PLACED = "_fsdp1_placed"
"""A key of what a wrapper above has placed already; the wrapper that it is for takes it out."""


def before_load(
    wrapper: Any, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
) -> None:
    """Hook: names with the wrapper's; values placed as parameters are, by the outermost wrapper for all below."""
    is_placed = state_dict.pop(f"{prefix}{_PLACED}", False)
    inner = f"{prefix}{WRAPPED}."
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
        state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)
    if is_placed:
        return
    _place(wrapper, state_dict, inner, prefix)
    for name, each in wrapper._fsdp1_named_wrappers():
        _place(each, state_dict, f"{inner}{name}.", f"{prefix}{name}.")
        state_dict[f"{inner}{name}.{_PLACED}"] = True


def _place(wrapper: Any, state_dict: MutableMapping[str, Any], inner: str, prefix: str) -> None:
    """Place what is of the wrapper's unit, whose keys begin with ``inner``, as its parameters are."""
    own, shown = wrapper._fsdp1_own_tensors(), prefix.replace(f"{WRAPPED}.", "")
    settings = wrapper._fsdp1_settings
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        local_state_dicts.read(wrapper, state_dict, inner, shown)
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT and settings.state_dict_config.rank0_only:
        _from_first_rank(wrapper, state_dict, inner, shown)
    for name, tensor in own.items():
        key = f"{inner}{name}"
        value = state_dict.get(key)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) and is_tensor_like(value):
            value = state_dict[key] = torch.detach(value)  # Lightning's, which reads its values when torch asks
        if whole.is_sharded_tensor(value):
            state_dict[key] = whole.from_sharded_tensor(value, tensor, f"{shown}{name}")
        elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            if isinstance(tensor, DTensor) and value.shape != tensor.shape:
                raise fsdp2.FSDPRuntimeError(
                    f"'{shown}{name}' is to be loaded with the shape {list(value.shape)}, and has {list(tensor.shape)}."
                )
            state_dict[key] = whole.like(value, tensor)


def _from_first_rank(wrapper: Any, state_dict: MutableMapping[str, Any], inner: str, shown: str) -> None:
    """Let all ranks have what the first has of this unit. Collective.

    Of what is ignored each rank keeps what it has in ``state_dict``: only where it has nothing it gets the first's.
    DTensors, which PEFT makes of adapters for a model of DTensors, must be there on all ranks already.

    Raises:
        FSDPRuntimeError: what the first rank has is of another shape, or no tensor, on all ranks; or the first rank has
            a DTensor that this one lacks.
    """
    own, ranks, own_to_rank = wrapper._fsdp1_own_tensors(), wrapper._fsdp1_ranks, _own_to_rank(wrapper)
    given = {name: state_dict[f"{inner}{name}"] for name in own if f"{inner}{name}" in state_dict}
    is_sharded = {name: isinstance(value, DTensor) for name, value in given.items()}
    ignored = {name: own[name].dtype for name in given if own_to_rank(name) and not is_sharded[name]}
    shapes = {name: _shape_of(value) for name, value in given.items()}
    forms = {name: (is_sharded[name], shape) for name, shape in shapes.items() if not own_to_rank(name)}
    forms, ignored_forms = ranks.objects((forms, {name: (shapes[name], dtype) for name, dtype in ignored.items()}))
    for name, (_, shape) in forms.items():
        if name in own and shape != tuple(own[name].shape):
            raise fsdp2.FSDPRuntimeError(
                f"'{shown}{name}' is to be loaded with the shape {shape and list(shape)}, as the first rank has it, "
                f"and has {list(own[name].shape)}."
            )
    for name, (sharded, _) in forms.items():
        tensor = own.get(name)
        if tensor is None:
            raise fsdp2.FSDPRuntimeError(
                f"the first rank has '{shown}{name}', and the model of rank {dist.get_rank()} does not: ranks must "
                "have the same model, but for what they ignore."
            )
        if not sharded:
            form = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            state_dict[f"{inner}{name}"] = ranks.tensor(given[name] if ranks.is_first else None, form)
        elif not is_sharded.get(name, False):
            raise fsdp2.FSDPRuntimeError(
                f"'{shown}{name}' is to be loaded with rank0_only, the first rank has a sharded tensor for it, and "
                f"rank {dist.get_rank()} none: give the first rank whole tensors, or load without rank0_only."
            )
    for name, (shape, dtype) in ignored_forms.items():
        if shape is not None:
            form = torch.empty(shape, dtype=dtype, device=wrapper.compute_device)
            value = ranks.tensor(given[name] if ranks.is_first else None, form)
            if name in own and name not in given:
                state_dict[f"{inner}{name}"] = value


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """That of a tensor, or of what Lightning has in its place; None of anything else."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) or is_tensor_like(value) else None


def after_load(wrapper: nn.Module, incompatible: Any) -> None:
    """Hook: what is missing is told by the names of state dicts."""
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [name.replace(f"{WRAPPED}.", "") for name in names]
