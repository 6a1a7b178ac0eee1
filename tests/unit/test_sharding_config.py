"""`ShardingConfig` by itself: what it refuses, and that files hold all of it."""

from __future__ import annotations

import builtins
import dataclasses
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from fsdp2 import (
    BlockShard,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPError,
    FSDPRuntimeError,
    FSDPTypeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Owned,
    RowBlocks,
    ShardingConfig,
)
from tests.unit.helpers import for_each

Draw = Callable[[random.Random], Any]


def policy(draw: random.Random) -> MixedPrecisionPolicy:
    dtypes = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return MixedPrecisionPolicy(
        *(draw.choice(dtypes) for _ in range(3)),
        draw.choice([True, False, ("x",), ("mask", "x")]),
        buffer_dtype=draw.choice(dtypes),
        cache_shards=draw.random() < 0.5,
        grad_dtype=draw.choice(dtypes),
    )


def some(*values: Any) -> Draw:
    return lambda draw: draw.choice(values)


def table(value: Draw) -> Draw:
    patterns = ("head", "*.norm*", "layers.[0-3].mlp", "été", "a: b", "- c", "#d", "null")
    return lambda draw: {pattern: value(draw) for pattern in draw.sample(patterns, draw.randrange(1, 4))}


def names(*values: str) -> Draw:
    return lambda draw: tuple(draw.sample(values, draw.randrange(1, len(values))))


FLAG = some(True, False)
DRAWN: dict[str, Draw] = {
    "strategy": some("zero1", "zero2", "zero3", None),
    "mp_policy": policy,
    "mp_policy_of": table(policy),
    "offload_policy": some(
        OffloadPolicy(),
        CPUOffloadPolicy(),
        CPUOffloadPolicy(pin_memory=False),
        CPUOffloadPolicy(parameters=False, gradients=True),
        CPUOffloadPolicy(parameters=False, optimizer_state=True),
    ),
    "ignored_params": names("lora.*", "head", "*.bias"),
    "shard_placement": table(some(Shard(0), Shard(1), Shard(-1), RowBlocks(64), Owned(0), BlockShard((64,)))),
    "blocks": names("Block", "Llama", "true"),
    "max_bytes": some(2**20, 2**31, 3 * 10**9),
    "min_bytes": some(0, 1, 2**20),
    "reshard_after_backward": some(True, False, None),
    "no_unshard_in_backward": names("embed", "layers.0", "1"),
    "prefetch_budget": some(None, 0, 2**28),
    "backward_prefetch": some("before", "after", "never"),
    "gradient_reduction": some("mean", "sum", 8, 0.5, 1e-3),
    "force_sum_reduction_for_comms": FLAG,
    "reduce_scatter_unused_params": FLAG,
    "reduce_scatter_max_input_buffers": some(1, 2, 7),
    "separate_reduce_scatter_group": FLAG,
    "keep_unsharded_storage": FLAG,
    "communication_memory_pool": FLAG,
    "check_replica_parameters": FLAG,
    "check_replica_buffers": FLAG,
    "on_error": some("keep_accumulated", "drop_step"),
    "abort_together": FLAG,
    "on_divergence": some("error", "join"),
}
# Settings that depend on each other: of each line all, or none.
TOGETHER: list[dict[str, Any]] = [
    {},
    {"mesh_shape": (-1,)},
    {"mesh_shape": (8,), "mesh_dim_names": ("dp",), "device_type": "cpu"},
    {"mesh_shape": (2, -1), "reshard_after_forward": True, "strategy": "zero3", "symm_mem": True},
    {
        "mesh_shape": (2, 4, 2),
        "mesh_dim_names": ("a", "b", "tp"),
        "dp_mesh_dims": DataParallelMeshDims(shard="b", replicate="a"),
        "reshard_after_forward": 4,
        "strategy": None,
    },
    {
        "mesh_shape": (2, 4),
        "mesh_dim_names": ("a", "b"),
        "dp_mesh_dims": DataParallelMeshDims(shard=("a", "b")),
        "allocate_memory_from_process_group": True,
        "reshard_after_forward": False,
        "strategy": "zero2",
    },
]


def drawn(seed: int) -> ShardingConfig:
    draw = random.Random(seed)
    chosen = {name: value(draw) for name, value in DRAWN.items() if draw.random() < 0.4}
    return ShardingConfig(**{**chosen, **draw.choice(TOGETHER)})


def test_every_setting_is_drawn() -> None:
    fields = {each.name for each in dataclasses.fields(ShardingConfig)}
    assert fields == set(DRAWN).union(*TOGETHER)


