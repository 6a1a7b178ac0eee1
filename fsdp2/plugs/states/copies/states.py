"""Deep copies of sharded modules: what a copy takes of a state, and how the state is made again from it.

`nn.Module` copies its attributes one by one, in an order of its own, so a state arrives in pieces: as a `Record`, whose
modules and parameters Python copies, and whose `Facts` say the rest. Once all of its modules have arrived the state is
made as `fully_shard` makes it, but from parameters that are sharded already. Nothing is communicated. A group is copied
empty, so that prefetch lists and tied weights refer to one object; a state that holds its parameters fills it.
"""

from __future__ import annotations

import copyreg
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.buffers import Offloading
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.hooks import STATE, StateDictHook
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.options import GroupSettings
from fsdp2.core.param import FSDPParam, WriteCounter
from fsdp2.core.prefetch import Unit
from fsdp2.core.root import ON_ROOT
from fsdp2.core.state import FSDPState, state_of
from fsdp2.errors import FSDPRuntimeError
from fsdp2.plugs.memory.reshard_to_fewer import PostForwardShards

_COPIED = ("class_name", "reshard_after_forward", "reshard_after_backward", "in_full_precision", "is_captured")


class GroupFacts(NamedTuple):
    """What a group is made from, beside the parameters that modules hold, and the settings of its user.

    Attributes:
        params: the original group's parameters.
        mesh, offloading, settings: those of the original group; settings as they are outside of any block.
        neighbours: how many ranks it reshards to after forward; None: all.
    """

    params: tuple[FSDPParam, ...]
    mesh: DataParallelMesh
    offloading: Offloading
    settings: GroupSettings
    neighbours: int | None

    @classmethod
    def of(cls, group: FSDPParamGroup) -> GroupFacts:
        """The facts of ``group``."""
        post_forward = group.storage.post_forward
        neighbours = None if post_forward is None else post_forward.mesh.shard_size
        settings = group.settings if group.settings_outside is None else group.settings_outside
        return cls(group.params, group.mesh, group.storage.offloading, settings, neighbours)

    def make(self, group: FSDPParamGroup, uses: Sequence[Any], name: str) -> None:
        """Fill the empty ``group`` with parameters. ``uses``: for each, the modules that hold it, and its names there.

        Raises:
            FSDPRuntimeError: one of them is not sharded as the original is.
        """
        counter = WriteCounter()
        with torch.inference_mode(False):
            params = [_made_param(*each, counter, name) for each in zip(self.params, uses, strict=True)]
            FSDPParamGroup.__init__(group, params, self.mesh, self.offloading, write_counter=counter, name=name)
            if self.neighbours is not None:
                group.storage.post_forward = PostForwardShards(self.mesh, self.neighbours)
            group.configure(self.settings)


def _made_param(
    fixed: FSDPParam, uses: Sequence[tuple[nn.Module, str]], write_counter: WriteCounter, group_name: str
) -> FSDPParam:
    module, name = uses[0]
    found, spec = module._parameters[name], fixed.sharding.spec
    if (
        not isinstance(found, DTensor)
        or found.shape != spec.tensor_meta.shape
        or tuple(found.placements) != tuple(spec.placements)
    ):
        raise FSDPRuntimeError(
            f"parameter '{fixed.fqn}' of {group_name} was copied before the module that it is sharded "
            "with, while it was unsharded; copy that module first, or call reshard() on it before."
        )
    if found.device_mesh is not spec.mesh:  # an equal mesh of an earlier model, out of one of DTensor's caches
        _torch.revive_mesh(found.device_mesh, spec.mesh)
    explicit, dtype = fixed.grad_dtype
    if explicit:  # copies of a tensor do not keep it
        found.grad_dtype = dtype
    param = FSDPParam.of_sharded(
        fixed.fqn, uses, found, fixed.sharding, fixed.policy, fixed.shape, write_counter, group_name
    )
    param.arrived_dtype = fixed.arrived_dtype
    return param


class Facts:
    """All that a state has and that does not refer to modules. Copies share it.

    Attributes:
        made_from: arguments of `FSDPState`.
        attributes: attributes of the state.
        groups: the facts of the groups of its unit.
    """

    def __init__(self, made_from: tuple[Any, ...], attributes: dict[str, Any], groups: tuple[GroupFacts, ...]) -> None:
        self.made_from = made_from
        self.attributes = attributes
        self.groups = groups

    def __deepcopy__(self, memo: dict[int, Any]) -> Facts:
        """Itself, as nothing in here changes."""
        return self


