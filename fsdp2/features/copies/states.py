"""Copies and pickles of sharded modules: what of a state travels with its modules, and how it is put together again.

`nn.Module` copies its attributes one by one, in an order of its own, so a state arrives in pieces: as a *recipe*, which
names modules and says everything else in plain facts. It is completed when all of its modules are there: every
parameter of the copy is one that Python copied, and gets a group, buffers and settings of its own. Nothing is
communicated. References to other groups (prefetching) are by `Identity`, and are resolved when a root forms.
"""

from __future__ import annotations

import copyreg
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.buffers import Offloading
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.hooks import STATE, ModuleHooks
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.options import GroupSettings, MixedPrecisionPolicy, ModulePolicy, RootSettings
from fsdp2.core.param import FSDPParam, WriteCounter, fsdp_param_of
from fsdp2.core.root import ON_ROOT, Unit
from fsdp2.core.sharding import Partition, Sharding
from fsdp2.core.state import RECIPE_OF, FSDPState, ShardArguments
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, Identity
from fsdp2.features.copies.meshes import MeshRecord
from fsdp2.features.custom_collectives import OURS
from fsdp2.features.reshard_to_fewer import PostForwardShards


class ParamFacts(NamedTuple):
    """What is fixed about one parameter, beside its values."""

    fqn: str
    sharding: Sharding
    policy: MixedPrecisionPolicy
    shape: tuple[int, ...]
    grad_dtype: tuple[bool, torch.dtype | None]
    arrived_dtype: torch.dtype | None


