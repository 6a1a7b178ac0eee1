"""``install()``: programs that import FSDP1 from torch get this wrapper, and torch's own modules know it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as public
import torch.distributed.fsdp._flat_param as flat_param
import torch.distributed.fsdp.fully_sharded_data_parallel as defining
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fsdp2
from fsdp2.compat import install
from fsdp2.compat.fsdp1 import (
    FlatParameter,
    FlatParamHandle,
    FlatParamShardMetadata,
    FullyShardedDataParallel,
    ParamInfo,
    SharedParamInfo,
    StateDictType,
)
from tests.harness import FakeWorlds, multi_rank

# Other tests have imported torch's class by name, for comparison.
pytestmark = pytest.mark.filterwarnings("ignore:fsdp2.compat.install.. comes too late")


@pytest.mark.full
def test_names_are_replaced_and_put_back(simulate: FakeWorlds) -> None:
    torchs = public.FullyShardedDataParallel
    with install() as swap:
        assert public.FullyShardedDataParallel is FullyShardedDataParallel
        assert public.sharded_grad_scaler.ShardedGradScaler is fsdp2.ShardedGradScaler
        assert "torch.distributed.fsdp.FullyShardedDataParallel -> fsdp2.compat.fsdp1" in str(swap)
        simulate(2)
        model: Any = public.FullyShardedDataParallel(nn.Linear(2, 2))
        assert type(model) is FullyShardedDataParallel
        assert type(model) is defining.FullyShardedDataParallel  # as Accelerate asks
        assert public.FullyShardedDataParallel.fsdp_modules(model) == [model]
        with install() as inner:
            assert inner.replacements == []
        assert public.FullyShardedDataParallel is FullyShardedDataParallel
    assert public.FullyShardedDataParallel is defining.FullyShardedDataParallel is torchs
    with install(fsdp1=False):
        assert public.FullyShardedDataParallel is torchs
        with install():
            assert public.FullyShardedDataParallel is FullyShardedDataParallel
        assert public.FullyShardedDataParallel is torchs


def test_the_names_of_flat_parameters() -> None:
    before = {name: getattr(flat_param, name) for name in flat_param.__all__}
    with install():
        assert {name for name in flat_param.__all__ if getattr(flat_param, name) is before[name]} == {
            "HandleShardingStrategy"  # an enum, which is torch's own object here
        }
        assert flat_param.ParamInfo is ParamInfo and flat_param.SharedParamInfo is SharedParamInfo
        assert flat_param.FlatParamShardMetadata is FlatParamShardMetadata
        for cls in (flat_param.FlatParameter, flat_param.FlatParamHandle, FlatParameter, FlatParamHandle):
            with pytest.raises(fsdp2.FSDPTypeError, match=f"{cls.__name__} cannot be made: fsdp2 does not flatten"):
                cls(torch.ones(2))
            assert not isinstance(nn.Parameter(torch.ones(2)), cls)
    assert {name: getattr(flat_param, name) for name in flat_param.__all__} == before
    for name in ("FlatParamShardMetadata", "ParamInfo", "SharedParamInfo"):
        assert getattr(fsdp2.compat.fsdp1, name)._fields == before[name]._fields  # torch may fill in ours


@multi_rank(2)
@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device", "ignore:Multiple backends are registered")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_that_torch_wrapped_before_go_on(world_size: int) -> None:
    theirs = public.FullyShardedDataParallel  # torch's, as a program holds it that was imported too early
    sizes: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    before = theirs(nn.Sequential(theirs(nn.Linear(3, 5), **sizes), nn.Linear(5, 2)), **sizes)
    with pytest.warns(UserWarning, match="a Linear that torch's FullyShardedDataParallel has wrapped"):
        swap = install()
    with swap:
        ours = public.FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
        late = theirs(nn.Linear(3, 5), **sizes)
        for model, cls in ((before, theirs), (late, theirs), (ours, FullyShardedDataParallel)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            assert isinstance(model, cls)
            assert len(defining.FullyShardedDataParallel.fsdp_modules(model)) == len(cls.fsdp_modules(model)) > 0
            weights, state = get_state_dict(model, optimizer)
            assert weights.keys() == state["state"].keys() and not any("_fsdp" in name for name in weights)
            with theirs.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                assert cls.get_state_dict_type(model).state_dict_type is StateDictType.SHARDED_STATE_DICT
        assert isinstance(late._handle.flat_param, flat_param.FlatParameter)
    assert isinstance(late._handle.flat_param, flat_param.FlatParameter)


@pytest.mark.parametrize("before", [False, True], ids=["imported after", "imported before"])
def test_lightning_does_not_take_wrappers_for_modules_of_fully_shard(
    before: bool, simulate: FakeWorlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks whether parameters are DTensors, and then loads whole checkpoints as DCP does."""
    package = tmp_path / "lightning_fabric" / "strategies"
    package.mkdir(parents=True)
    (package / "model_parallel.py").write_text("def _has_dtensor_modules(module):\n    return 'asked'\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_fabric"]:
        monkeypatch.delitem(sys.modules, name)
    name = "lightning_fabric.strategies.model_parallel"
    simulate(2)
    if before:
        importlib.import_module(name)
    with install():
        theirs = importlib.import_module(name)
        assert theirs._has_dtensor_modules(FullyShardedDataParallel(nn.Linear(2, 2))) is False
        assert theirs._has_dtensor_modules(nn.Linear(2, 2)) == "asked"
    assert not hasattr(theirs._has_dtensor_modules, "__wrapped__")
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "lightning_fabric"]:
        del sys.modules[loaded]


