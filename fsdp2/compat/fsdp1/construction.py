"""What the constructor's arguments come to: ignored parts, ranks, a device, values, and arguments of `fully_shard`."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2.compat.fsdp1.casting import set_buffer
from fsdp2.compat.fsdp1.config import ShardingStrategy
from fsdp2.compat.fsdp1.policies import Ignored

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


# -- ignored parts


def ignored_below(
    module: nn.Module, ignored_modules: Any, ignored_states: Any, wrappers: Iterable[Any], wrapper: type[nn.Module]
) -> Ignored:
    """What is to be left alone at and below ``module``, what ``wrappers`` below leave alone included.

    Raises:
        FSDPValueError: both are given; a wrapped module is to be ignored.
        FSDPTypeError: neither parameters nor modules.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise fsdp2.FSDPValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Pass ignored_states."
        )
    given = _listed(ignored_states if ignored_modules is None else ignored_modules)
    allowed = (nn.Module,) if ignored_modules is not None else (nn.Module, nn.Parameter)
    kinds = {next((kind for kind in allowed if isinstance(each, kind)), None) for each in given}
    if None in kinds or len(kinds) > 1:
        raise fsdp2.FSDPTypeError(
            "ignored_modules must be an iterable of modules, and ignored_states one of modules or of parameters, got "
            f"{sorted({type(each).__name__ for each in given})}."
        )
    modules = [each for each in given if isinstance(each, nn.Module)]
    wrapped = [each for each in modules if isinstance(each, (wrapper, fsdp2.FSDPModule))]
    if wrapped:
        raise fsdp2.FSDPValueError(
            f"a {type(wrapped[0]).__name__} that is wrapped already cannot be ignored: its parameters are sharded. "
            "Give the module before it is wrapped."
        )
    below = {each for module in modules for each in module.modules() if not isinstance(each, wrapper)}
    params = {each for each in given if isinstance(each, nn.Parameter)}
    params.update(parameter for each in below for parameter in each.parameters(recurse=False))
    for each in wrappers:
        below |= each._fsdp1_ignored.modules
        params |= each._fsdp1_ignored.params
    if module in below:
        warnings.warn("The module that is wrapped is itself ignored: nothing of it is sharded.", stacklevel=3)
    return Ignored(frozenset(below), frozenset(params))


def _listed(given: Any) -> list[Any]:
    try:
        return [] if given is None else list(given)
    except TypeError:
        raise fsdp2.FSDPTypeError(
            f"ignored_modules and ignored_states must be iterables, got {type(given).__name__}."
        ) from None


# -- where