class GroupFacts(NamedTuple):
    """What is fixed about one group, and what was set on it."""

    params: tuple[ParamFacts, ...]
    mesh: DataParallelMesh
    offloading: Offloading
    settings: GroupSettings
    neighbours: int | None

    @classmethod
    def of(cls, group: FSDPParamGroup) -> GroupFacts:
        """Read ``group``."""
        params = tuple(
            ParamFacts(param.fqn, param.sharding, param.policy, param.shape, param.grad_dtype, param.arrived_dtype)
            for param in group.params
        )
        storage = group.storage
        neighbours = None if storage.post_forward is None else storage.post_forward.mesh.shard_size
        return cls(params, group.mesh, storage.offloading, group.settings, neighbours)

    def refuse_to_pickle(self) -> None:
        """Refuse what belongs to this process.

        Raises:
            FSDPNotImplementedError: communication memory of the process group's.
        """
        if isinstance(self.settings.custom_all_gather, OURS) or isinstance(self.settings.custom_reduce_scatter, OURS):
            raise FSDPNotImplementedError(
                "a module with set_allocate_memory_from_process_group_for_comm or set_symm_mem_for_comm cannot be "
                "pickled, as its buffers belong to a process group: set these after unpickling."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Everything about a state that does not refer to modules. Copies share it; in pickles, meshes are written down."""

    class_name: str
    arguments: ShardArguments
    policy: ModulePolicy
    settings: dict[str, Any]
    root_settings: RootSettings
    groups: tuple[GroupFacts, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Facts:
        """Itself: nothing in here changes."""
        return self

    def __reduce__(self) -> Any:
        """With the rank, as every rank has shards of its own."""
        for group in self.groups:
            group.refuse_to_pickle()
        place = (dist.get_rank(), dist.get_world_size())
        return _unpickled_facts, (
            place,
            self.class_name,
            self.arguments,
            self.policy,
            self.settings,
            self.root_settings,
            self.groups,
        )


def _unpickled_facts(place: tuple[int, int], *facts: Any) -> Facts:
    now = (dist.get_rank(), dist.get_world_size())
    if place != now:
        raise FSDPRuntimeError(
            f"this sharded module was pickled by rank {place[0]} of {place[1]} and is unpickled by rank {now[0]} of "
            f"{now[1]}: every rank has shards of its own, pickles and unpickles them. To change the number of ranks "
            "use distributed checkpoints of its state_dict()."
        )
    return Facts(*facts)


def _unpickled_mesh(shards: bool, replicates: bool, record: MeshRecord, dims: Any, spmd: MeshRecord | None) -> Any:
    if not dist.is_initialized():
        raise FSDPRuntimeError(
            "unpickling a sharded module needs the process group that it communicates over: call "
            "torch.distributed.init_process_group() first, with as many ranks as when it was pickled."
        )
    info = _Info(record.find(), int(replicates) if shards else None, 0 if replicates else None, dims)
    return DataParallelMesh.from_info(info._replace(spmd_mesh=None if spmd is None else spmd.find()))


class _Info(NamedTuple):
    mesh: Any
    shard_mesh_dim: int | None
    replicate_mesh_dim: int | None
    dp_mesh_dims: Any
    spmd_mesh: Any = None


def _pickled_mesh(mesh: DataParallelMesh) -> Any:
    spmd = None if mesh.spmd_mesh is None else MeshRecord.of(mesh.spmd_mesh)
    facts = (
        mesh.shard_group is not None,
        mesh.replicate_group is not None,
        MeshRecord.of(mesh.device_mesh),
        mesh.dims,
        spmd,
    )
    return _unpickled_mesh, facts


def _unpickled_sharding(mesh: DataParallelMesh, partition: Partition, specs: Sequence[Any]) -> Sharding:
    made = [None if spec is None else _torch.make_spec(spec[0].find(), *spec[1:]) for spec in specs]
    return Sharding(mesh, partition, *made)


def _pickled_sharding(sharding: Sharding) -> Any:
    specs = [
        None
        if spec is None
        else (
            MeshRecord.of(spec.mesh),
            spec.placements,
            spec.tensor_meta.shape,
            spec.tensor_meta.stride,
            spec.tensor_meta.dtype,
        )
        for spec in (sharding.spec, sharding.unsharded_spec)
    ]
    return _unpickled_sharding, (sharding.mesh, sharding.partition, specs)


copyreg.pickle(DataParallelMesh, _pickled_mesh)  # type: ignore[arg-type]
copyreg.pickle(Sharding, _pickled_sharding)


class Inherited:
    """Units to prefetch, of the module that this one was copied from: by identity, until a root forms."""

    __slots__ = ("units",)

    def __init__(self, units: tuple[tuple[Identity, ...], ...]) -> None:
        self.units = units

    def resolved(self, groups: dict[Identity, FSDPParamGroup]) -> tuple[Unit, ...] | None:
        """Those that were copied along; None if none was."""
        units = (tuple(groups[each] for each in unit) for unit in self.units if all(each in groups for each in unit))
        return tuple(units) or None


def inherit(prefetch: Any) -> Inherited | None:
    """``prefetch`` as it travels."""
    if prefetch is None or isinstance(prefetch, Inherited):
        return prefetch
    return Inherited(tuple(tuple(group.identity for group in unit) for unit in prefetch))


def resolve_prefetch(states: Iterable[Any], groups: Iterable[FSDPParamGroup]) -> None:
    """Replace what ``states``, all below one root, have `Inherited` by units of ``groups``."""
    known = {group.identity: group for group in groups}
    for state in states:
        if isinstance(state.forward_prefetch, Inherited):
            state.forward_prefetch = state.forward_prefetch.resolved(known)
        if isinstance(state.backward_prefetch, Inherited):
            state.backward_prefetch = state.backward_prefetch.resolved(known)


class Recipe:
    """A state on its way: modules and parameters as Python copies them, and facts.

    Attributes:
        modules: of the state.
        uses: per group and parameter, the modules that hold it, and under which names.
        module_hooks: what hangs on the modules.
        ignored: ignored parameters below the modules.
        identities: of the groups.
        owns: whether the state's own `fully_shard` call made the group; else its weights are tied to those of another.
        forward_prefetch: see `Inherited`.
        backward_prefetch: the same in backward.
        facts: the rest.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        unit: Unit,
        owns: list[bool],
        module_hooks: ModuleHooks,
        ignored: Iterable[nn.Parameter],
        prefetch: tuple[Any, Any],
        facts: Facts,
    ) -> None:
        below = {parameter for module in modules for parameter in module.parameters()}
        self.modules = modules
        self.uses = [[param.uses for param in group.params] for group in unit]
        self.module_hooks = module_hooks
        self.ignored = [parameter for parameter in ignored if parameter in below]
        self.identities = [group.identity for group in unit]
        self.owns = owns
        self.forward_prefetch, self.backward_prefetch = map(inherit, prefetch)
        self.facts = facts

    def is_ready(self, attribute: str, state: object) -> bool:
        """Whether all modules have got their attributes, ``state`` as ``attribute`` among them."""
        uses = (use for group in self.uses for param in group for use in param)
        return all(module.__dict__.get(attribute) is state for module in self.modules) and all(
            name in module.__dict__.get("_parameters", ()) for module, name in uses
        )

    def begin(self, state: FSDPState) -> None:
        """``state`` is new, and is completed when its modules have been copied."""
        state.begin(self.modules, (), self.facts.policy, self.facts.arguments, frozenset())
        state.recipe = self
        _INCOMPLETE.states.add(state)

    def complete(self, state: FSDPState) -> bool:
        """Give ``state`` its groups, if its modules are there by now. Returns whether they are."""
        if not self.is_ready(STATE, state):
            return False
        _INCOMPLETE.states.discard(state)
        state.recipe, state.module_hooks = None, self.module_hooks
        state.unit, state.class_name = self.make_unit(), self.facts.class_name
        state.ignored_params = frozenset(self.ignored)
        state.arguments = dataclasses.replace(self.facts.arguments, ignored_params=state.ignored_params)
        prefetch: Any = (self.forward_prefetch, self.backward_prefetch)  # until the root forms
        state.forward_prefetch, state.backward_prefetch = prefetch
        for name in _COPIED:
            setattr(state, name, self.facts.settings[name])
        state.configure_root(**dataclasses.asdict(self.facts.root_settings))
        for group, owns in zip(state.unit, self.owns, strict=True):
            group.sharers.insert(0 if owns else len(group.sharers), state)  # whose settings count comes first
        state.module_hooks.attach(state)
        return True

    def make_unit(self) -> Unit:
        """Groups of the parameters that the modules hold.

        Raises:
            FSDPRuntimeError: one of them is not sharded as it was.
        """
        with torch.inference_mode(False):
            return tuple(
                self._make_group(facts, uses, identity)
                for facts, uses, identity in zip(self.facts.groups, self.uses, self.identities, strict=True)
            )

    def _make_group(self, facts: GroupFacts, uses: Sequence[Any], identity: Identity) -> FSDPParamGroup:
        name = self.facts.class_name
        module, attribute = uses[0][0]
        owner = fsdp_param_of(module._parameters[attribute])
        if owner is not None and owner.group.identity is identity:  # tied: another state was completed before
            return owner.group  # type: ignore[no-any-return]
        write_counter = WriteCounter()
        params = [self._make_param(*each, write_counter) for each in zip(facts.params, uses, strict=True)]
        group = FSDPParamGroup(params, facts.mesh, facts.offloading, write_counter=write_counter, name=name)
        group.identity = identity
        if facts.neighbours is not None:
            group.storage.post_forward = PostForwardShards(facts.mesh, facts.neighbours)
        group.configure(facts.settings)
        return group

    def _make_param(
        self, facts: ParamFacts, uses: Sequence[tuple[nn.Module, str]], write_counter: WriteCounter
    ) -> FSDPParam:
        module, name = uses[0]
        found = module._parameters[name]
        spec = facts.sharding.spec
        if (
            not isinstance(found, DTensor)
            or found.shape != spec.tensor_meta.shape
            or tuple(found.placements) != tuple(spec.placements)
        ):
            raise FSDPRuntimeError(
                f"parameter '{facts.fqn}' of {self.facts.class_name} was copied before the module that it is sharded "
                "with, while it was unsharded; copy that module first, or call reshard() on it before."
            )
        if found.device_mesh is not spec.mesh:  # pickled along, without its process groups; shared with other tensors
            _torch.revive_mesh(found.device_mesh, spec.mesh)
        param = FSDPParam.of_sharded(
            facts.fqn, uses, found, facts.sharding, facts.policy, facts.shape, write_counter, self.facts.class_name
        )
        param.arrived_dtype = facts.arrived_dtype
        return param


