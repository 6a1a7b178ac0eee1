"""A `ShardingConfig` on a model: which parameters its patterns mean, and the settings of modules that it makes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2.api.module import FSDPModule
from fsdp2.arguments import nearest
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.state import state_of
from fsdp2.errors import FSDPValueError
from fsdp2.grouping.config import ShardingConfig, default_of

Value = TypeVar("Value")

_SETTERS = {
    "reshard_after_backward": "set_reshard_after_backward",
    "prefetch_budget": "set_prefetch_budget",
    "backward_prefetch": "set_backward_prefetch",
    "gradient_reduction": "set_gradient_reduction",
    "reduce_scatter_unused_params": "set_reduce_scatter_unused_params",
    "reduce_scatter_max_input_buffers": "set_reduce_scatter_max_input_buffers",
    "separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
    "keep_unsharded_storage": "set_keep_unsharded_storage",
    "communication_memory_pool": "set_communication_memory_pool",
    "on_divergence": "set_divergence",
}
"""The methods of the outermost module that are called with a field's value, where that is not the default."""

_SETTERS_OF_EACH = {
    "force_sum_reduction_for_comms": "set_force_sum_reduction_for_comms",
    "allocate_memory_from_process_group": "set_allocate_memory_from_process_group_for_comm",
}
"""The same, of every sharded module."""


# ---- names and patterns -----------------------------------------------------------------------------


class Names:
    """The modules and parameters of a model by name, tied ones by all of theirs; and what patterns mean of them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]

    def refuse_idle(self, patterns: Iterable[str], setting: str) -> None:
        """Refuse a pattern that fits nothing.

        Raises:
            FSDPValueError: naming it, and the nearest name.
        """
        every = [*self._modules, *self.parameters]
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in every):
                raise FSDPValueError(
                    f"ShardingConfig: '{setting}' has the pattern '{pattern}', which fits no module and no parameter "
                    f"of the model.{nearest(pattern, every)} A pattern is compared with whole names: '*.{pattern}' "
                    "means it wherever it is."
                )

    def refuse_idle_of_modules(self, patterns: Iterable[str], setting: str) -> None:
        """The same, of patterns that mean modules.

        Raises:
            FSDPValueError: naming it, and the nearest name.
        """
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self._modules):
                raise FSDPValueError(
                    f"ShardingConfig: '{setting}' has the pattern '{pattern}', which fits no module of the model."
                    f"{nearest(pattern, self._modules)}"
                )


def _around(name: str) -> Iterator[str]:
    """``name``, and the modules around it, innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def fits(pattern: str, name: str) -> bool:
    """Whether ``pattern`` means what has this name: it fits the name, or that of a module around it."""
    return any(fnmatch.fnmatchcase(each, pattern) for each in _around(name))


def first_fit(table: Iterable[tuple[str, Value]], name: str) -> Value | None:
    """What the first pattern that means ``name`` stands for; None if none does."""
    return next((value for pattern, value in table if fits(pattern, name)), None)


# ---- functions of parameters, which are equal if they say the same -------------------------------------


