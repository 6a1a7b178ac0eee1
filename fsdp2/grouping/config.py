"""`ShardingConfig`: what to shard how, as a value that a JSON or YAML file holds; and what `auto_shard` makes of it.

A field is called what the argument of `auto_shard` or `fully_shard` is called that it is passed to. What a file cannot
hold (functions, parameters, meshes) has no field: it goes to `auto_shard` beside the config.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.api.module import FSDPModule
from fsdp2.api.policies import CPUOffloadPolicy, OffloadPolicy, mixed_precision, offload
from fsdp2.arguments import ANYTHING, Rule, checked, checked_class, nearest, shown
from fsdp2.core.mesh import default_mesh
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.state import Strategy, state_of
from fsdp2.errors import FSDPRuntimeError, FSDPTypeError, FSDPValueError

MAX_BYTES = 2**30
MIN_BYTES = 2**20

_MAPPING = Rule("a mapping from names", lambda value: isinstance(value, Mapping))
_SETTERS = [name.removeprefix("set_") for name in dir(FSDPModule) if name.startswith("set_")]
_OF_EACH = ("force_sum_reduction_for_comms", "allocate_memory_from_process_group_for_comm", "symm_mem_for_comm")
"""Setters that do not reach the modules below."""


@checked_class(mp_policy=ANYTHING, mp_policy_of=_MAPPING, offload_policy=ANYTHING, settings=_MAPPING)
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig:
    """What to shard how, for `auto_shard`, the commands and files.

        >>> config = fsdp2.ShardingConfig(strategy="zero2", blocks=["Block"], settings={"prefetch_budget": 2**28})
        >>> fsdp2.auto_shard(model, config)

    A *pattern* is a name with ``*`` (any characters, dots too), ``?`` and ``[...]``. It means the modules and the
    parameters whose whole name it fits, with everything inside of those modules: ``"head"``, ``"*.norm*"``. Of several
    in a mapping the first that fits counts. One that fits nothing is refused.

    Attributes:
        mesh_shape: (shard,) or (replicate, shard); one size may be -1, all ranks that the other leaves. None: all
            ranks, one dim, or the mesh that is passed to `auto_shard`.
        device_type: of that mesh: "cuda", "cpu". None: the accelerator if there is one, else the CPU.
        strategy: as in `fully_shard`.
        reshard_after_forward: the same.
        mp_policy: the same; without ``param_dtype_override_fn``.
        mp_policy_of: policies of parameters, by pattern, in the place of ``mp_policy``. How inputs, outputs and buffers
            of a group are cast is for the policy of its module to say.
        offload_policy: as in `fully_shard`.
        ignored_params: patterns of parameters to leave alone.
        blocks: names of the classes whose modules are groups, as in `auto_shard`.
        max_bytes: groups above it are split.
        min_bytes: what is below it is no group.
        settings: by the names of setters of `FSDPModule`, without ``set_``, what these are called with on the model:
            ``{"prefetch_budget": 2**28, "recovery": {"on_error": "drop_step"}}``.

    Raises:
        FSDPTypeError: a field of another type.
        FSDPValueError: a setting that there is not, a function in a policy.
    """

    mesh_shape: tuple[int, ...] | None = None
    device_type: str | None = None
    strategy: Strategy | None = None
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009, frozen
    mp_policy_of: Mapping[str, MixedPrecisionPolicy] = field(default_factory=dict)
    offload_policy: OffloadPolicy | None = OffloadPolicy()  # noqa: RUF009, frozen
    ignored_params: tuple[str, ...] = ()
    blocks: tuple[str, ...] | None = None
    max_bytes: int = MAX_BYTES
    min_bytes: int = MIN_BYTES
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        what = "ShardingConfig takes as 'mp_policy_of' a mapping from patterns, each to"
        policies = {name: mixed_precision(each, what) for name, each in self.mp_policy_of.items()}
        made = {"mp_policy": mixed_precision(self.mp_policy), "offload_policy": offload(self.offload_policy)}
        made |= {"mp_policy_of": policies, "settings": dict(self.settings)}
        for name in ("mesh_shape", "ignored_params", "blocks"):
            made[name] = value if (value := getattr(self, name)) is None else tuple(value)
        for name, value in made.items():
            object.__setattr__(self, name, value)
        _refuse_unknown(self.settings, _SETTERS, "'settings'")
        if any(each.param_dtype_override_fn is not None for each in (self.mp_policy, *policies.values())):
            raise FSDPValueError(
                "ShardingConfig got a policy with param_dtype_override_fn, a function, which no file can hold. Write "
                "dtypes by pattern in 'mp_policy_of', or pass the policy to auto_shard(model, config, mp_policy=...)."
            )

    def to_dict(self) -> dict[str, Any]:
        """What is not as by default, of strings, numbers, bools, lists and mappings: what a file holds."""
        return dict(_written(self))

    @classmethod
    @checked(settings=_MAPPING)
    def from_dict(cls, settings: Mapping[str, Any]) -> ShardingConfig:
        """The config of what `to_dict` returned, or a file holds.

        Raises:
            FSDPTypeError: a value of another type; the setting is named.
            FSDPValueError: an unknown setting, or a value that does not fit.
        """
        _refuse_unknown(settings, [each.name for each in dataclasses.fields(cls)], "a ShardingConfig")
        made, policy = dict(settings), functools.partial(_policy, MixedPrecisionPolicy)
        if "mp_policy" in made:
            made["mp_policy"] = policy(made["mp_policy"], "mp_policy")
        if isinstance(table := made.get("mp_policy_of"), Mapping):
            made["mp_policy_of"] = {name: policy(each, f"mp_policy_of.{name}") for name, each in table.items()}
        if made.get("offload_policy") is not None:
            made["offload_policy"] = _policy(CPUOffloadPolicy, made["offload_policy"], "offload_policy")
        return cls(**made)

    @classmethod
    @checked()
    def from_file(cls, path: str | Path) -> ShardingConfig:
        """Read a file: JSON if its name ends in ``.json``, else YAML.

        Raises:
            FSDPValueError: no such file, one that is neither, or what `from_dict` raises.
            FSDPRuntimeError: PyYAML is not installed (``pip install 'fsdp2[tools]'``).
        """
        source = Path(path)
        yaml = None if source.suffix == ".json" else _yaml()
        errors = (OSError, ValueError) if yaml is None else (OSError, ValueError, yaml.YAMLError)
        try:
            text = source.read_text(encoding="utf-8")
            found = json.loads(text) if yaml is None else yaml.safe_load(text)
        except errors as error:
            raise FSDPValueError(f"the config {source} cannot be read: {error}") from error
        try:
            return cls.from_dict({} if found is None else found)
        except (FSDPTypeError, FSDPValueError) as error:
            raise FSDPValueError(f"{source}: {error}") from error

    @checked()
    def to_file(self, path: str | Path) -> Path:
        """Write what is not as by default to a file, by the ending of its name as in `from_file`; its path.

        Raises:
            FSDPRuntimeError: PyYAML is not installed (``pip install 'fsdp2[tools]'``).
        """
        target, made = Path(path), self.to_dict()
        text = json.dumps(made, indent=2) if target.suffix == ".json" else _yaml().safe_dump(made, sort_keys=False)
        target.write_text(text, encoding="utf-8")
        return target

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.to_dict().items()]
        return "\n".join(lines) or "all settings are as by default"


def _yaml() -> ModuleType:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise FSDPRuntimeError("YAML needs PyYAML: pip install 'fsdp2[tools]', or use a .json file.") from error


def _refuse_unknown(given: Iterable[Any], known: list[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise FSDPValueError(
                f"{where} has no setting {name!r}.{nearest(str(name), known)} There are: {', '.join(known)}."
            )


def _policy(kind: type, given: Any, where: str) -> Any:
    """A policy of what a file holds, where dtypes are written by name."""
    if not isinstance(given, Mapping):
        raise FSDPTypeError(f"'{where}' takes a mapping from the arguments of {kind.__name__}, got {shown(given)}.")
    _refuse_unknown(given, [each.name for each in dataclasses.fields(kind)], f"'{where}'")
    made = dict(given)
    for name, value in given.items():
        if name.endswith("_dtype") and isinstance(value, str):
            made[name] = getattr(torch, value.removeprefix("torch."), None)
            if not isinstance(made[name], torch.dtype):
                raise FSDPValueError(f"'{where}.{name}' takes the name of a dtype of torch, got {value!r}.")
    return kind(**made)


def _written(value: Any) -> Any:
    if isinstance(value, (ShardingConfig, MixedPrecisionPolicy)):
        default, names = type(value)(), [each.name for each in dataclasses.fields(value)]
        changed = [name for name in names if getattr(value, name) != getattr(default, name)]
        return {name: _written(getattr(value, name)) for name in changed}
    if isinstance(value, OffloadPolicy):
        return dataclasses.asdict(value) if isinstance(value, CPUOffloadPolicy) else None
    if isinstance(value, Mapping):
        return {name: _written(each) for name, each in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


DEFAULT = ShardingConfig()

# ---- on a model -------------------------------------------------------------------------------------


def fits(pattern: str, name: str) -> bool:
    """Whether ``pattern`` means what has this name: it fits the name, or that of a module around it."""
    while name and not fnmatchcase(name, pattern):
        name = name.rpartition(".")[0]
    return bool(name)


@dataclass(frozen=True)
class PolicyByName:
    """An ``mp_policy`` for the group of the module ``prefix``: of the first pattern in ``table`` that fits a name."""

    prefix: str
    default: MixedPrecisionPolicy
    table: tuple[tuple[str, MixedPrecisionPolicy], ...]

    def __call__(self, fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        """The policy of a parameter by its name below the group's module.

        Only parameters that have the policy of the group's module say how its inputs, outputs and buffers are cast.
        """
        found = self._of(f"{self.prefix}.{fqn}" if self.prefix else fqn)
        if found == self.of_module:
            return found
        return replace(found, cast_forward_inputs=False, output_dtype=None, buffer_dtype=None)

    @property
    def of_module(self) -> MixedPrecisionPolicy:
        """What says how inputs, outputs and buffers of the group's module are cast, whatever parameters it has."""
        return self._of(self.prefix)

    def _of(self, name: str) -> MixedPrecisionPolicy:
        return next((policy for pattern, policy in self.table if fits(pattern, name)), self.default)