def shared_in_copies(groups: Iterable[FSDPParamGroup]) -> list[object]:
    """What copies of parameters have in common: specs and meshes."""
    specs = [_torch.spec_of(param.sharded) for group in groups for param in group.params]
    return [*specs, *(spec.mesh for spec in specs)]


def refuse_to_copy(group: FSDPParamGroup) -> None:
    """Refuse a group that cannot be copied now.

    Raises:
        FSDPRuntimeError: gradients wait for a reduction.
    """
    reducer = group.reducer
    if reducer.owes_gradients():
        raise FSDPRuntimeError(
            f"'{group.name}' cannot be copied or pickled while gradients wait for their reduction, as they would be "
            "lost: do it after a backward that reduces, or call reset_iter_state()."
        )


_COPIED = ("reshard_after_forward", "reshard_after_backward", "is_captured")


class _Incomplete(threading.local):
    """Copies that wait for modules: their own, or others that hold weights tied to theirs. Of this thread's making."""

    def __init__(self) -> None:
        self.states: WeakSet[FSDPState] = WeakSet()


_INCOMPLETE = _Incomplete()


def complete_copies() -> list[FSDPState]:
    """Complete the copies that have got all of their modules by now, and return them."""
    return [state for state in list(_INCOMPLETE.states) if state.recipe.complete(state)]


def rest_for_copy(state: FSDPState) -> None:
    """Let ``state`` come to rest before its modules are copied or pickled.

    Raises:
        FSDPRuntimeError: inside a forward or backward, or gradients would be lost.
    """
    root = state.root
    if root is not None:
        root.recover_if_failed()
        if root.is_running():
            raise FSDPRuntimeError(
                f"'{state.name}' cannot be copied or pickled inside a forward or backward of {root.name}, or "
                "before finalize_backward(); do it between iterations."
            )
        root.finish()
    state.quiesce()
    state.adopt_replaced()
    for group in state.unit:
        refuse_to_copy(group)


def recipe_of(state: FSDPState) -> Recipe:
    """What travels of ``state``; of a copy that is not complete, what it has come as."""
    if state.recipe is not None:
        return state.recipe  # type: ignore[no-any-return]
    facts = Facts(
        state.class_name,
        dataclasses.replace(state.arguments, ignored_params=frozenset()),
        state.policy,
        {name: getattr(state, name) for name in _COPIED},
        state.root_settings,
        tuple(map(GroupFacts.of, state.unit)),
    )
    prefetch = (state.forward_prefetch, state.backward_prefetch)
    owns = [group.sharers[0] is state for group in state.unit]
    return Recipe(state.modules, state.unit, owns, state.module_hooks, state.ignored_params, prefetch, facts)


RECIPE_OF.fill(recipe_of)
ON_ROOT.append(resolve_prefetch)
