"""`fully_shard`: validate, collect parameters, shard them, attach the state, mix in the class."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp2 import _torch
from fsdp2.api.installed import install_once
from fsdp2.api.module import FSDPModule, mix_in
from fsdp2.api.other_words import instead_of
from fsdp2.api.policies import (
    OffloadChoice,
    OffloadPolicy,
    module_policy,
    offload_choice,
    offload_policies,
    offloading_of,
    policy_or_function,
)
from fsdp2.api.tied_weights import Use, check_tied, take_tied
from fsdp2.api.zero_stages import info_for, set_strategy
from fsdp2.arguments import ANYTHING, checked
from fsdp2.core.buffers import Offloading
from fsdp2.core.gather import GATHERS_ITSELF, RESTS
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.hooks import STATE
from fsdp2.core.kept import registered_outside
from fsdp2.core.mesh import DataParallelMesh, DataParallelMeshInfo, default_mesh, mesh_info
from fsdp2.core.options import DataParallelMeshDims, MixedPrecisionPolicy, ModulePolicy, PolicyFunction
from fsdp2.core.param import FSDPParam, Registration, WriteCounter, is_subclass, local_data
from fsdp2.core.prefetch import Unit
from fsdp2.core.sharding import (
    Sharding,
    ShardPlacementFn,
    check_policy_callable,
    requested_placement,
    sharding_of,
)
from fsdp2.core.state import FSDPState, ShardArguments, Strategy, refuse_own_name, state_of
from fsdp2.core.structure import module_paths, refuse_container
from fsdp2.core.trees import refuse_unknown_arguments
from fsdp2.errors import FSDPNotImplementedError, FSDPTypeError, FSDPValueError
from fsdp2.plugs.parameters.tensor_extensions import check_extension
from fsdp2.plugs.states.whole_states import take_rows

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
    mp_policy: MixedPrecisionPolicy | PolicyFunction = ...,
    offload_policy: OffloadChoice | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    strategy: Strategy | None = ...,
) -> Module: ...
@overload
def fully_shard(
    module: list[Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy | PolicyFunction = ...,
    offload_policy: OffloadChoice | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    strategy: Strategy | None = ...,
) -> list[Module]: ...
@checked(
    instead_of,
    mesh=ANYTHING,
    reshard_after_forward=ANYTHING,
    shard_placement_fn=ANYTHING,
    mp_policy=ANYTHING,
    offload_policy=ANYTHING,
    dp_mesh_dims=ANYTHING,
    strategy=ANYTHING,
)
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | PolicyFunction = _MIXED_PRECISION,
    offload_policy: OffloadChoice | None = _OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    strategy: Strategy | None = None,
) -> Any:
    """Shard the parameters of ``module`` over ``mesh``, in place, and gather them just in time.

    Each parameter of shape ``(size0, ...)`` becomes a DTensor with placement ``Shard(0)``; rank r keeps rows
    ``[r * ceil(size0 / W), (r + 1) * ceil(size0 / W))``. The parameters of one call form a *group*: before
    ``module``'s forward and backward they are all-gathered together, afterwards freed; their gradients are averaged
    over the ranks with one reduce-scatter. Call it bottom-up, on the blocks of a model and then on the model itself:
    parameters of submodules on which it was called before belong to those. Buffers are not sharded.

        >>> for block in model.blocks:
        ...     fully_shard(block)
        >>> fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())

    A parameter that modules of several calls hold (tied weights) belongs to the first call; its group is gathered for
    the others too, and reduced once, at the end of the backward.

    A parameter that is a DTensor of tensor or expert parallelism keeps its placements, and is sharded over the
    data-parallel mesh as well. Every rank must make the same calls. The first forward of the outermost module makes it
    the root and compares the plans of all ranks.

    Args:
        module: the module, or a list of modules that form one group. ``ModuleList`` and ``ModuleDict`` have no forward
            and cannot be sharded themselves. Modules of a list that lie inside others of it belong to these. Forward
            may call some modules of a list, and the others later in the iteration (chunked loss): then each of these
            calls reduces on its own. On the meta device nothing is allocated: call ``model.to_empty(device=...)`` and
            initialize or load before the first forward.
        mesh: over a mesh of one dim parameters are sharded (FSDP). With two named dims (replicate, shard) they are
            sharded over the second and replicated over the first (HSDP). Parameters and buffers are moved to its device
            type. By default it is all ranks, on the accelerator if there is one, else on CPU.
        reshard_after_forward: True frees the unsharded parameters after forward and gathers again in backward. False
            keeps them from forward to backward (more memory, less communication). None is True; for the root it is
            False while gradients are enabled, since the backward needs the root's parameters first. An int, a divisor
            of the number of ranks sharded over, reshards to that many neighbours after forward, so that the gather in
            backward stays among them; it makes process groups, so all ranks must call. After forward the modules hold
            sharded or unsharded parameters accordingly, or parameters that are sharded over the neighbours.
        shard_placement_fn: called with each parameter; returns ``Shard(i)`` to shard dim i, ``RowBlocks(n)`` to keep
            blocks of n rows together, ``BlockShard.split_leading(parameter.shape, k)`` to split the rows of its first
            k dims, merged, ``Owned(rank)`` to leave the whole parameter to one rank (see `balanced_owners`), a
            `ShardPlacementResult` to shard over another mesh as well, or None for ``Shard(0)``. (A parameter without
            dims is always replicated.)
        mp_policy: a `MixedPrecisionPolicy`, or a function ``(fqn, parameter) -> MixedPrecisionPolicy | None`` that is
            called with each parameter and its name below ``module``: parameters of one group may differ in every dtype.
            Its answers must not contradict each other about inputs, outputs and buffers.
        offload_policy: `CPUOffloadPolicy` keeps shards and gradients in host memory. None is `OffloadPolicy()`: it
            offloads nothing. It may also be a mapping from names of parameters below ``module`` to policies (absent
            ones are not offloaded; see `cpu_offload_by_budget`), or a function ``(fqn, parameter) -> OffloadPolicy |
            None``: then offloaded parameters and others form different groups.
        ignored_params: parameters to leave alone: they are neither sharded, moved nor reduced.
        dp_mesh_dims: ``mesh`` is a mesh of any number of named dims, of which these are data parallel; parameters must
            be DTensors on it, replicated in those dims.
        strategy: a ZeRO stage. ``"zero3"``: parameters are freed after forward and after backward. ``"zero2"``: they
            stay unsharded from forward to backward. ``"zero1"``: they stay unsharded until a backward reduces
            gradients, so that they are gathered once for all microbatches of a step, if all but the last run with
            ``set_requires_gradient_sync(False)``. ``"replicate"``: nothing is sharded, over either dim of ``mesh``;
            gradients are all-reduced. None: ``reshard_after_forward`` decides. Groups of one model may differ; see
            `FSDPModule.set_strategy`.

    Returns:
        ``module`` itself (or the list), its class now also derived from `FSDPModule`. A second call with equal
        arguments changes nothing; `unwrap` undoes it.

    Raises:
        FSDPTypeError: an argument is not a module, a mesh or a policy; or the module has an attribute with the name of
            a public method of `FSDPModule`.
        FSDPValueError: the module is already sharded, with other arguments (the message names the argument) or by
            another call (it names the owner); torch's `fully_shard` was called on it or below it, or torch's
            `replicate` on it (below it, `replicate` is left alone); it is a container without forward; a mesh, a dim
            name, a placement, an int or the name of an input does not fit; policies contradict each other, or a
            strategy contradicts another argument; a mesh with a dim of tensor or pipeline parallelism was passed as a
            whole; two parameters lie in the same memory, or a module keeps a view of a parameter in an attribute.
        FSDPNotImplementedError: a tensor subclass has no dims, is not contiguous, or is cut unevenly behind dim 0; or
            ``reshard_after_forward`` is an int on a mesh with flattened dims.
        FSDPRuntimeError: there is no process group.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023, arXiv 2304.11277.
    """
    modules = _validated_modules(module)
    asked, offloading = policy_or_function(mp_policy), offload_choice(offload_policy)
    check_policy_callable(shard_placement_fn)
    info = _mesh_info(strategy, reshard_after_forward, shard_placement_fn, mesh, dp_mesh_dims)
    data_parallel = DataParallelMesh.from_info(info)
    resharding, neighbours = _validated_resharding(reshard_after_forward, data_parallel)
    ignored = ignored_below(modules, ignored_params)
    below = ignored and ignored.intersection(parameter for each in modules for parameter in each.parameters())
    arguments = ShardArguments(
        data_parallel, (resharding, neighbours), shard_placement_fn, asked, offloading, below, strategy
    )
    if _is_repetition(modules, arguments):
        return module
    managed = _managed_modules(modules)
    for sharded in modules:
        _refuse_own_names(sharded)
    found = _find_parameters(modules, managed, ignored)
    _refuse_unsuitable(found, modules[0])
    # Parameters that other calls have sharded or replaced have an attribute of ours. Without any attributes there are
    # no tied weights, and the search for them can be left out.
    is_fresh = not ignored and not any([parameter.__dict__ for parameter in found])
    tied = [] if is_fresh else take_tied(found, ignored, managed, modules[0])
    name = type(modules[0]).__name__
    everywhere = dict.fromkeys(each for sharded in modules for each in sharded.modules())
    kept = registered_outside(everywhere, set(managed), {each: uses[0][2] for each, uses in found.items()})
    named = [(uses[0][2], parameter) for parameter, uses in (*found.items(), *[(t.original, t.uses) for t in tied])]
    policy = module_policy(arguments.mp_policy, named, name)
    every = [*found.items(), *[(each.original, each.uses) for each in tied]]
    offloads = offload_policies(offloading, [([use[2] for use in uses], own) for own, uses in every], name)
    known_places = {each: offloading_of(each, data_parallel.device) for each in dict.fromkeys(offloads)}
    places = [known_places[each] for each in offloads]
    refuse_unknown_arguments(policy.inputs, modules)
    with torch.inference_mode(False):  # parameters made under inference mode could never be trained
        if tied:
            check_tied(tied, arguments, policy.of_parameters[len(found) :], places[len(found) :], name)
        shardings = _shardings(found, arguments, name)
        unit = _shard(found, shardings, managed, arguments, policy, places, name, kept.places)
        for each in tied:
            each.owner.group.tie(each.owner, [use[:2] for use in each.uses])
        unit = tuple(dict.fromkeys((*unit, *[each.owner.group for each in tied])))
    for param, place in kept.of_sharded:
        param.group.register_in(param, place)
    state = FSDPState(modules, unit, policy, arguments, ignored)
    if strategy is not None:
        set_strategy(strategy, [state])
    for each_module in modules:
        mix_in(each_module)
    state.module_hooks.mark(managed)
    state.module_hooks.handle_state_dicts(state, modules, managed if unit else (), take_rows)
    install_once()
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _mesh_info(
    strategy: Strategy | None, reshard_after_forward: Any, shard_placement_fn: Any, mesh: Any, dims: Any
) -> DataParallelMeshInfo:
    def without_strategy() -> DataParallelMeshInfo:
        return mesh_info(default_mesh() if mesh is None else mesh, dims)

    if strategy is None:
        return without_strategy()
    return info_for(strategy, reshard_after_forward, shard_placement_fn, without_strategy)


def _refuse_unsuitable(found: dict[nn.Parameter, list[Use]], module: nn.Module) -> None:
    for parameter, uses in found.items():
        if any(isinstance(use[0], torch.jit.ScriptModule) for use in uses):
            raise FSDPNotImplementedError(
                f"parameter '{uses[0][2]}' of {type(module).__name__} belongs to a torch.jit.ScriptModule, whose "
                "parameters cannot be replaced: shard the module that was scripted, or pass its parameters as "
                "ignored_params."
            )
        if is_lazy(parameter):
            raise FSDPValueError(
                f"parameter '{uses[0][2]}' of {type(module).__name__} is not initialized: run a forward of the lazy "
                "module before fully_shard."
            )


def _validated_resharding(reshard_after_forward: Any, mesh: DataParallelMesh) -> tuple[bool | None, int | None]:
    """Whether to reshard after forward, and to how many ranks; None: to all."""
    if mesh.shard_group is None:  # nothing is sharded, so gathering again would only copy
        return False if reshard_after_forward is None else bool(reshard_after_forward), None
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    if not isinstance(reshard_after_forward, int):
        raise FSDPValueError(
            "reshard_after_forward must be None, a bool, or the number of ranks to reshard to, got "
            f"{reshard_after_forward!r}."
        )
    size = mesh.shard_size
    if not 1 <= reshard_after_forward <= size or size % reshard_after_forward:
        raise FSDPValueError(
            f"reshard_after_forward={reshard_after_forward} must divide the {size} ranks that are sharded over; a "
            "choice may be the number of devices in a node."
        )
    if reshard_after_forward == 1 and size > 1:
        warnings.warn(
            "reshard_after_forward=1 (an int) keeps whole parameters on one rank, like False; to reshard, pass True.",
            stacklevel=4,
        )
        return False, None
    return True, None if reshard_after_forward == size else reshard_after_forward


def _requested_sharding(
    parameter: nn.Parameter, fqn: str, name: str, shard_placement_fn: Any, default: DataParallelMesh
) -> Sharding:
    where = f"parameter '{fqn}' of {name}"
    sharding = sharding_of(parameter, *requested_placement(shard_placement_fn, parameter, fqn, default), where)
    data = local_data(parameter)
    if (type(data) is not torch.Tensor or data.__dict__) and GATHERS_ITSELF.filling(data):
        check_extension(data, sharding.partition, sharding.mesh.shard_size, where)
    return sharding


def _check_neighbours(sharding: Any, size: int, fqn: str, name: str) -> None:
    if sharding.mesh.shard_size % size:
        raise FSDPValueError(
            f"reshard_after_forward={size} must divide the {sharding.mesh.shard_size} ranks that parameter '{fqn}' of "
            f"{name} is sharded over."
        )


_PUBLIC = frozenset(name for name in vars(FSDPModule) if name[0] != "_" and not hasattr(nn.Module, name))
"""The names of public methods that `FSDPModule` adds to modules."""


def _refuse_own_names(module: nn.Module) -> None:
    """Refuse a module that has an attribute of its own under a name that `FSDPModule` needs."""
    if isinstance(module, FSDPModule):
        return
    own = [vars(each) for each in (module, *type(module).__mro__)]
    own += [module._parameters, module._buffers, module._modules]
    taken = sorted(name for name in (*_PUBLIC, STATE) if any(name in names for names in own))
    if taken:
        refuse_own_name(module, taken[0])


def _validated_modules(module: object) -> tuple[nn.Module, ...]:
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise FSDPValueError("fully_shard was called on an empty list of modules.")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise FSDPTypeError(f"fully_shard shards an nn.Module or a list of them, got {type(each).__name__}.")
        refuse_container(each, "fully_shard")
        if "replicate" in each.__dict__.get(_torch.COMPOSED, ()):
            raise FSDPValueError(
                f"torch's replicate was called on this {type(each).__name__}, which sees to its gradients: call "
                "fully_shard on a module above or below it, or on it instead of replicate, with strategy='replicate' "
                "to have the same by fsdp2."
            )
    if len(set(map(id, modules))) != len(modules):
        raise FSDPValueError("fully_shard was called on a list that holds a module twice.")
    if len(modules) == 1:
        return modules
    inside = {child for each in modules for child in each.modules() if child is not each}
    return tuple(each for each in modules if each not in inside)


def validated_ignored(ignored_params: Any) -> frozenset[nn.Parameter]:
    """``ignored_params`` as a set.

    Raises:
        FSDPTypeError: it holds something else than parameters.
    """
    if ignored_params is None:
        return frozenset()
    ignored = list(ignored_params)
    if not all(isinstance(each, nn.Parameter) for each in ignored):
        found = sorted({type(each).__name__ for each in ignored})
        raise FSDPTypeError(f"ignored_params must be an iterable of nn.Parameter, got {', '.join(found)}.")
    return frozenset(ignored)


def ignored_below(modules: Sequence[nn.Module], ignored_params: Any) -> frozenset[nn.Parameter]:
    """``ignored_params``, and the parameters of submodules whose gradients torch's `replicate` reduces.

    Raises:
        FSDPTypeError: ``ignored_params`` holds something else than parameters.
    """
    ignored, key = validated_ignored(ignored_params), _torch.COMPOSED
    replicated = [e for module in modules for e in module.modules() if "replicate" in e.__dict__.get(key, ())]
    return ignored.union(*(each.parameters() for each in replicated)) if replicated else ignored


def _managed_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """``modules`` and everything below them, down to submodules that have groups of their own, or are replicated."""
    managed: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        composed = module.__dict__.get(_torch.COMPOSED, ())
        if module in managed or state_of(module) is not None or "replicate" in composed:
            return
        if "fully_shard" in composed:
            path = module_paths(modules)[module]
            where = f"'{path}', a" if path else "this"
            raise FSDPValueError(
                f"torch's own fully_shard was called on {where} {type(module).__name__}, which cannot be part of what "
                "fsdp2 shards: import fully_shard from fsdp2 wherever it is called, or start the program by "
                "python -m fsdp2.compat."
            )
        managed[module] = None
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(managed)


def _is_repetition(modules: Sequence[nn.Module], arguments: ShardArguments) -> bool:
    """Whether `fully_shard` was called on ``modules`` before, with the same arguments.

    Raises:
        FSDPValueError: it was called with other arguments, on some of the modules, or together with other modules.
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
    argument = before.arguments.difference(arguments)
    if argument is not None:
        first, second = getattr(before.arguments, argument, None), getattr(arguments, argument, None)
        if argument == "dp_mesh_dims":
            first, second = before.arguments.mesh.dims, arguments.mesh.dims
        elif argument == "mesh":
            first, second = before.arguments.mesh.device_mesh, arguments.mesh.device_mesh
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