@pytest.mark.parametrize("seed", range(40))
def test_files_hold_all_of_it(seed: int, tmp_path: Path) -> None:
    config = drawn(seed)
    for name in ("a.json", "a.yaml", "a.yml"):
        for defaults in (False, True):
            path = config.to_file(tmp_path / name, defaults=defaults)
            assert ShardingConfig.from_file(path) == config
    assert ShardingConfig.from_dict(config.to_dict()) == config
    assert ShardingConfig.from_yaml(config.to_yaml()) == ShardingConfig.from_json(config.to_json()) == config


def test_the_default_is_an_empty_file() -> None:
    assert ShardingConfig().to_dict() == {}
    assert ShardingConfig.from_json("{}") == ShardingConfig.from_yaml("") == ShardingConfig.from_yaml("# nothing\n")
    assert str(ShardingConfig()) == "all settings are as by default"
    assert set(ShardingConfig().to_dict(defaults=True)) == {each.name for each in dataclasses.fields(ShardingConfig)}


def test_what_people_write() -> None:
    config = ShardingConfig.from_yaml(
        """
        mesh_shape: 8
        blocks: LlamaDecoderLayer
        max_bytes: 1.5 GiB
        min_bytes: 64KB
        prefetch_budget: 100
        mp_policy: {param_dtype: bf16, reduce_dtype: torch.float32}
        offload_policy: true
        shard_placement: {"*.qkv": Shard(dim=1)}
        """
    )
    assert config.mesh_shape == (8,) and config.blocks == ("LlamaDecoderLayer",)
    assert (config.max_bytes, config.min_bytes, config.prefetch_budget) == (1610612736, 64000, 100)
    assert config.mp_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert config.offload_policy == CPUOffloadPolicy() and config.shard_placement == {"*.qkv": Shard(1)}
    assert str(ShardingConfig(strategy="zero1", min_bytes=3)) == "strategy: zero1\nmin_bytes: 3"


# By what is wrong: a file, and what the error says.
REFUSED: dict[str, tuple[str, str]] = {
    "an unknown setting": (
        "strategy: zero3\nstratgy: zero1\n",
        "line 2, stratgy: there is no setting 'stratgy'. Did you mean 'strategy'",
    ),
    "an unknown strategy": ("strategy: zero4\n", "line 1, strategy: ShardingConfig takes one of 'replicate', 'zero1'"),
    "an unknown dtype": (
        "mp_policy:\n  param_dtype: bf17\n",
        "line 2, mp_policy.param_dtype: there is no floating-point dtype 'bf17'. Did you mean 'bf16'",
    ),
    "an integer dtype": (
        "mp_policy:\n  param_dtype: int8\n",
        "line 2, mp_policy.param_dtype: there is no floating-point dtype 'int8'",
    ),
    "a setting of a policy": (
        "mp_policy_of:\n  head:\n    param_dtyp: bf16\n",
        "line 3, mp_policy_of.head.param_dtyp: there is no setting 'param_dtyp'. Did you mean 'param_dtype'",
    ),
    "a contradiction in a policy": (
        "\noffload_policy: {gradients: false}\n",
        "line 2, offload_policy: CPUOffloadPolicy(parameters=True, gradients=False)",
    ),
    "a size": ("max_bytes: 1 Gigabyte\n", "line 1, max_bytes: a size is a number of bytes, or '512 KiB'"),
    "a negative size": (
        "prefetch_budget: -1\n",
        "line 1, prefetch_budget: ShardingConfig takes a number of bytes, an int >= 0, or None",
    ),
    "a placement": ("shard_placement: {a: Replicate()}\n", "line 1, shard_placement.a: a placement is 'Shard(1)'"),
    "sizes that cross": (
        "max_bytes: 5\nmin_bytes: 6\n",
        "the text: ShardingConfig: min_bytes=6 and max_bytes=5 must be",
    ),
    "a mesh without names": ("mesh_shape: [2, 2, 2]\n", "more dims than (replicate, shard)"),
    "names without a mesh": ("mesh_dim_names: [a]\n", "'mesh_dim_names' is of a mesh that the config makes"),
    "two unknown sizes": ("mesh_shape: [-1, -1]\n", "line 1, mesh_shape: ShardingConfig takes sizes of mesh dims"),
    "a name that there is not": (
        "mesh_shape: [4]\nmesh_dim_names: [a]\ndp_mesh_dims: {shard: b}\n",
        "names b, and 'mesh_dim_names' is ('a',)",
    ),
    "a contradiction": ("strategy: zero2\nreshard_after_forward: true\n", "contradict each other"),
    "twice": ("min_bytes: 1\nstrategy: zero2\nmin_bytes: 2\n", "line 3: 'min_bytes' is there twice, in line 1 before"),
    "a list": ("- strategy\n", "the text: a mapping is needed here (name: value), got ['strategy']"),
    "a value in the place of a mapping": ("mp_policy: bf16\n", "line 1, mp_policy: a mapping is needed here"),
    "no bool": (
        "separate_reduce_scatter_group: 3\n",
        "line 1, separate_reduce_scatter_group: ShardingConfig takes a bool",
    ),
    "no name": ("3: 4\n", "a name must be a string, got 3"),
    "no YAML": ("a: [1\n", "this is no YAML"),
}


