"""`ShardingConfig`: what to shard how, as a value that can be written to a file and read from one.

A field is called what the argument of `fully_shard` or `auto_shard`, or the setter of `FSDPModule`, is called that it
is passed to. What cannot be written down (functions, parameters, collectives) has no field: it goes to `auto_shard`
beside the config. `configured` applies it to a model, `config_values` and `config_text` read and write it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard

from fsdp2.api.policies import OffloadPolicy, mixed_precision, offload
from fsdp2.arguments import ANYTHING, Rule, checked, checked_class, is_number, shown
from fsdp2.core.mesh import default_mesh
from fsdp2.core.options import DataParallelMeshDims, MixedPrecisionPolicy
from fsdp2.core.sharding import RowPlacement
from fsdp2.core.state import Strategy
from fsdp2.errors import FSDPTypeError, FSDPValueError
from fsdp2.grouping import config_text, config_values
from fsdp2.plugs.parameters.owned import Owned
from fsdp2.plugs.parameters.row_blocks import RowBlocks
from fsdp2.ragged.placement import is_block_shard, own_block_shard

MAX_BYTES = 2**30
MIN_BYTES = 2**20


def _names(expected: str) -> Rule:
    return Rule(expected, _are_names, lambda value: False)


def _patterns(expected: str) -> Rule:
    return Rule(expected, lambda value: value is not None and _are_names(value), lambda value: False)


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, (tuple, list)) and all(isinstance(each, str) and each for each in value))


def _is_shape(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, (tuple, list)) or not value:
        return False
    sizes = [
        each for each in value if isinstance(each, int) and not isinstance(each, bool) and (each > 0 or each == -1)
    ]
    return len(sizes) == len(value) and sizes.count(-1) <= 1


def _is_bytes(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_resharding(value: Any) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, int) and value >= 1)


def _is_reduction(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("mean", "sum")
    return is_number(value) and not isinstance(value, torch.Tensor) and 0 < float(value) < math.inf


_BYTES = Rule("a number of bytes, an int >= 0", _is_bytes, lambda value: isinstance(value, int))

RULES: dict[str, Rule] = {
    "mesh_shape": Rule(
        "sizes of mesh dims, each >= 1 (one may be -1, for all ranks that are left), or None", _is_shape
    ),
    "mesh_dim_names": _names("names of mesh dims, or None"),
    "blocks": _names("names of classes of modules, or None"),
    "ignored_params": _patterns("patterns of names of parameters or modules"),
    "no_unshard_in_backward": _patterns("patterns of names of modules"),
    "reshard_after_forward": Rule("a bool, a number of ranks >= 1, or None", _is_resharding),
    "max_bytes": _BYTES,
    "min_bytes": _BYTES,
    "prefetch_budget": Rule("a number of bytes, an int >= 0, or None", lambda value: value is None or _is_bytes(value)),
    "gradient_reduction": Rule("'mean', 'sum', or a positive number that the sum is divided by", _is_reduction),
    "reduce_scatter_max_input_buffers": Rule("an int >= 1", lambda value: _is_bytes(value) and value >= 1),
    "mp_policy": ANYTHING,
    "mp_policy_of": ANYTHING,
    "offload_policy": ANYTHING,
    "shard_placement": ANYTHING,
}
"""What annotations do not say of fields."""


@checked_class(**RULES)
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfig:
    """What to shard how, for `auto_shard`, the commands and files.

        >>> config = fsdp2.ShardingConfig(strategy="zero2", blocks=("Block",), prefetch_budget=2**28)
        >>> fsdp2.auto_shard(model, config)
        >>> config.to_file("sharding.yaml")
        >>> assert fsdp2.ShardingConfig.from_file("sharding.yaml") == config

    A *pattern* is a name with ``*`` (any characters, dots too), ``?`` and ``[...]``. It means the modules and the
    parameters whose whole name it fits, with everything inside of those modules: ``"head"``, ``"*.norm*"``,
    ``"layers.*.experts"``. Of several in a mapping the first that fits counts. One that fits nothing is refused.

    Attributes:
        mesh_shape: (shard,) or (replicate, shard), or more with ``dp_mesh_dims``; one size may be -1, all ranks that
            the others leave. None: all ranks, one dim, or the mesh that is passed to `auto_shard`.
        mesh_dim_names: None: ("shard",) and ("replicate", "shard").
        device_type: of the mesh: "cuda", "cpu". None: the accelerator if there is one, else the CPU.
        dp_mesh_dims: as in `fully_shard`.
        strategy: the same.
        reshard_after_forward: the same.
        mp_policy: the same; without ``param_dtype_override_fn``.
        mp_policy_of: policies of parameters, by pattern, in the place of ``mp_policy``. How inputs, outputs and buffers
            of a group are cast is for the policy of its module to say.
        offload_policy: as in `fully_shard`.
        ignored_params: patterns of parameters to leave alone.
        shard_placement: by pattern, how parameters are cut: ``Shard(dim)``, ``RowBlocks(rows)``, ``Owned(rank)`` or
            ``BlockShard((n,))``, whose rows of n elements are those of all dims but the last, for one.
        blocks: names of the classes whose modules are groups, as in `auto_shard`.
        max_bytes: groups above it are split.
        min_bytes: what is below it is no group.
        reshard_after_backward: `FSDPModule.set_reshard_after_backward`; None: as ``strategy`` says.
        no_unshard_in_backward: patterns of groups' modules for `FSDPModule.set_unshard_in_backward`.
        prefetch_budget: `FSDPModule.set_prefetch_budget`; bytes.
        backward_prefetch: `FSDPModule.set_backward_prefetch`.
        gradient_reduction: `FSDPModule.set_gradient_reduction`: "mean", "sum" or a number.
        force_sum_reduction_for_comms: `FSDPModule.set_force_sum_reduction_for_comms`, of all groups.
        reduce_scatter_unused_params: `FSDPModule.set_reduce_scatter_unused_params`.
        reduce_scatter_max_input_buffers: `FSDPModule.set_reduce_scatter_max_input_buffers`.
        separate_reduce_scatter_group: `FSDPModule.set_separate_reduce_scatter_group`.
        keep_unsharded_storage: `FSDPModule.set_keep_unsharded_storage`.
        communication_memory_pool: `FSDPModule.set_communication_memory_pool`.
        allocate_memory_from_process_group: `FSDPModule.set_allocate_memory_from_process_group_for_comm`.
        symm_mem: `FSDPModule.set_symm_mem_for_comm`, of all groups.
        check_replica_parameters: `FSDPModule.set_replica_check`.
        check_replica_buffers: the same.
        on_error: `FSDPModule.set_recovery`.
        abort_together: the same.
        on_divergence: `FSDPModule.set_divergence`: "error" or "join".

    Raises:
        FSDPTypeError: a setting of another type.
        FSDPValueError: one of the right type that does not fit, or settings that contradict each other.
    """

    mesh_shape: tuple[int, ...] | None = None
    mesh_dim_names: tuple[str, ...] | None = None
    device_type: str | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    strategy: Strategy | None = None
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009, frozen
    mp_policy_of: Mapping[str, MixedPrecisionPolicy] = field(default_factory=dict)
    offload_policy: OffloadPolicy | None = OffloadPolicy()  # noqa: RUF009, frozen
    ignored_params: tuple[str, ...] = ()
    shard_placement: Mapping[str, Placement | RowPlacement] = field(default_factory=dict)
    blocks: tuple[str, ...] | None = None
    max_bytes: int = MAX_BYTES
    min_bytes: int = MIN_BYTES
    reshard_after_backward: bool | None = None
    no_unshard_in_backward: tuple[str, ...] = ()
    prefetch_budget: int | None = None
    backward_prefetch: Literal["before", "after", "never"] = "before"
    gradient_reduction: str | float = "mean"
    force_sum_reduction_for_comms: bool = False
    reduce_scatter_unused_params: bool = False
    reduce_scatter_max_input_buffers: int = 1
    separate_reduce_scatter_group: bool = False
    keep_unsharded_storage: bool = False
    communication_memory_pool: bool = False
    allocate_memory_from_process_group: bool = False
    symm_mem: bool = False
    check_replica_parameters: bool = True
    check_replica_buffers: bool = True
    on_error: Literal["keep_accumulated", "drop_step"] = "keep_accumulated"
    abort_together: bool = False
    on_divergence: Literal["error", "join"] = "error"

    def __post_init__(self) -> None:
        for name in ("mesh_shape", "mesh_dim_names", "blocks", "ignored_params", "no_unshard_in_backward"):
            value = getattr(self, name)
            self._set(name, value if value is None else tuple(value))
        self._set("mp_policy", _writable(mixed_precision(self.mp_policy), "mp_policy"))
        self._set("offload_policy", offload(self.offload_policy))
        self._set("mp_policy_of", _policies(self.mp_policy_of))
        self._set("shard_placement", _placements(self.shard_placement))
        self._refuse_sizes()
        self._refuse_mesh()
        self._refuse_contradictions()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refuse_sizes(self) -> None:
        if not self.min_bytes <= self.max_bytes or not self.max_bytes:
            raise FSDPValueError(
                f"ShardingConfig: min_bytes={self.min_bytes} and max_bytes={self.max_bytes} must be 0 <= min_bytes <= "
                "max_bytes, and max_bytes above 0."
            )

    def _refuse_mesh(self) -> None:
        shape, names = self.mesh_shape, self.mesh_dim_names
        if shape is None:
            given = "mesh_dim_names" if names is not None else "device_type" if self.device_type is not None else ""
            if given:
                raise FSDPValueError(
                    f"ShardingConfig: '{given}' is of a mesh that the config makes, and there is no 'mesh_shape': "
                    "write it too (-1 is all ranks)."
                )
            return
        if names is not None and len(names) != len(shape):
            raise FSDPValueError(
                f"ShardingConfig: mesh_shape={shape} and mesh_dim_names={names} are of different lengths."
            )
        if self.dp_mesh_dims is None and len(shape) > 2:
            raise FSDPValueError(
                f"ShardingConfig: mesh_shape={shape} has more dims than (replicate, shard); name them in "
                "'mesh_dim_names', and those that are data parallel in 'dp_mesh_dims'."
            )
        if self.dp_mesh_dims is not None:
            used = (*self.dp_mesh_dims.replicate_names, *self.dp_mesh_dims.shard_names)
            missing = [name for name in used if name not in (names or ())]
            if missing:
                raise FSDPValueError(
                    f"ShardingConfig: 'dp_mesh_dims' names {', '.join(missing)}, and 'mesh_dim_names' is {names}."
                )

    def _refuse_contradictions(self) -> None:
        reshards, strategy = self.reshard_after_forward, self.strategy
        is_number_of_ranks = reshards is not None and not isinstance(reshards, bool)
        if strategy is not None and reshards is not None:
            expected = strategy == "zero3"
            if (reshards != 1 if is_number_of_ranks else reshards) is not expected:
                raise FSDPValueError(
                    f"ShardingConfig: strategy={strategy!r} and reshard_after_forward={reshards!r} contradict each "
                    "other. Leave one of them out."
                )
        if strategy == "replicate" and self.shard_placement:
            raise FSDPValueError("ShardingConfig: strategy='replicate' shards nothing, and 'shard_placement' says how.")
        if self.symm_mem and self.allocate_memory_from_process_group:
            raise FSDPValueError(
                "ShardingConfig: 'symm_mem' and 'allocate_memory_from_process_group' both say where communication "
                "buffers lie. Leave one of them out."
            )

    # -- values and text

    def to_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """What a file holds: settings by name, of strings, numbers, bools, lists and mappings.

        Args:
            defaults: also settings that are what they are by default.
        """
        chosen = [name for name in FIELDS if defaults or getattr(self, name) != default_of(name)]
        return {name: config_values.written(name, getattr(self, name)) for name in chosen}

    @classmethod
    @checked()
    def from_dict(cls, settings: Mapping[str, Any]) -> ShardingConfig:
        """The config of what `to_dict` returned, or a file holds.

        Raises:
            FSDPValueError: an unknown setting, or a value that does not fit; the setting is named.
        """
        return _from_tree(config_text.Place("ShardingConfig.from_dict"), settings)

    def to_json(self, *, defaults: bool = False) -> str:
        """As JSON."""
        return config_text.written_json(self.to_dict(defaults=defaults))

    def to_yaml(self, *, defaults: bool = False) -> str:
        """As YAML.

        Raises:
            FSDPRuntimeError: PyYAML is not installed (``pip install 'fsdp2[tools]'``).
        """
        return config_text.written_yaml(self.to_dict(defaults=defaults))

    @classmethod
    @checked()
    def from_json(cls, text: str) -> ShardingConfig:
        """Read JSON.

        Raises:
            FSDPValueError: it is not, or what `from_dict` raises, with the line.
        """
        return _from_tree(*config_text.read_json(text, "the text"))

    @classmethod
    @checked()
    def from_yaml(cls, text: str) -> ShardingConfig:
        """Read YAML.

        Raises:
            FSDPValueError: it is not, or what `from_dict` raises, with the line.
            FSDPRuntimeError: PyYAML is not installed (``pip install 'fsdp2[tools]'``).
        """
        return _from_tree(*config_text.read_yaml(text, "the text"))

    @classmethod
    @checked()
    def from_file(cls, path: str | Path) -> ShardingConfig:
        """Read a file: JSON if its name ends in ``.json``, YAML if in ``.yaml`` or ``.yml``.

        Raises:
            FSDPValueError: another ending, no such file, or what `from_dict` raises, with the line.
            FSDPRuntimeError: PyYAML is not installed (``pip install 'fsdp2[tools]'``).
        """
        source = Path(path)
        read = config_text.reader_of(source)
        try:
            text = source.read_text(encoding="utf-8")
        except OSError as error:
            raise FSDPValueError(f"the config {source} cannot be read: {error.strerror or error}.") from error
        return _from_tree(*read(text, str(source)))

    @checked()
    def to_file(self, path: str | Path, *, defaults: bool = False) -> Path:
        """Write a file, by the ending of its name as in `from_file`; what is not as by default.

        Returns:
            Where it was written.

        Raises:
            FSDPValueError: another ending.
            FSDPRuntimeError: PyYAML is not installed (``pip install 'fsdp2[tools]'``).
        """
        target = Path(path)
        write = config_text.writer_of(target)
        target.write_text(write(self.to_dict(defaults=defaults)), encoding="utf-8")
        return target

    def make_mesh(self) -> DeviceMesh | None:
        """The mesh of ``mesh_shape``; None if there is none. Makes process groups: all ranks must call.

        Raises:
            FSDPValueError: the shape does not fit the number of ranks.
            FSDPRuntimeError: no process group, and no launcher's environment to make one from.
        """
        if self.mesh_shape is None:
            return None
        everyone = default_mesh()
        shape = _filled(self.mesh_shape, everyone.size())
        names = self.mesh_dim_names or (("shard",) if len(shape) == 1 else ("replicate", "shard"))
        return init_device_mesh(self.device_type or everyone.device_type, shape, mesh_dim_names=names)

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.to_dict().items()]
        return "\n".join(lines) or "all settings are as by default"


FIELDS = tuple(each.name for each in dataclasses.fields(ShardingConfig))
"""The names of all settings."""

_FIELDS = {each.name: each for each in dataclasses.fields(ShardingConfig)}


def default_of(name: str) -> Any:
    """What a setting is by default."""
    made = _FIELDS[name].default_factory
    return _FIELDS[name].default if made is dataclasses.MISSING else made()


def _from_tree(place: config_text.Place, tree: Any) -> ShardingConfig:
    values = config_values.read(place, tree, FIELDS)
    for name, value in values.items():
        try:
            _check_alone(name, value)
        except (FSDPValueError, FSDPTypeError) as error:
            raise FSDPValueError(f"{place.within(name)}: {error}") from error
    try:
        return ShardingConfig(**values)
    except (FSDPValueError, FSDPTypeError) as error:
        raise FSDPValueError(f"{place}: {error}") from error


def _check_alone(name: str, value: Any) -> None:
    """Refuse what does not fit whatever the others are: with those that it needs."""
    needed: dict[str, Any] = {}
    if name == "mesh_dim_names" and value is not None:
        needed = {"mesh_shape": (1,) * len(value), "dp_mesh_dims": _dims_for(value)}
    elif name == "mesh_shape" and value is not None and len(value) > 2:
        names = tuple(f"dim{index}" for index in range(len(value)))
        needed = {"mesh_dim_names": names, "dp_mesh_dims": DataParallelMeshDims(shard=names[0])}
    elif name == "device_type":
        needed = {"mesh_shape": (-1,)}
    elif name in ("max_bytes", "min_bytes") and _is_bytes(value):
        needed = {"min_bytes" if name == "max_bytes" else "max_bytes": 0 if name == "max_bytes" else value or 1}
    ShardingConfig(**{**needed, name: value})


def _dims_for(names: Any) -> DataParallelMeshDims | None:
    return DataParallelMeshDims(shard=names[0]) if _are_names(names) and len(names) > 2 else None


def _filled(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """``shape`` with a number in the place of -1."""
    known = math.prod(size for size in shape if size != -1)
    filled = tuple(ranks // known if size == -1 else size for size in shape)
    if math.prod(filled) != ranks:
        raise FSDPValueError(f"ShardingConfig: mesh_shape={shape} does not fit {ranks} ranks.")
    return filled


def _writable(policy: MixedPrecisionPolicy, name: str) -> MixedPrecisionPolicy:
    if policy.param_dtype_override_fn is not None:
        raise FSDPValueError(
            f"ShardingConfig: '{name}' has a param_dtype_override_fn, a function, which no file can hold. Write dtypes "
            "by pattern in 'mp_policy_of', or pass the policy to auto_shard(model, config, mp_policy=...)."
        )
    return policy


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) and each for each in value):
        raise FSDPTypeError(f"ShardingConfig takes a mapping from patterns as '{name}', got {shown(value)}.")
    return dict(value)


def _policies(value: Any) -> dict[str, MixedPrecisionPolicy]:
    given = _mapping(value, "mp_policy_of")
    what = "ShardingConfig takes as 'mp_policy_of' a mapping from patterns, each to"
    return {name: _writable(mixed_precision(each, what), "mp_policy_of") for name, each in given.items()}


def _placements(value: Any) -> dict[str, Placement | RowPlacement]:
    given = _mapping(value, "shard_placement")
    for name, each in given.items():
        if is_block_shard(each) and len(each.block_numels) == 1:
            given[name] = own_block_shard(each)
        elif type(each) not in (Shard, RowBlocks, Owned):
            raise FSDPTypeError(
                "ShardingConfig takes Shard(dim), RowBlocks(rows), Owned(rank) or BlockShard((n,)) in "
                f"'shard_placement', got {shown(each)} for '{name}'."
            )
    return given