@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("full", [False, True])
def test_dcp_asks_the_wrapper(full: bool, world_size: int) -> None:
    with install():
        plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        model = public.FullyShardedDataParallel(
            nn.Sequential(*[public.FullyShardedDataParallel(each) for each in plain])
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        weights, state = get_state_dict(model, optimizer, options=options)
        names = ["0.weight", "0.bias", "1.weight", "1.bias"]
        if not full or dist.get_rank() == 0:
            assert list(weights) == names and set(state["state"]) == set(names)
        if not full:
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)


PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), device_id=torch.device("cpu"))
model(torch.ones(2, 3)).sum().backward()
print(type(model).__module__, sorted(model.state_dict()))
dist.destroy_process_group()
"""


@pytest.mark.full  # 11 s each
@pytest.mark.parametrize("ours", [False, True])
def test_the_command(ours: bool, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", "-m", "fsdp2.compat", *([] if ours else ["--keep-fsdp1"]), str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    kind = "fsdp2.compat.fsdp1.wrapper" if ours else "torch.distributed.fsdp.fully_sharded_data_parallel"
    assert f"{kind} ['0.bias', '0.weight', '1.bias', '1.weight']" in printed


WITHOUT = """
import importlib.abc, importlib.util, pathlib, sys, types

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch.distributed.fsdp.") and name.split(".")[3] != "_fully_shard":
            raise ImportError(name)

# What a torch has that has dropped FSDP1: FSDP2, which Dynamo imports, and what it takes from the files of both.
fsdp, shared = types.ModuleType("torch.distributed.fsdp"), types.ModuleType("torch.distributed.fsdp._common_utils")
shared.__getattr__ = lambda name: None
fsdp.__path__ = [str(pathlib.Path(importlib.util.find_spec("torch").origin).parent / "distributed" / "fsdp")]
sys.meta_path.insert(0, Blocked())
sys.modules |= {each.__name__: each for each in (fsdp, shared)}
import torch, torch.distributed as dist
from fsdp2.compat.fsdp1 import FullyShardedDataParallel as FSDP, ModuleWrapPolicy, ShardingStrategy, StateDictType
assert ShardingStrategy.__module__.startswith("fsdp2") and ShardingStrategy.__name__ == "ShardingStrategy"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = FSDP(torch.nn.Sequential(torch.nn.Linear(3, 3)), auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 3)).sum().backward()
model.clip_grad_norm_(1.0)
optimizer.step()
for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
    with FSDP.state_dict_type(model, kind):
        model.load_state_dict(model.state_dict())
        state = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
rest = {name.removeprefix(fsdp.__name__ + ".").split(".")[0] for name in sys.modules if fsdp.__name__ + "." in name}
others = sorted(rest - {"_fully_shard", "_common_utils"})
print("trained", others)
dist.destroy_process_group()
"""


@pytest.mark.full  # 4 s
def test_a_torch_without_fsdp1() -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.strip() == "trained []", run.stderr[-2000:]
