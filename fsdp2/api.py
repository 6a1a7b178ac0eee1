"""`fully_shard`: validate, collect parameters, shard them, attach the state, mix in the class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.common import FSDPNotImplementedError, FSDPTypeError, FSDPValueError
from fsdp2.layout import ceil_div
from fsdp2.mesh import ShardMesh, default_mesh
from fsdp2.module import FSDPModule, mix_in
from fsdp2.optimizer_guard import GUARD
from fsdp2.param import Freshness, FSDPParam, owner_of, shard_parameter, successor_of
from fsdp2.param_group import FSDPParamGroup
from fsdp2.state import FSDPState, state_of

Module = TypeVar("Module", bound=nn.Module)


@overload
def fully_shard(
    module: Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
) -> Module: ...
@overload
def fully_shard(
    module: list[Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
) -> list[Module]: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
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

    No communication takes place here; every rank must make the same calls. The first forward of the outermost module
    makes it the root and compares the plans of all ranks.

    Args:
        module: the module, or a list of modules that form one group. ``ModuleList`` and ``ModuleDict`` have no forward
            and cannot be sharded themselves. On the meta device nothing is allocated: call
            ``model.to_empty(device=...)`` and initialize or load before the first forward.
        mesh: one-dimensional; its device type is where parameters and buffers are moved. Default: all ranks, on the
            accelerator if there is one, else on CPU.
        reshard_after_forward: free the unsharded parameters after forward and gather again in backward. False
            keeps them from forward to backward (more memory, less communication). None: True, but for the root False
            where a backward can follow (with gradients enabled), which needs the root's parameters first.
        ignored_params: parameters to leave alone: neither sharded, moved nor reduced.

    Returns:
        ``module`` itself (or the list), its class now also derived from `FSDPModule`.

    Raises:
        FSDPTypeError: not a module, or not a mesh.
        FSDPValueError: already sharded (the message names the owner), a container without forward, a wrong mesh, a
            parameter of 0 dims.
        FSDPNotImplementedError: a parameter that this version cannot shard (non-contiguous, a tensor subclass).
        FSDPRuntimeError: no process group.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023, arXiv 2304.11277.
    """
    modules = _validated_modules(module)
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise FSDPTypeError(f"reshard_after_forward must be None or a bool, got {reshard_after_forward!r}.")
    shard_mesh = ShardMesh.from_device_mesh(default_mesh() if mesh is None else mesh)
    ignored = _validated_ignored(ignored_params)
    managed = _managed_modules(modules)
    found = _find_parameters(modules, managed, ignored)
    for parameter, uses in found.items():
        _check_parameter(parameter, uses[0][2], modules[0])
    with torch.inference_mode(False):  # parameters made under inference mode could never be trained
        _move_to_device(managed, found, shard_mesh.device)
        group = _make_group(found, shard_mesh, type(modules[0]).__name__)
    state = FSDPState(modules, group, shard_mesh, reshard_after_forward=reshard_after_forward, ignored_params=ignored)
    for each in modules:
        mix_in(each)
    if group is not None:
        _handle_state_dicts(managed, state, group)
    GUARD.install()
    return module


_Use = tuple[nn.Module, str, str]
"""A module, the name of one of its own parameters, and that parameter's fully qualified name."""


def _validated_modules(module: object) -> tuple[nn.Module, ...]:
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise FSDPValueError("fully_shard was called on an empty list of modules.")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise FSDPTypeError(f"fully_shard shards an nn.Module or a list of them, got {type(each).__name__}.")
        if isinstance(each, FSDPModule) or state_of(each) is not None:
            raise FSDPValueError(f"fully_shard was already called on this {type(each).__name__}; call it once.")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward in _NO_FORWARD:
            raise FSDPValueError(
                f"fully_shard cannot shard a {type(each).__name__}: it has no forward to gather parameters before. "
                "Call it on the modules inside, or on the module that contains it."
            )
    if len(set(map(id, modules))) != len(modules):
        raise FSDPValueError("fully_shard was called on a list that holds a module twice.")
    return modules  # type: ignore[return-value]


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
    if isinstance(parameter, DTensor):
        raise FSDPNotImplementedError(
            f"{where} is a DTensor on {parameter.device_mesh}; sharding what is already distributed (tensor "
            "parallelism) is not supported yet."
        )
    if is_traceable_wrapper_subclass(parameter):
        raise FSDPNotImplementedError(
            f"{where} is a tensor subclass, {type(parameter).__name__}, which is not supported."
        )
    if parameter.dim() == 0:
        raise FSDPValueError(
            f"{where} has no dim to shard: it is 0-D. Make it 1-D, shape (1,), or pass it in ignored_params."
        )
    if not parameter.is_contiguous():
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
        if parameter.device != device and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _make_group(found: dict[nn.Parameter, list[_Use]], mesh: ShardMesh, name: str) -> FSDPParamGroup | None:
    if not found:
        return None
    freshness = Freshness()
    params = []
    for original, uses in found.items():
        sharded = shard_parameter(original, mesh, ceil_div(original.shape[0], mesh.world_size))
        params.append(FSDPParam(uses[0][2], [use[:2] for use in uses], sharded, freshness, name))
    return FSDPParamGroup(params, mesh, freshness=freshness, name=name)


def _handle_state_dicts(managed: Sequence[nn.Module], state: FSDPState, group: FSDPParamGroup) -> None:
    """Reshard before state is saved or loaded, as unsharded parameters may be registered; adopt what was loaded."""

    def settle(*args: object) -> None:
        state.settle()

    def adopt(*args: object) -> None:
        group.adopt_replaced()

    for module in managed:
        if module._parameters:
            module.register_state_dict_pre_hook(settle)
            module.register_load_state_dict_pre_hook(settle)
    for module in state.modules:
        module.register_load_state_dict_post_hook(adopt)