@dataclass(frozen=True)
class PolicyByName:
    """An ``mp_policy`` for one group: policies by pattern.

    Attributes:
        prefix: the name of the group's module in the model.
        default: of parameters that no pattern means.
        table: patterns and policies.
    """

    prefix: str
    default: MixedPrecisionPolicy
    table: tuple[tuple[str, MixedPrecisionPolicy], ...]

    def __call__(self, fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        """The policy of a parameter by its name below the group's module.

        Only parameters that have the policy of the group's module say how its inputs, outputs and buffers are cast.
        """
        found = first_fit(self.table, f"{self.prefix}.{fqn}" if self.prefix else fqn) or self.default
        if found == self.of_module:
            return found
        return replace(found, cast_forward_inputs=False, output_dtype=None, buffer_dtype=None)

    @property
    def of_module(self) -> MixedPrecisionPolicy:
        """What says how inputs, outputs and buffers of the group's module are cast, whatever parameters it has."""
        return first_fit(self.table, self.prefix) or self.default


@dataclass(frozen=True)
class PlacementByName:
    """A ``shard_placement_fn``: placements by pattern.

    Attributes:
        table: patterns and placements.
        of_parameters: what they mean. Weak: whole parameters must not outlive their sharding here.
    """

    table: tuple[tuple[str, Any], ...]
    of_parameters: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacementByName:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacementByName, (self.table,)

    def __call__(self, parameter: nn.Parameter) -> Any:
        """The placement of a parameter; None if no pattern means it."""
        return self.of_parameters.get(parameter)


# ---- arguments and settings -------------------------------------------------------------------------


_BESIDE = {
    "mesh": "mesh_shape",
    "shard_placement_fn": "shard_placement",
    "ignored_params": "ignored_params",
}


def refuse_twice(config: ShardingConfig, given: Mapping[str, Any]) -> None:
    """Refuse arguments of `auto_shard` that the config has said already.

    Raises:
        FSDPValueError: naming one.
    """
    for name in given:
        setting = _BESIDE.get(name, name)
        if hasattr(config, setting) and getattr(config, setting) != default_of(setting):
            raise FSDPValueError(
                f"auto_shard got '{name}' beside a config that says '{setting}: {getattr(config, setting)}'. Say it in "
                f"one place: dataclasses.replace(config, {setting}=...), or leave it out of the config."
            )


def arguments_of(config: ShardingConfig, model: nn.Module) -> dict[str, Any]:
    """What `auto_shard` is called with for ``config``, without functions of one group. May make process groups.

    Raises:
        FSDPValueError: a pattern that fits nothing, a mesh that does not fit.
    """
    names = Names(model)
    for setting in ("ignored_params", "mp_policy_of", "shard_placement"):
        names.refuse_idle(getattr(config, setting), setting)
    names.refuse_idle_of_modules(config.no_unshard_in_backward, "no_unshard_in_backward")
    made: dict[str, Any] = {
        "strategy": config.strategy,
        "reshard_after_forward": config.reshard_after_forward,
        "offload_policy": config.offload_policy,
        "dp_mesh_dims": config.dp_mesh_dims,
        "mp_policy": config.mp_policy,
        "blocks": config.blocks,
        "max_bytes": config.max_bytes,
        "min_bytes": config.min_bytes,
    }
    if config.mesh_shape is not None:
        made["mesh"] = _mesh_of(config, model)
    if config.ignored_params:
        patterns = config.ignored_params
        made["ignored_params"] = [
            each for name, each in names.parameters.items() if any(fits(pattern, name) for pattern in patterns)
        ]
    if config.shard_placement:
        table = tuple(config.shard_placement.items())
        placement = PlacementByName(table)
        for name, each in reversed(names.parameters.items()):  # of tied ones the first name counts
            placement.of_parameters[each] = first_fit(table, name)
        made["shard_placement_fn"] = placement
    return made


def _mesh_of(config: ShardingConfig, model: nn.Module) -> Any:
    """A new mesh; or that of before, if the model is sharded, so that a second call makes no more process groups."""
    state = state_of(model)
    if state is not None:
        mesh = state.mesh.device_mesh if state.mesh.spmd_mesh is None else state.mesh.spmd_mesh
        shape = config.mesh_shape or ()
        if len(shape) == mesh.ndim and all(size in (-1, mesh.size(dim)) for dim, size in enumerate(shape)):
            return mesh
    return config.make_mesh()


def policy_for(config: ShardingConfig | None, name: str, policy: Any) -> Any:
    """The ``mp_policy`` of the group whose module has this name."""
    if config is None or not config.mp_policy_of:
        return policy
    return PolicyByName(name, policy, tuple(config.mp_policy_of.items()))


def apply_settings(config: ShardingConfig, model: nn.Module) -> None:
    """Call the setters for all that is not as by default. All ranks must call: some make process groups.

    Raises:
        FSDPError: what the setters raise; or a pattern of ``no_unshard_in_backward`` means no sharded module.
    """
    root: Any = model
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for pattern in config.no_unshard_in_backward:
        if not any(fits(pattern, name) for name in sharded):
            raise FSDPValueError(
                f"ShardingConfig: 'no_unshard_in_backward' has the pattern '{pattern}', which means no module that is "
                f"sharded by itself: those are {', '.join(map(repr, filter(None, sharded))) or 'none but the model'}."
            )
    for name, method in _SETTERS.items():
        if getattr(config, name) != default_of(name):
            getattr(root, method)(getattr(config, name))
    if not (config.check_replica_parameters and config.check_replica_buffers):
        root.set_replica_check(config.check_replica_parameters, config.check_replica_buffers)
    if config.on_error != default_of("on_error") or config.abort_together:
        root.set_recovery(config.on_error, config.abort_together)
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for setting, method in _SETTERS_OF_EACH.items():
            if getattr(config, setting) != default_of(setting):
                getattr(module, method)(getattr(config, setting))
        if config.symm_mem:
            module.set_symm_mem_for_comm()
        if any(fits(pattern, name) for pattern in config.no_unshard_in_backward):
            module.set_unshard_in_backward(False)