@for_each("what", list(REFUSED))
def test_errors_name_the_setting_and_the_line(what: str) -> None:
    text, said = REFUSED[what]
    with pytest.raises(FSDPValueError) as raised:
        ShardingConfig.from_yaml(text)
    assert said in str(raised.value)


def test_json_says_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    text = '{\n "blocks": ["a:b", "c\\"{"],\n "mp_policy": {\n  "reduce_dtype": "fp32",\n  "param_dtype": "fp33"}\n}'
    path.write_text(text)
    with pytest.raises(FSDPValueError) as raised:
        ShardingConfig.from_file(path)
    assert str(raised.value).startswith(f"{path}, line 5, mp_policy.param_dtype: ")
    with pytest.raises(FSDPValueError, match="line 3: 'min_bytes' is there twice, in line 2 before"):
        ShardingConfig.from_json('{\n"min_bytes": 1,\n"min_bytes": 1}')
    with pytest.raises(FSDPValueError, match="line 2: this is no JSON"):
        ShardingConfig.from_json('{"min_bytes": 1,\n}')


def test_files_that_are_not_there_and_other_endings(tmp_path: Path) -> None:
    with pytest.raises(FSDPValueError, match=r"the config .*no\.json cannot be read: No such file"):
        ShardingConfig.from_file(tmp_path / "no.json")
    for use in (ShardingConfig.from_file, ShardingConfig().to_file):
        with pytest.raises(FSDPValueError, match=r"ends in \.json, \.yaml or \.yml, got 'a\.toml'"):
            use(tmp_path / "a.toml")


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FSDPRuntimeError, match=r"pip install 'fsdp2\[tools\]', or use a \.json file"):
        ShardingConfig.from_yaml("a: 1")
    with pytest.raises(FSDPRuntimeError, match="PyYAML, which is not installed"):
        ShardingConfig(strategy="zero1").to_yaml()
    assert ShardingConfig.from_json('{"strategy": "zero1"}').strategy == "zero1"


PYTHON: dict[str, tuple[Mapping[str, Any], type[FSDPError], str]] = {
    "a function": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype_override_fn=lambda parameter: None)},
        FSDPValueError,
        "a function, which no file can hold",
    ),
    "no policy": ({"mp_policy_of": {"a": "bf16"}}, FSDPTypeError, "each to a MixedPrecisionPolicy"),
    "no patterns": ({"mp_policy_of": {3: MixedPrecisionPolicy()}}, FSDPTypeError, "a mapping from patterns"),
    "blocks of two sizes": ({"shard_placement": {"a": BlockShard((4, 5))}}, FSDPTypeError, r"or BlockShard\(\(n,\)\)"),
    "no placement": ({"shard_placement": {"a": "Shard(0)"}}, FSDPTypeError, r"takes Shard\(dim\), RowBlocks"),
    "a keyword": ({"strateg": 1}, FSDPTypeError, "takes no argument 'strateg'"),
    "memory twice": (
        {"symm_mem": True, "allocate_memory_from_process_group": True},
        FSDPValueError,
        "both say where communication buffers lie",
    ),
    "nothing to place": (
        {"strategy": "replicate", "shard_placement": {"a": Shard(0)}},
        FSDPValueError,
        "shards nothing, and 'shard_placement' says how",
    ),
}


@for_each("what", list(PYTHON))
def test_in_python_too(what: str) -> None:
    given, kind, said = PYTHON[what]
    with pytest.raises(kind, match=said):
        ShardingConfig(**given)


def test_it_is_frozen_and_does_not_share_what_it_was_made_of() -> None:
    given = {"a": MixedPrecisionPolicy()}
    config = ShardingConfig(mp_policy_of=given, blocks=["Block"])  # type: ignore[arg-type]
    given.clear()
    assert config.mp_policy_of and config.blocks == ("Block",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strategy = "zero1"  # type: ignore[misc]
    assert dataclasses.replace(config, strategy="zero1").blocks == ("Block",)