def _shardings(found: dict[nn.Parameter, list[Use]], arguments: ShardArguments, name: str) -> list[Sharding]:
    """The `Sharding` of each parameter. It changes nothing, so that a refusal leaves the model as it was."""
    neighbours = arguments.reshard_after_forward[1]
    shardings = [
        _requested_sharding(parameter, uses[0][2], name, arguments.shard_placement_fn, arguments.mesh)
        for parameter, uses in found.items()
    ]
    if neighbours is not None:
        for sharding, uses in zip(shardings, found.values(), strict=True):
            _check_neighbours(sharding, neighbours, uses[0][2], name)
    return shardings


def _shard(
    found: dict[nn.Parameter, list[Use]],
    shardings: Sequence[Sharding],
    managed: Sequence[nn.Module],
    arguments: ShardArguments,
    policy: ModulePolicy,
    places: Sequence[Offloading],
    name: str,
    kept: Mapping[nn.Parameter, Sequence[Registration]],
) -> Unit:
    """Shard the parameters, each by its policy, and group them by meshes and places."""
    neighbours = arguments.reshard_after_forward[1]
    _move_to_device(managed, found, arguments.mesh.device, policy.buffer_dtype)
    groups: dict[Any, tuple[WriteCounter, Offloading, list[FSDPParam]]] = {}
    for (original, uses), sharding, each, place in zip(
        found.items(), shardings, policy.of_parameters, places, strict=False
    ):
        write_counter, _, params = groups.setdefault((sharding.mesh.key, place.key), (WriteCounter(), place, []))
        at = [use[:2] for use in uses]
        params.append(FSDPParam(uses[0][2], at, original, sharding, each, write_counter, name, place.device))
        params[-1].register_in(kept.get(original, ()))
    unit: Unit = tuple(
        FSDPParamGroup(params, params[0].sharding.mesh, place, write_counter=write_counter, name=name)
        for write_counter, place, params in groups.values()
    )
    for group in unit:
        if neighbours is not None and neighbours < group.mesh.shard_size:
            group.storage.post_forward = RESTS.filling(group.mesh, neighbours)
    return unit