_PASSED = ("strategy", "reshard_after_forward", "mp_policy", "offload_policy", "blocks", "max_bytes", "min_bytes")


def arguments_of(config: ShardingConfig, model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `auto_shard` is called with for ``config`` and ``given``, but for ``mp_policy_of``. May make process groups.

    Raises:
        FSDPValueError: an argument that the config says too, a pattern that fits nothing, a mesh that does not fit.
    """
    made = {name: getattr(config, name) for name in _PASSED}
    for name, value in given.items():
        setting = "mesh_shape" if name == "mesh" else name
        said, default = getattr(config, setting, None), getattr(DEFAULT, setting, None)
        if name in ("mesh", *_PASSED) and value == getattr(DEFAULT, name, None):
            continue
        if said != default:
            raise FSDPValueError(
                f"auto_shard got '{name}' beside a config that says '{setting}: {said}'. Say it in one place: "
                f"dataclasses.replace(config, {setting}=...), or leave it out of the config."
            )
        made[name] = value
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [*(name for name, _ in model.named_modules(remove_duplicate=False) if name), *parameters]
    for setting in ("ignored_params", "mp_policy_of"):
        for pattern in getattr(config, setting):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise FSDPValueError(
                    f"ShardingConfig: '{setting}' has the pattern '{pattern}', which fits no module and no parameter "
                    f"of the model.{nearest(pattern, names)} A pattern is compared with whole names: '*.{pattern}' "
                    "means it wherever it is."
                )
    if config.mesh_shape or config.device_type:
        made["mesh"] = _mesh_of(config, model)
    if ignored := config.ignored_params:
        made["ignored_params"] = [each for name, each in parameters.items() if any(fits(one, name) for one in ignored)]
    return made


def _mesh_of(config: ShardingConfig, model: nn.Module) -> DeviceMesh:
    """A new mesh; or that of before, if the model is sharded, so that a second call makes no more process groups."""
    everyone, state, wanted = default_mesh(), state_of(model), config.mesh_shape or (-1,)
    try:
        shape = tuple(everyone.mesh.view(wanted).shape)
    except RuntimeError as error:
        raise FSDPValueError(f"ShardingConfig: mesh_shape={wanted} does not fit {everyone.size()} ranks.") from error
    if state is not None and tuple(state.mesh.device_mesh.shape) == shape:
        return state.mesh.device_mesh
    device_type, names = config.device_type or everyone.device_type, ("replicate", "shard")[-len(shape) :]
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def apply_settings(config: ShardingConfig, model: nn.Module) -> None:
    """Call the setters. All ranks must call: some make process groups."""
    for name, value in config.settings.items():
        for module in model.modules() if name in _OF_EACH else [model]:
            if isinstance(module, FSDPModule):
                setter = getattr(module, f"set_{name}")
                setter(**value) if isinstance(value, Mapping) else setter(value)
