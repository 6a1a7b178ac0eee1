"""`auto_shard(model, config)`: each setting arrives where the argument or the setter of its name would have put it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2
import fsdp2.core.options
from fsdp2 import FSDPModule, FSDPTypeError, FSDPValueError, MixedPrecisionPolicy, ShardingConfig, auto_shard
from fsdp2.core.state import FSDPState, state_of
from tests.harness.fake import FakeWorlds

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FP32 = MixedPrecisionPolicy(torch.float32)


@pytest.fixture(autouse=True)
def world(simulate: FakeWorlds) -> None:
    simulate(4, rank=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def state(model: nn.Module, name: str = "") -> FSDPState:
    found = state_of(model.get_submodule(name))
    assert found is not None
    return found


def sharded(**settings: Any) -> Model:
    return auto_shard(Model(), ShardingConfig(blocks=("Block",), min_bytes=0, **settings))


def test_groups_strategy_and_mesh() -> None:
    model = sharded(strategy="zero2", mesh_shape=(2, -1))
    names = [name for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    assert names == ["", "layers.0", "layers.1"]
    mesh = state(model).mesh
    assert (mesh.replicate_size, mesh.shard_size) == (2, 2)
    assert mesh.device_mesh.mesh_dim_names == ("replicate", "shard") and mesh.device_mesh.device_type == "cpu"
    assert not state(model, "layers.0").reshard_after_forward and state(model, "layers.0").reshard_after_backward


def test_setters() -> None:
    settings = {
        "prefetch_budget": 77,
        "backward_prefetch": "after",
        "gradient_reduction": "sum",
        "reduce_scatter_max_input_buffers": 3,
        "reduce_scatter_unused_params": True,
        "force_sum_reduction_for_comms": True,
        "keep_unsharded_storage": True,
        "reshard_after_backward": False,
        "replica_check": {"buffers": False},
        "recovery": {"on_error": "drop_step"},
        "divergence": "join",
    }
    model = sharded(settings=settings)
    root = state(model).root_settings
    assert (root.prefetch_bytes, root.backward_prefetch, root.divergence) == (77, "after", "join")
    assert (root.compares_parameters, root.compares_buffers, root.on_error) == (True, False, "drop_step")
    for name in ("", "layers.0", "layers.1"):
        (group,) = state(model, name).unit
        found = group.settings
        assert (found.divide_factor, found.max_pending, found.zeros_for_unused) == (1.0, 3, True)
        assert found.only_sums and found.keeps_unsharded_storage
        assert state(model, name).reshard_after_backward is False
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize(
    ("setting", "value", "where"),
    [
        ("separate_reduce_scatter_group", True, "has_scatter_group"),
        pytest.param(
            "communication_memory_pool",
            True,
            "pools_memory",
            marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="the pool needs torch 2.13"),
        ),
        ("gradient_reduction", 8, "denominator"),
        ("reduce_scatter_max_input_buffers", 2, "max_pending"),
    ],
)
def test_each_setting_alone(setting: str, value: Any, where: str) -> None:
    model = sharded(settings={setting: value})
    root, (group,) = state(model).root_settings, state(model, "layers.0").unit
    assert getattr(root if hasattr(root, where) else group.settings, where) == value
    before = fsdp2.core.options.RootSettings() if hasattr(root, where) else fsdp2.core.options.GroupSettings()
    assert getattr(before, where) != value


def test_offloading_and_strategies() -> None:
    model = sharded(offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=False), strategy="zero1")
    assert state(model).arguments.offload_policy == fsdp2.CPUOffloadPolicy(pin_memory=False)
    assert state(model, "layers.0").reshard_after_backward is None
    for strategy in ("replicate", "zero3"):
        assert state(sharded(strategy=strategy)).arguments.strategy == strategy
    kept = sharded(reshard_after_forward=2)
    assert state(kept, "layers.0").arguments.reshard_after_forward == (True, 2)


def test_policies_by_pattern_and_how_groups_cast() -> None:
    model = sharded(mp_policy=BF16, mp_policy_of={"*.norm": FP32, "head": MixedPrecisionPolicy()})
    dtypes = {
        name: param.param_dtype
        for unit in ("layers.0", "")
        for group in state(model, unit).unit
        for param in group.params
        for name in [param.fqn]
    }
    assert {name.rpartition(".")[0]: dtype for name, dtype in dtypes.items()} == {
        "up": torch.bfloat16,
        "norm": torch.float32,
        "head": torch.float32,
    }
    policy = state(model, "layers.0").policy
    assert policy.inputs is not None and policy.inputs.dtype is torch.bfloat16
    assert auto_shard(model, ShardingConfig(**_said(mp_policy_of={"*.norm": FP32, "head": MixedPrecisionPolicy()})))
    with pytest.raises(FSDPValueError, match="mp_policy"):
        auto_shard(model, ShardingConfig(**_said(mp_policy_of={"*.norm": FP32})))


def _said(**more: Any) -> dict[str, Any]:
    return {"blocks": ("Block",), "min_bytes": 0, "mp_policy": BF16, **more}


def test_ignored_parameters() -> None:
    config = ShardingConfig(**_said(ignored_params=("*.norm.*",)))
    model = auto_shard(Model(), config)
    found = dict(model.named_parameters())
    assert isinstance(found["layers.0.up.weight"], DTensor)
    assert not isinstance(found["layers.1.norm.weight"], DTensor)
    assert auto_shard(model, config) is model, "a second call changes nothing"


def test_whole_parameters_do_not_outlive_their_sharding() -> None:
    model = Model()
    before = weakref.ref(model.head.weight)
    auto_shard(model, ShardingConfig(**_said(mp_policy_of={"head": FP32})))
    gc.collect()
    assert before() is None
    policy = state(model).arguments.mp_policy
    assert copy.deepcopy(policy) == policy == pickle.loads(pickle.dumps(policy))


def test_a_second_call_makes_no_groups() -> None:
    config = ShardingConfig(**_said(mesh_shape=(2, 2), ignored_params=("head",)))
    model = auto_shard(Model(), config)
    count = len(torch.distributed.distributed_c10d._world.pg_map)
    assert auto_shard(model, config) is model
    assert len(torch.distributed.distributed_c10d._world.pg_map) == count
    with pytest.raises(FSDPValueError, match="max_bytes"):
        auto_shard(model, ShardingConfig(**_said(mesh_shape=(2, 2), ignored_params=("head",), max_bytes=999)))


def test_a_mesh_of_ones_own_and_what_cannot_be_written_down() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("mine",))
    config = ShardingConfig(blocks=("Block",), min_bytes=0, strategy="zero1")
    model = auto_shard(Model(), mesh, config=config, shard_placement_fn=lambda parameter: Shard(0))
    assert state(model).mesh.device_mesh is mesh
    with pytest.raises(FSDPTypeError, match="a config twice"):
        auto_shard(Model(), config, config=config)
    with pytest.raises(FSDPValueError, match="auto_shard got 'strategy' beside a config that says 'strategy: zero1'"):
        auto_shard(Model(), config, strategy="zero2")
    with pytest.raises(FSDPValueError, match="auto_shard got 'mesh' beside a config that says 'mesh_shape"):
        auto_shard(Model(), mesh, config=ShardingConfig(mesh_shape=(4,)))
    with pytest.raises(FSDPTypeError, match="mesh must be a DeviceMesh"):
        auto_shard(Model(), "zero2")  # type: ignore[type-var]
    with pytest.raises(FSDPTypeError, match=r"groups are chosen in an nn\.Module"):
        auto_shard([Model()], config)  # type: ignore[type-var]


def test_patterns_that_mean_nothing() -> None:
    for setting, value in (
        ("mp_policy_of", {"hed": BF16}),
        ("ignored_params", ("hed",)),
    ):
        with pytest.raises(FSDPValueError, match=f"'{setting}' has the pattern 'hed'.*Did you mean 'head'"):
            sharded(**{setting: value})
    with pytest.raises(FSDPValueError, match=r"mesh_shape=\(3, -1\) does not fit 4 ranks"):
        sharded(mesh_shape=(3, -1))


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sharding.yaml"
    path.write_text("strategy: zero1\nblocks: [Block]\nmin_bytes: 0\n")
    model = auto_shard(Model(), ShardingConfig.from_file(path))
    assert isinstance(model.layers[0], FSDPModule) and not state(model).reshard_after_forward