class Record:
    """What a copy takes of a state. Python copies the modules and parameters in it.

    Attributes:
        modules: the modules of the state.
        groups: the groups of its unit.
        uses: per group and parameter, the modules that hold it, and under which names.
        owns: per group, whether the state's own `fully_shard` call made it; else its weights are tied to another's.
        ignored: ignored parameters below the modules.
        attributes: attributes of the state that refer to modules or groups.
        facts: the rest.
    """

    def __init__(self, state: FSDPState) -> None:
        below = {parameter for module in state.modules for parameter in module.parameters()}
        self.modules = state.modules
        self.groups = state.unit
        self.uses = [[param.uses for param in group.params] for group in state.unit]
        self.owns = [group.sharers[0] is state for group in state.unit]
        self.ignored = [parameter for parameter in state.ignored_params if parameter in below]
        names = ("module_hooks", "forward_prefetch", "backward_prefetch")
        self.attributes = {name: getattr(state, name) for name in names}
        copied = {name: getattr(state, name) for name in _COPIED} | state.attributes_outside
        # Copies share the facts, so these must not refer to parameters: ignored ones are copied above.
        self.facts = Facts(
            (state.policy, dataclasses.replace(state.arguments, ignored_params=frozenset())),
            {"_root_settings": state.root_settings, **copied},
            tuple(map(GroupFacts.of, state.unit)),
        )

    def is_ready(self, state: FSDPState) -> bool:
        """Whether all modules have been copied far enough: they have their parameters, and ``state``."""
        uses = (use for group in self.uses for param in group for use in param)
        return all(module.__dict__.get(STATE) is state for module in self.modules) and all(
            name in module.__dict__.get("_parameters", ()) for module, name in uses
        )

    def make(self, state: FSDPState) -> None:
        """Make ``state`` from the modules that have been copied.

        Raises:
            FSDPRuntimeError: a parameter is not sharded as the original is.
        """
        facts, ignored = self.facts, frozenset(self.ignored)
        name = facts.attributes["class_name"]
        for each, group, uses in zip(facts.groups, self.groups, self.uses, strict=True):
            if _is_empty(group):  # else its weights are tied, and another state has filled it
                each.make(group, uses, name)
        policy, arguments = facts.made_from
        arguments = dataclasses.replace(arguments, ignored_params=ignored)
        state.begin(self.modules, self.groups, policy, arguments, ignored)
        # `begin` sets defaults, so copied attributes come after it.
        vars(state).update(facts.attributes, **self.attributes)
        for group, owns in zip(self.groups, self.owns, strict=True):
            if owns:  # the first sharer's settings count
                group.sharers.insert(0, group.sharers.pop())
        for hook in state.module_hooks.hooks:
            hook.state = state


class _Incomplete(threading.local):
    """Copies that wait for modules: their own, or others with tied weights. Only those that this thread makes."""

    def __init__(self) -> None:
        self.states: WeakSet[FSDPState] = WeakSet()


_INCOMPLETE = _Incomplete()


def _arriving() -> FSDPState:
    """A state whose ``record`` arrives next; it gets everything else when its modules have been copied."""
    # Empty until `Record.make` begins it.
    state = FSDPState.__new__(FSDPState)
    _INCOMPLETE.states.add(state)
    return state


def complete_copies() -> list[FSDPState]:
    """Make and return the states all of whose modules have been copied by now."""
    made = []
    for state in list(_INCOMPLETE.states):
        record = vars(state).get("record")
        if record is not None and record.is_ready(state):
            _INCOMPLETE.states.discard(state)
            del vars(state)["record"]
            record.make(state)
            made.append(state)
    return made


def _is_empty(group: FSDPParamGroup) -> bool:
    return "params" not in vars(group)


def _forget_missing(states: Iterable[Any], groups: Iterable[FSDPParamGroup]) -> None:
    """Drop from prefetch lists what does not exist any more, when a root forms.

    A copy lacks units that did not become part of it. A module that was unwrapped has no groups; one that was sharded
    anew has others, which take the place of the old ones.
    """
    for state in states:
        for name in ("forward_prefetch", "backward_prefetch"):
            units = getattr(state, name)
            if units is not None:
                now = [_present(unit) for unit in units]
                setattr(state, name, tuple(unit for unit in now if unit is not None) or None)


def _present(unit: Unit) -> Unit | None:
    if any(map(_is_empty, unit)):
        return None
    for group in unit:
        if not any(_has_group(sharer, group) for sharer in group.sharers):
            # Its modules were sharded anew, so another state has their parameters.
            state = state_of(group.sharers[0].modules[0])
            return None if state is None else state.unit
    return unit


def _has_group(state: FSDPState, group: FSDPParamGroup) -> bool:
    return group in state.unit and state_of(state.modules[0]) is state


def rest_for_copy(state: FSDPState) -> None:
    """Bring ``state`` to rest before its modules are copied.

    Raises:
        FSDPRuntimeError: a forward or backward is running, or gradients that wait for a reduction would be lost.
    """
    root = state.root
    if root is not None:
        recover_if_failed(root)
        if root.is_running():
            raise FSDPRuntimeError(
                f"'{state.name}' cannot be copied inside a forward or backward of {root.name}, or before "
                "finalize_backward(); do it between iterations."
            )
        root.finish()
    state.quiesce()
    state.adopt_replaced()
    for group in state.unit:
        group.refuse_loan("copies")
        if group.reducer.owes_gradients():
            raise FSDPRuntimeError(
                f"'{group.name}' cannot be copied while gradients wait for their reduction, as they would be lost: "
                "do it after a backward that reduces, or call reset_iter_state()."
            )


def _reduced_state(state: FSDPState) -> Any:
    record = vars(state).get("record")  # a copy that is not complete yet passes on the record that it was made from
    return _arriving, (), {"record": Record(state) if record is None else record}


def _reduced_group(group: FSDPParamGroup) -> Any:
    return copyreg.__newobj__, (FSDPParamGroup,)  # type: ignore[attr-defined]


def _reduced_hook(hook: StateDictHook) -> Any:
    """Leave out the state: a part of a sharded module can be copied without the rest."""
    return StateDictHook, (None, hook.adopts)


copyreg.pickle(FSDPState, _reduced_state)
copyreg.pickle(FSDPParamGroup, _reduced_group)
copyreg.pickle(StateDictHook, _reduced_hook)
ON_ROOT.append(_forget_missing)
