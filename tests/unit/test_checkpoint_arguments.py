"""Every public callable of `fsdp2.checkpoint`, given what it does not take: one of our errors, nothing was touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2.checkpoint as checkpoint
from fsdp2 import FSDPTypeError, FSDPValueError, fully_shard
from tests.harness.fake import FakeWorlds

WRONG: list[Any] = [math.nan, torch.ones(2), object(), {"a": 1}, nn.Linear, -1, True, 2.5]
NOT_WRONG: dict[str, tuple[type, ...]] = {
    "shared": (dict,),
    "per_rank": (dict,),
    "state_dict": (dict,),
    "strict": (bool,),
    "cast": (bool,),
    "rename": (type,),
    "only": (object,),  # a function, or patterns, of whatever kind
    "optimizer": (),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


CALLS: dict[str, Callable[[nn.Module, Path], dict[str, Any]]] = {
    "save": lambda m, p: {
        "path": p / "x",
        "model": m,
        "optimizer": optimizer(m),
        "shared": {},
        "per_rank": {},
        "step": 3,
        "process_group": None,
    },
    "load": lambda m, p: {
        "path": p / "x",
        "model": m,
        "optimizer": optimizer(m),
        "shared": {},
        "per_rank": {},
        "strict": True,
        "rename": None,
        "cast": False,
        "verify": "first",
        "per_rank_missing": "keep",
        "process_group": None,
    },
    "Checkpoints": lambda m, p: {
        "run": p / "x",
        "model": m,
        "optimizer": [optimizer(m)],
        "shared": None,
        "per_rank": None,
        "keep_last": 3,
        "keep_every": 10,
        "process_group": None,
    },
    "load_full": lambda m, p: {
        "model": m,
        "state_dict": m.state_dict(),
        "source": "every rank",
        "strict": True,
        "rename": None,
        "cast": False,
        "budget_bytes": 10,
    },
    "iter_full_parameters": lambda m, p: {"model": m, "budget_bytes": 10, "dtype": torch.float64, "rank": 0},
    "load_safetensors": lambda m, p: {
        "model": m,
        "folder_or_file": p / "x",
        "rename": None,
        "cast": True,
        "strict": True,
    },
    "save_safetensors": lambda m, p: {
        "model": m,
        "folder": p / "y",
        "dtype": torch.bfloat16,
        "max_file_bytes": 100,
        "rename": None,
    },
}


def test_all_are_here() -> None:
    others = {name for name in checkpoint.__all__ if name.startswith("Checkpoint") and name != "Checkpoints"}
    assert set(checkpoint.__all__) == {*CALLS, *others, "SaveFailed", "LoadReport", "RandomState"}


@pytest.mark.parametrize("name", CALLS)
def test_what_it_does_not_take(name: str, tmp_path: Path) -> None:
    module = model()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    good = CALLS[name](module, tmp_path)
    for argument in good:
        for wrong in WRONG:
            if argument in NOT_WRONG and isinstance(wrong, NOT_WRONG[argument]):
                continue
            with pytest.raises((FSDPTypeError, FSDPValueError), match=argument):
                result = getattr(checkpoint, name)(**{**good, argument: wrong})
                list(result) if name == "iter_full_parameters" else None
    with pytest.raises(FSDPTypeError, match="no_such"):
        getattr(checkpoint, name)(**good, no_such=1)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert not [*tmp_path.iterdir()]


def test_simulated_ranks_are_refused(simulate: FakeWorlds, tmp_path: Path) -> None:
    simulate(4, rank=0)
    module = model()
    fully_shard(module)
    with pytest.raises(checkpoint.CheckpointError, match="a fake one of 4 ranks"):
        checkpoint.save(tmp_path / "x", module)
    with pytest.raises(checkpoint.CheckpointError, match="a fake one of 4 ranks"):
        checkpoint.Checkpoints(tmp_path / "x", module)
