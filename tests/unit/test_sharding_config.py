"""`ShardingConfig` by itself: what it refuses, and that files hold all of it."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPError,
    FSDPRuntimeError,
    FSDPTypeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    OffloadPolicy,
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


DRAWN: dict[str, Draw] = {
    "mesh_shape": some(None, (-1,), (8,), (2, -1), (2, 4)),
    "device_type": some(None, "cpu"),
    "strategy": some("zero1", "zero2", "zero3", "replicate", None),
    "reshard_after_forward": some(None, True, False, 4),
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
    "blocks": names("Block", "Llama", "true"),
    "max_bytes": some(2**20, 2**31, 3 * 10**9),
    "min_bytes": some(0, 1, 2**20),
    "settings": some(
        {},
        {"prefetch_budget": 2**28, "gradient_reduction": 0.5, "reduce_scatter_unused_params": True},
        {"prefetch_budget": None, "recovery": {"on_error": "drop_step", "abort_together": True}},
    ),
}


def drawn(seed: int) -> ShardingConfig:
    draw = random.Random(seed)
    return ShardingConfig(**{name: value(draw) for name, value in DRAWN.items() if draw.random() < 0.4})


def test_every_setting_is_drawn() -> None:
    assert {each.name for each in dataclasses.fields(ShardingConfig)} == set(DRAWN)


@pytest.mark.parametrize("seed", range(40))
def test_files_hold_all_of_it(seed: int, tmp_path: Path) -> None:
    config = drawn(seed)
    for name in ("a.json", "a.yaml", "a.yml"):
        assert ShardingConfig.from_file(config.to_file(tmp_path / name)) == config
    assert ShardingConfig.from_dict(config.to_dict()) == config


def test_the_default_is_an_empty_file(tmp_path: Path) -> None:
    assert ShardingConfig().to_dict() == {}
    assert str(ShardingConfig()) == "all settings are as by default"
    for text in ("", "{}", "# nothing\n"):
        assert read(tmp_path, text) == ShardingConfig()


def read(folder: Path, text: str, name: str = "a.yaml") -> ShardingConfig:
    path = folder / name
    path.write_text(text)
    return ShardingConfig.from_file(path)


def test_what_people_write(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
        mesh_shape: [2, -1]
        blocks: [LlamaDecoderLayer]
        mp_policy: {param_dtype: bfloat16, reduce_dtype: torch.float32, output_dtype: null}
        offload_policy: {}
        settings: {prefetch_budget: 100}
        """,
    )
    assert config.mesh_shape == (2, -1) and config.blocks == ("LlamaDecoderLayer",)
    assert config.mp_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert config.offload_policy == CPUOffloadPolicy() and config.settings == {"prefetch_budget": 100}
    assert str(ShardingConfig(strategy="zero1", min_bytes=3)) == "strategy: zero1\nmin_bytes: 3"


# By what is wrong: a file, and what the error says.
REFUSED: dict[str, tuple[str, str]] = {
    "an unknown setting": (
        "strategy: zero3\nstratgy: zero1\n",
        "a ShardingConfig has no setting 'stratgy'. Did you mean 'strategy'? There are: mesh_shape, device_type",
    ),
    "no name": ("3: 4\n", "a ShardingConfig has no setting 3."),
    "an unknown strategy": ("strategy: zero4\n", "ShardingConfig takes one of 'replicate', 'zero1'"),
    "an unknown dtype": (
        "mp_policy: {param_dtype: bf17}\n",
        "'mp_policy.param_dtype' takes the name of a dtype of torch, got 'bf17'",
    ),
    "no dtype": (
        "mp_policy_of: {head: {param_dtype: nn}}\n",
        "'mp_policy_of.head.param_dtype' takes the name of a dtype of torch, got 'nn'",
    ),
    "a number": (
        "mp_policy: {param_dtype: 16}\n",
        "MixedPrecisionPolicy takes a dtype or None as 'param_dtype', got 16",
    ),
    "an integer dtype": ("mp_policy: {param_dtype: int8}\n", "must be a floating-point dtype, got torch.int8"),
    "a setting of a policy": (
        "mp_policy_of:\n  head:\n    param_dtyp: bfloat16\n",
        "'mp_policy_of.head' has no setting 'param_dtyp'. Did you mean 'param_dtype'?",
    ),
    "a value in the place of a policy": (
        "mp_policy: bf16\n",
        "'mp_policy' takes a mapping from the arguments of MixedPrecisionPolicy, got 'bf16'",
    ),
    "a value in the place of policies": (
        "mp_policy_of: [bf16]\n",
        "ShardingConfig takes a mapping from names as 'mp_policy_of', got ['bf16']",
    ),
    "a contradiction in a policy": (
        "offload_policy: {gradients: false}\n",
        "CPUOffloadPolicy(parameters=True, gradients=False)",
    ),
    "a size with a unit": ("max_bytes: 1 GiB\n", "ShardingConfig takes an int as 'max_bytes', got '1 GiB'"),
    "a name by itself": ("blocks: Block\n", "ShardingConfig takes an iterable, each a str or None as 'blocks'"),
    "a setter that there is not": (
        "settings: {prefetch_buget: 3}\n",
        "'settings' has no setting 'prefetch_buget'. Did you mean 'prefetch_budget'?",
    ),
    "a list": ("- strategy\n", "takes a mapping from names as 'settings', got ['strategy']"),
    "no YAML": ("a: [1\n", "cannot be read: while parsing a flow sequence"),
}


@for_each("what", list(REFUSED))
def test_errors_name_the_file_the_setting_and_what_was_expected(what: str, tmp_path: Path) -> None:
    text, said = REFUSED[what]
    with pytest.raises(FSDPValueError) as raised:
        read(tmp_path, text)
    assert said in str(raised.value) and str(tmp_path / "a.yaml") in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FSDPValueError, match=r"the config .*no\.json cannot be read: .*No such file"):
        ShardingConfig.from_file(tmp_path / "no.json")
    with pytest.raises(FSDPValueError, match=r"a\.json cannot be read: .*line 2"):
        read(tmp_path, '{"min_bytes": 1,\n}', "a.json")


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without(name: str) -> Any:
        raise ImportError(name)

    config, path = ShardingConfig(strategy="zero1"), tmp_path / "a.yaml"
    monkeypatch.setattr(importlib, "import_module", without)
    for use in (config.to_file, ShardingConfig.from_file):
        with pytest.raises(FSDPRuntimeError, match=r"YAML needs PyYAML: pip install 'fsdp2\[tools\]', or use a \.json"):
            use(path)
    assert ShardingConfig.from_file(config.to_file(tmp_path / "a.json")) == config


PYTHON: dict[str, tuple[Mapping[str, Any], type[FSDPError], str]] = {
    "a function": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype_override_fn=lambda parameter: None)},
        FSDPValueError,
        "a function, which no file can hold",
    ),
    "no policy": ({"mp_policy_of": {"a": "bf16"}}, FSDPTypeError, "each to a MixedPrecisionPolicy"),
    "a keyword": ({"strateg": 1}, FSDPTypeError, "takes no argument 'strateg'"),
    "no shape": ({"mesh_shape": (2.5,)}, FSDPTypeError, "takes an iterable, each an int or None as 'mesh_shape'"),
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