def _find_parameters(
    modules: Sequence[nn.Module], managed: Sequence[nn.Module], ignored: frozenset[nn.Parameter]
) -> dict[nn.Parameter, list[Use]]:
    """Every parameter that is registered in ``managed`` modules, with all places where it is registered."""
    names = module_paths(modules)
    found: dict[nn.Parameter, list[Use]] = {}
    for module in managed:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in ignored:
                fqn = f"{names[module]}.{name}" if names[module] else name
                found.setdefault(parameter, []).append((module, name, fqn))
    return found


def _move_to_device(
    managed: Sequence[nn.Module],
    found: Iterable[nn.Parameter],
    device: torch.device,
    buffer_dtype: torch.dtype | None,
) -> None:
    """Move parameters and buffers that are not on meta to ``device``, and cast buffers to ``buffer_dtype``.

    Parameters keep their identity.
    """
    for parameter in found:
        if parameter.device == device or parameter.is_meta:
            continue
        if isinstance(parameter, DTensor):
            raise FSDPValueError(
                f"a parameter is a DTensor on {parameter.device}, but fully_shard's mesh is on {device}: build both "
                "meshes for the same device type."
            )
        if is_subclass(parameter):  # setting `.data` would not move its inner tensors
            with torch.no_grad():
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.to(device), parameter.requires_grad))
        else:
            parameter.data = parameter.data.to(device)
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            where = buffer.device if buffer.is_meta else device
            dtype = buffer_dtype if buffer_dtype is not None and buffer.is_floating_point() else buffer.dtype
            module._buffers[name] = buffer.to(where, dtype)