def device_of(device_id: Any, device_mesh: DeviceMesh | None, module: nn.Module, ignored: Ignored) -> torch.device:
    """The device that computes: the one that is asked for, else of the mesh's kind, else an accelerator, else the CPU.

    Of that kind it is the one that parameters of ``module`` are on already, else the current one.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device_id is not None:
        kind = "cpu" if accelerator is None else accelerator.type
        device = torch.device(kind, device_id) if isinstance(device_id, int) else torch.device(device_id)
        return device if device.index is not None and device.type != "cpu" else _current(device.type)
    if device_mesh is None and accelerator is None:
        return torch.device("cpu")
    kind = accelerator.type if device_mesh is None else device_mesh.device_type  # type: ignore[union-attr]
    places = (parameter.device for parameter in module.parameters() if parameter not in ignored.params)
    return next((place for place in places if place.type == kind != "cpu"), None) or _current(kind)


def used(device: torch.device) -> torch.device:
    """``device``, which is the current one now, if it is an accelerator: the engine computes and communicates there.

    Programs that name a ``device_id`` need not have called ``torch.cuda.set_device()``.
    """
    if device.index is not None and device.type != "cpu" and device.index != torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(device.index)
    return device


def _current(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


_MESHES: dict[Any, tuple[weakref.ref[Any], DeviceMesh]] = {}
"""By device type and groups; with the default group, which may be another one by now."""


def mesh_of(process_group: Any, device_mesh: DeviceMesh | None, strategy: Any, device_type: str) -> DeviceMesh:
    """Over which ranks a unit is sharded (its last dim), and replicated (the first of two, under hybrid strategies).

    All ranks must call, as groups may be made; units with equal arguments share a mesh.

    Raises:
        FSDPValueError: a group and a mesh, or what does not fit the strategy.
        FSDPRuntimeError: no process group.
    """
    if process_group is not None and device_mesh is not None:
        raise fsdp2.FSDPValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one."
        )
    is_hybrid = strategy in HYBRID
    if device_mesh is not None:
        if device_mesh.ndim != 1 + is_hybrid:
            raise fsdp2.FSDPValueError(
                f"sharding_strategy {strategy.name} needs a device_mesh of {1 + is_hybrid} dim(s), got {device_mesh}. "
                "Of a mesh with tensor parallelism, pass the data-parallel part: mesh['dp']."
            )
        return device_mesh
    if not dist.is_initialized():
        raise fsdp2.FSDPRuntimeError(
            "FullyShardedDataParallel needs a process group, and none is initialized: call "
            "torch.distributed.init_process_group() first."
        )
    _refuse_groups(process_group, is_hybrid, strategy)
    key = (device_type, is_hybrid, process_group if not isinstance(process_group, tuple) else tuple(process_group))
    known = _MESHES.get(key)
    if known is not None and known[0]() is dist.group.WORLD:
        return known[1]
    mesh = _make_mesh(process_group, is_hybrid, device_type)
    _MESHES[key] = (weakref.ref(dist.group.WORLD), mesh)
    return mesh


def _refuse_groups(process_group: Any, is_hybrid: bool, strategy: Any) -> None:
    if process_group is None:
        return
    if is_hybrid:
        if not (
            isinstance(process_group, tuple)
            and len(process_group) == 2
            and all(isinstance(each, dist.ProcessGroup) for each in process_group)
        ):
            raise fsdp2.FSDPValueError(
                "Expected process_group to be passed in as a tuple (shard group, replicate group) under "
                f"{strategy.name}, got {type(process_group).__name__}."
            )
    elif not isinstance(process_group, dist.ProcessGroup):
        raise fsdp2.FSDPValueError(
            f"process_group must be a process group under {strategy.name}, got {type(process_group).__name__}."
        )


def _make_mesh(process_group: Any, is_hybrid: bool, device_type: str) -> DeviceMesh:
    names = ("replicate", "shard")
    if process_group is None and not is_hybrid:
        return init_device_mesh(device_type, (dist.get_world_size(),))
    if process_group is None:
        world, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        if not here:
            count = torch.accelerator.device_count() if device_type != "cpu" else world
            here = min(world, count or world)
        if world % here:
            raise fsdp2.FSDPValueError(
                f"hybrid sharding needs nodes of equal size: {here} ranks of {world} are on this one."
            )
        return init_device_mesh(device_type, (world // here, here), mesh_dim_names=names)
    if not is_hybrid:
        return DeviceMesh.from_group(process_group, device_type)
    shard, replicate = process_group
    rows: list[Any] = [None] * dist.get_world_size(replicate)
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    return DeviceMesh.from_group(
        [replicate, shard], device_type, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=names
    )


# -- real values


def own_modules(module: nn.Module, ignored: Ignored, wrapper: type[nn.Module]) -> Iterator[nn.Module]:
    """``module`` and what is below it, parents first, without what is ignored and what has a wrapper of its own."""
    seen: set[nn.Module] = set()

    def visit(each: nn.Module) -> Iterator[nn.Module]:
        if each in seen or isinstance(each, wrapper):
            return
        seen.add(each)
        if each not in ignored.modules:
            yield each
        for child in each.children():
            yield from visit(child)

    yield from visit(module)


def materialize(
    module: nn.Module,
    ignored: Ignored,
    wrapper: type[nn.Module],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Give what is on meta in this unit values on ``device``: each module by itself, parents first; ties stay ties.

    ``param_init_fn`` is called with every module of a unit of which something is on meta, as it may fill several.

    Raises:
        FSDPTypeError: ``param_init_fn`` cannot be called.
        FSDPValueError: no ``param_init_fn``, and a module without ``reset_parameters()``; or values are still missing.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise fsdp2.FSDPTypeError(f"param_init_fn must be a function of a module, got {type(param_init_fn).__name__}.")
    found = {each: _own_tensors(each) for each in _breadth_first(module, ignored, wrapper)}
    on_meta = [each for each, own in found.items() if any(tensor.is_meta for tensor in own.values())]
    given = [*found] if param_init_fn is not None and on_meta else on_meta
    with torch.no_grad():
        for each in given:
            if param_init_fn is not None:
                param_init_fn(each)
            elif not callable(getattr(each, "reset_parameters", None)):
                raise fsdp2.FSDPValueError(
                    f"{type(each).__name__} has parameters or buffers on the meta device and no reset_parameters(): "
                    "pass param_init_fn, which gives a module its values."
                )
            else:
                each.to_empty(device=device, recurse=False)
                each.reset_parameters()  # type: ignore[operator]
            for name, before in found[each].items():
                _keep_tie(each, name, before)
    for each in on_meta:
        missing = [name for name, tensor in _own_tensors(each).items() if tensor.is_meta]
        if missing:
            raise fsdp2.FSDPValueError(
                f"'{missing[0]}' of {type(each).__name__} is on the meta device after param_init_fn: that must give "
                "values to each module that it is called with, as by module.to_empty(device=..., recurse=False)."
            )


def _breadth_first(module: nn.Module, ignored: Ignored, wrapper: type[nn.Module]) -> list[nn.Module]:
    """The `own_modules`, in the order in which torch's FSDP1 gives them values: so random numbers are the same."""
    own, waiting, seen = set(own_modules(module, ignored, wrapper)), deque([module]), {module: None}
    while waiting:
        for child in waiting.popleft().children():
            if child not in seen and not isinstance(child, wrapper):
                seen[child] = None
                waiting.append(child)
    return [each for each in seen if each in own]


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = (*module._parameters.items(), *module._buffers.items())  # by all names: ties within the module too
    return {name: tensor for name, tensor in own if tensor is not None}


