"""`fully_shard`: validate, collect parameters, shard them, attach the state, mix in the class."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp2 import _torch
from fsdp2.buffers import Home
from fsdp2.common import FSDPNotImplementedError, FSDPTypeError, FSDPValueError
from fsdp2.extensions import check_extension, is_extended
from fsdp2.mesh import DataParallelMesh, default_mesh, mesh_info, smaller_mesh
from fsdp2.module import mix_in
from fsdp2.optimizer_guard import GUARD
from fsdp2.param import Freshness, FSDPParam, is_subclass, local_data, owner_of, successor_of
from fsdp2.param_group import FSDPParamGroup
from fsdp2.placement import ShardPlacementFn, check_policy_callable, requested_placement, sharding_of
from fsdp2.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    mixed_precision,
    offload,
)
from fsdp2.post_forward import PostForward
from fsdp2.root import Unit
from fsdp2.state import FSDPState, state_of
from fsdp2.wrapping import Wrapping

Module = TypeVar("Module", bound=nn.Module)

_MIXED_PRECISION = MixedPrecisionPolicy()
_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> Module: ...
@overload
def fully_shard(
    module: list[Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[Module]: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _MIXED_PRECISION,
    offload_policy: OffloadPolicy = _OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module`` over ``mesh``, in place, and gather them just in time.

    Each parameter of shape ``(size0, ...)`` becomes a DTensor with placement ``Shard(0)``; rank r keeps rows
    ``[r * ceil(size0 / W), (r + 1) * ceil(size0 / W))``. The parameters of one call form a *group*: before
    ``module``'s forward and backward they are all-gathered together, afterwards freed; their gradients are averaged
    over
    the ranks with one reduce-scatter. Call it bottom-up, on the blocks of a model and then on the model itself:
    parameters of submodules on which it was called before belong to those. Buffers are not sharded.

        >>> for block in model.blocks:
        ...     fully_shard(block)
        >>> fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())

    A parameter that is a DTensor of tensor or expert parallelism keeps its placements, and is sharded over the
    data-parallel mesh as well. Every rank must make the same calls. The first forward of the outermost module makes it
    the root and compares the plans of all ranks.

    Args:
        module: the module, or a list of modules that form one group. ``ModuleList`` and ``ModuleDict`` have no forward
            and cannot be sharded themselves. Of a list, those that lie inside others of it are left to these; forward
            may call a part of the others, and the rest later in the iteration (chunked loss): then each of those calls
            reduces on its own. On the meta device nothing is allocated: call ``model.to_empty(device=...)`` and
            initialize or load before the first forward.
        mesh: of one dim: parameters are sharded over it (FSDP). Of two named dims (replicate, shard): sharded over the
            second, replicated over the first (HSDP). Its device type is where parameters and buffers are moved.
            Default: all ranks, on the accelerator if there is one, else on CPU.
        reshard_after_forward: True frees the unsharded parameters after forward and gathers again in backward. False
            keeps them from forward to backward (more memory, less communication). None: True, but for the root False
            where a backward can follow (with gradients enabled), which needs the root's parameters first. An int, a
            divisor of the ranks sharded over: reshard to that many neighbours after forward, so that the gather in
            backward stays among them. Makes process groups: all ranks must call. What is registered in the modules
            after forward is then sharded, unsharded, or sharded over the neighbours, accordingly.
        shard_placement_fn: called with each parameter; returns ``Shard(i)`` to shard dim i, which must be even unless
            it is 0, a `ShardPlacementResult` to shard over another mesh as well, or None for ``Shard(0)``.
        mp_policy: see `MixedPrecisionPolicy`.
        offload_policy: `CPUOffloadPolicy` keeps shards and gradients in host memory.
        ignored_params: parameters to leave alone: neither sharded, moved nor reduced.
        dp_mesh_dims: ``mesh`` is a mesh of any number of named dims, of which these are data parallel; parameters must
            be DTensors on it, replicated in those dims.

    Returns:
        ``module`` itself (or the list), its class now also derived from `FSDPModule`. A second call with equal
        arguments changes nothing; `unwrap` undoes it.

    Raises:
        FSDPTypeError: not a module, not a mesh, not a policy.
        FSDPValueError: already sharded, with other arguments (the message names the one) or by
            another call (it names the owner), a container without forward, a mesh, a dim name,
            a placement or an int that does not fit, a parameter of 0 dims.
        FSDPNotImplementedError: a parameter that this version cannot shard (non-contiguous, an uneven dim behind the
            first), or an int with tensor parallelism or ``dp_mesh_dims``.
        FSDPRuntimeError: no process group.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023, arXiv 2304.11277.
    """
    modules = _validated_modules(module)
    policy, offloading = mixed_precision(mp_policy), offload(offload_policy)
    check_policy_callable(shard_placement_fn)
    info = mesh_info(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    data_parallel = DataParallelMesh.from_info(info)
    resharding, neighbours = _validated_resharding(reshard_after_forward, data_parallel)
    ignored = _validated_ignored(ignored_params)
    below = ignored.intersection(parameter for each in modules for parameter in each.parameters())
    wrapping = Wrapping(data_parallel, (resharding, neighbours), shard_placement_fn, policy, offloading, below)
    if _is_repetition(modules, wrapping):
        return module
    managed = _managed_modules(modules)
    found = _find_parameters(modules, managed, ignored)
    for parameter, uses in found.items():
        _check_parameter(parameter, uses[0][2], modules[0])
    with torch.inference_mode(False):  # parameters made under inference mode could never be trained
        unit = _shard(found, managed, wrapping, type(modules[0]).__name__)
    state = FSDPState(
        modules,
        unit,
        data_parallel,
        reshard_after_forward=resharding,
        policy=policy,
        ignored_params=ignored,
        wrapping=wrapping,
    )
    for each_module in modules:
        mix_in(each_module)
    state.attachment.mark(managed)
    if unit:
        state.attachment.handle_state_dicts(state, modules, managed)
    GUARD.install()
    _torch.run_hooks_uncompiled()
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _validated_resharding(reshard_after_forward: Any, mesh: DataParallelMesh) -> tuple[bool | None, int | None]:
    """Whether to reshard after forward, and to how many ranks if not to all."""
    if mesh.group is None:  # nothing is sharded: gathering again would only copy
        return False if reshard_after_forward is None else bool(reshard_after_forward), None
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    if not isinstance(reshard_after_forward, int):
        raise FSDPValueError(
            "reshard_after_forward must be None, a bool, or the number of ranks to reshard to, got "
            f"{reshard_after_forward!r}."
        )
    if mesh.spmd_mesh is not None:
        raise FSDPNotImplementedError(
            "reshard_after_forward as an int is not supported with dp_mesh_dims; pass True or False."
        )
    size = mesh.world_size
    if not 1 <= reshard_after_forward <= size or size % reshard_after_forward:
        raise FSDPValueError(
            f"reshard_after_forward={reshard_after_forward} must divide the {size} ranks that are sharded over; a "
            "choice may be the number of devices in a node."
        )
    if reshard_after_forward == 1 and size > 1:
        warnings.warn(
            "reshard_after_forward=1 (an int) keeps whole parameters on one rank, like False; to reshard, pass True.",
            stacklevel=3,
        )
        return False, None
    return True, None if reshard_after_forward == size else reshard_after_forward


def _check_neighbours(sharding: Any, size: int, fqn: str, name: str) -> None:
    if sharding.unsharded_spec is not None:
        raise FSDPNotImplementedError(
            f"parameter '{fqn}' of {name} is a DTensor (tensor parallelism), for which reshard_after_forward as an int "
            "is not supported; pass True or False."
        )
    if sharding.mesh.world_size % size:
        raise FSDPValueError(
            f"reshard_after_forward={size} must divide the {sharding.mesh.world_size} ranks that parameter '{fqn}' of "
            f"{name} is sharded over."
        )


_Use = tuple[nn.Module, str, str]
"""A module, the name of one of its own parameters, and that parameter's fully qualified name."""


def _validated_modules(module: object) -> tuple[nn.Module, ...]:
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise FSDPValueError("fully_shard was called on an empty list of modules.")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise FSDPTypeError(f"fully_shard shards an nn.Module or a list of them, got {type(each).__name__}.")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward in _NO_FORWARD:
            raise FSDPValueError(
                f"fully_shard cannot shard a {type(each).__name__}: it has no forward to gather parameters before. "
                "Call it on the modules inside, or on the module that contains it."
            )
    if len(set(map(id, modules))) != len(modules):
        raise FSDPValueError("fully_shard was called on a list that holds a module twice.")
    inside = {child for each in modules for child in each.modules() if child is not each}
    return tuple(each for each in modules if each not in inside)


def _validated_ignored(ignored_params: Any) -> frozenset[nn.Parameter]:
    if ignored_params is None:
        return frozenset()
    ignored: list[Any] = [ignored_params] if isinstance(ignored_params, (torch.Tensor, str)) else list(ignored_params)
    if isinstance(ignored_params, torch.Tensor) or not all(isinstance(each, nn.Parameter) for each in ignored):
        found = sorted({type(each).__name__ for each in ignored})
        raise FSDPTypeError(f"ignored_params must be an iterable of nn.Parameter, got {', '.join(found)}.")
    return frozenset(ignored)


_NO_FORWARD = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _managed_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules`` and everything below them, down to submodules that have groups of their own."""
    managed: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in managed or state_of(module) is not None:
            return
        managed[module] = None
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(managed)


def _is_repetition(modules: Sequence[nn.Module], wrapping: Wrapping) -> bool:
    """Whether `fully_shard` was called on ``modules`` before, with the same arguments.

    Raises:
        FSDPValueError: it was called with others, or on some of them, or together with other modules.
    """
    states = [state_of(module) for module in modules]
    sharded = [state for state in states if state is not None]
    if not sharded:
        return False
    before = sharded[0]
    name = before.class_name
    if len(sharded) < len(modules) or set(before.modules) != set(modules):
        names = ", ".join(type(module).__name__.removeprefix("FSDP") for module in before.modules)
        raise FSDPValueError(
            f"fully_shard was already called on this {name}, with another argument 'module': on ({names}). The modules "
            "of one call form a group; call it once more on exactly those, or undo it with fsdp2.unwrap() first."
        )
    assert before.wrapping is not None, "fully_shard sets it"
    argument = before.wrapping.difference(wrapping)
    if argument is not None:
        first, second = getattr(before.wrapping, argument, None), getattr(wrapping, argument, None)
        if argument == "dp_mesh_dims":
            first, second = before.wrapping.mesh.dims, wrapping.mesh.dims
        elif argument == "mesh":
            first, second = before.wrapping.mesh.device_mesh, wrapping.mesh.device_mesh
        raise FSDPValueError(
            f"fully_shard was already called on this {name} with another argument '{argument}': {_shown(first)} "
            f"before, {_shown(second)} now. Repeat the call with equal arguments, which changes nothing, or undo it "
            "with fsdp2.unwrap() first."
        )
    return True


def _shown(argument: Any) -> str:
    if isinstance(argument, frozenset):
        return f"{len(argument)} parameters"
    if isinstance(argument, tuple):  # of reshard_after_forward
        return str(argument[0] if argument[1] is None else argument[1])
    return str(argument)


def _shard(found: dict[nn.Parameter, list[_Use]], managed: Sequence[nn.Module], wrapping: Wrapping, name: str) -> Unit:
    """Shard the parameters, and group them by their meshes."""
    mesh, policy, offloading = wrapping.mesh, wrapping.mp_policy, wrapping.offload_policy
    neighbours = wrapping.reshard_after_forward[1]
    shardings = [
        sharding_of(
            parameter,
            *requested_placement(wrapping.shard_placement_fn, parameter, uses[0][2], mesh),
            f"parameter '{uses[0][2]}' of {name}",
        )
        for parameter, uses in found.items()
    ]
    policies = [policy.for_parameter(parameter, uses[0][2]) for parameter, uses in found.items()]
    if neighbours is not None:
        for sharding, uses in zip(shardings, found.values(), strict=True):
            _check_neighbours(sharding, neighbours, uses[0][2], name)
    pinned = isinstance(offloading, CPUOffloadPolicy) and offloading.pin_memory
    home = Home(mesh.device, offloaded=isinstance(offloading, CPUOffloadPolicy), pinned=pinned)
    _move_to_device(managed, found, mesh.device)
    freshness = Freshness()
    by_mesh: dict[Any, list[FSDPParam]] = {}
    for (original, uses), sharding, each in zip(found.items(), shardings, policies, strict=True):
        param = FSDPParam(uses[0][2], [use[:2] for use in uses], original, sharding, each, freshness, name)
        by_mesh.setdefault(sharding.mesh.key, []).append(param)
    unit: Unit = tuple(
        FSDPParamGroup(params, params[0].sharding.mesh, home, freshness=freshness, name=name)
        for params in by_mesh.values()
    )
    for group in unit:
        if neighbours is not None and neighbours < group.mesh.world_size:
            group.storage.post_forward = PostForward(smaller_mesh(group.mesh, neighbours))
    return unit


def _find_parameters(
    modules: Sequence[nn.Module], managed: Sequence[nn.Module], ignored: frozenset[nn.Parameter]
) -> dict[nn.Parameter, list[_Use]]:
    """Every parameter that is registered in ``managed`` modules, with all places where it is."""
    names: dict[nn.Module, str] = {}
    for module in modules:
        for name, each in module.named_modules():
            names.setdefault(each, name)
    found: dict[nn.Parameter, list[_Use]] = {}
    for module in managed:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in ignored:
                fqn = f"{names[module]}.{name}" if names[module] else name
                found.setdefault(parameter, []).append((module, name, fqn))
    return found


def _check_parameter(parameter: nn.Parameter, fqn: str, module: nn.Module) -> None:
    where = f"parameter '{fqn}' of {type(module).__name__}"
    if is_lazy(parameter):
        raise FSDPValueError(f"{where} is not initialized: run a forward of the lazy module before fully_shard.")
    successor = successor_of(parameter)  # of an original that another group has sharded
    owner = owner_of(parameter if successor is None else successor)
    if owner is not None:
        raise FSDPValueError(
            f"{where} is already sharded, as '{owner.path}' in the group of {owner.group_name}. Call fully_shard "
            "bottom-up: on submodules before the module that contains them. (A parameter shared by two groups is not "
            "supported: shard the modules that share it in one call, as a list.)"
        )
    data = local_data(parameter)
    if is_extended(data):
        check_extension(data, where)
    if parameter.dim() == 0:
        raise FSDPValueError(
            f"{where} has no dim to shard: it is 0-D. Make it 1-D, shape (1,), or pass it in ignored_params."
        )
    if not local_data(parameter).is_contiguous():
        raise FSDPNotImplementedError(
            f"{where} is not contiguous (shape {tuple(parameter.shape)}, stride {parameter.stride()}); replace it by "
            "nn.Parameter(parameter.contiguous()) before fully_shard."
        )


def _move_to_device(
    managed: Sequence[nn.Module],
    found: Iterable[nn.Parameter],
    device: torch.device,
) -> None:
    """Move what is not on meta to ``device``. Parameters keep their identity."""
    for parameter in found:
        if parameter.device == device or parameter.is_meta:
            continue
        if isinstance(parameter, DTensor):
            raise FSDPValueError(
                f"a parameter is a DTensor on {parameter.device}, but fully_shard's mesh is on {device}: build both "
                "meshes for the same device type."
            )
        if is_subclass(parameter):
            with torch.no_grad():
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.to(device), parameter.requires_grad))
        else:
            parameter.data = parameter.data.to(device)
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