def _keep_tie(module: nn.Module, name: str, before: torch.Tensor) -> None:
    """Let all that held ``before``, on meta, hold what the first of them was given, also in another unit."""
    now = _own_tensors(module).get(name)
    if now is None or now is before:
        return
    first = vars(before).setdefault("_fsdp1_made", now)
    if first is not now:
        (module._parameters if isinstance(first, nn.Parameter) else module._buffers)[name] = first


def move(module: nn.Module, ignored: Ignored, wrapper: type[nn.Module], device: torch.device) -> None:
    """Parameters (in place) and buffers of this unit to ``device``."""
    moved: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for each in own_modules(module, ignored, wrapper):
            for parameter in each.parameters(recurse=False):
                if parameter not in ignored.params and not _is_there(parameter, device) and not _is_sharded(parameter):
                    parameter.data = parameter.data.to(device)
            for name, buffer in each.named_buffers(recurse=False):
                if not _is_there(buffer, device):
                    set_buffer(each, name, moved.setdefault(id(buffer), buffer.to(device)))


def _is_there(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.is_meta or tensor.device == device


def _is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "_fsdp_param")


# -- the arguments of fully_shard


def strategy_of(sharding_strategy: Any) -> dict[str, Any]:
    """As `fully_shard` calls it."""
    return {
        ShardingStrategy.FULL_SHARD: {},
        ShardingStrategy.HYBRID_SHARD: {},
        ShardingStrategy.SHARD_GRAD_OP: {"strategy": "zero2"},
        ShardingStrategy._HYBRID_SHARD_ZERO2: {"strategy": "zero2"},
        ShardingStrategy.NO_SHARD: {"strategy": "replicate"},
    }[sharding_strategy]


def mixed_precision_of(mixed_precision: Any, kept: frozenset[nn.Parameter]) -> dict[str, Any]:
    """As `fully_shard` calls it; the parameters of ``kept`` are computed with and reduced in their own dtype.

    Inputs are cast by the wrapper, which knows whether it is the root when its forward is called.
    """
    if mixed_precision is None:
        return {"mp_policy": fsdp2.MixedPrecisionPolicy(cast_forward_inputs=False)}
    cast = fsdp2.MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype or mixed_precision.param_dtype,
        cast_forward_inputs=False,
    )
    if not kept:
        return {"mp_policy": cast}

    def policy(fqn: str, parameter: nn.Parameter) -> fsdp2.MixedPrecisionPolicy:
        if parameter in kept:
            return fsdp2.MixedPrecisionPolicy(reduce_dtype=parameter.dtype, cast_forward_inputs=False)
        return cast

    return {"mp_policy": policy}


def strategy_on(world_size: int, strategy: Any) -> Any:
    """``strategy``; on one rank `NO_SHARD`, whose state dicts are a plain module's, as torch writes and reads them."""
    if world_size > 1 or strategy in (ShardingStrategy.NO_SHARD, *HYBRID):
        return strategy
    warnings.warn(f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", stacklevel=3)
    return ShardingStrategy.NO_SHARD


def offload_of(cpu_offload: Any) -> dict[str, Any]:
    """As `fully_shard` calls it."""
    return (
        {"offload_policy": fsdp2.CPUOffloadPolicy()} if cpu_offload is not None and cpu_offload.offload_params else {}
    )


def go_by_name(module: nn.Module, name: str) -> None:
    """Let ``module``, whose class `fully_shard` has replaced, go on saying ``name`` where it is asked for it.

    Programs look for models by it: transformers' Trainer shifts the labels of language models that it finds so.
    """
    if type(module)._get_name is nn.Module._get_name:
        module._get_name = functools.partial(str, name)  # type: ignore[method-assign]  # copied and pickled with it


def refuse_wrapped(module: nn.Module, below: list[Any]) -> None:
    """Refuse, by an FSDPValueError, a policy for a module of which a part, ``below``, is wrapped already."""
    for name, each in module.named_modules():
        if each in below:
            raise fsdp2.FSDPValueError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in "
                f"{module._get_name()}: wrap all of it by hand, or nothing."
            )


def refuse_deferred(module: nn.Module) -> None:
    """Refuse parameters of torchdistX.

    Raises:
        FSDPNotImplementedError: there is one.
    """
    for name, parameter in module.named_parameters():
        if type(parameter).__module__.startswith("torchdistx") or getattr(parameter, "_is_deferred", False):
            raise fsdp2.FSDPNotImplementedError(
                f"parameter '{name}' is deferred by torchdistX, which is not maintained: build the model under "
                "torch.device('meta') instead."
            )


def check(name: str, value: Any, allowed: type) -> None:
    """Refuse an argument that is no ``allowed``.

    Raises:
        FSDPTypeError: it is not.
    """
    if value is not None and not isinstance(value, allowed):
        raise fsdp2.FSDPTypeError(f"{name} must be a {allowed.__name__}, got {type(value).__name__}.")
