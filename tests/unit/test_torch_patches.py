"""The warning of patches of torch's implementation, which are without effect here."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
from torch import nn

from fsdp2 import fully_shard
from fsdp2.features import torch_patches
from tests.harness import FakeWorlds

GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def test_nothing_is_said_of_torchs_own(simulate: FakeWorlds) -> None:
    importlib.import_module(GROUP)
    torch_patches.warn_of_patches.cache_clear()
    simulate(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(nn.Linear(4, 4))


def test_patches_are_named_at_the_first_call(simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch) -> None:
    def replacement(*args: Any) -> None:
        """Of the program's."""

    group = importlib.import_module(GROUP)
    collectives = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    monkeypatch.setattr(group.FSDPParamGroup, "unshard", replacement)
    monkeypatch.setattr(group.FSDPParamGroup, "is_sharded", property(replacement), raising=False)
    monkeypatch.setattr(collectives, "foreach_reduce", replacement)
    torch_patches.warn_of_patches.cache_clear()
    simulate(2)
    with pytest.warns(UserWarning, match=r"FSDPParamGroup.is_sharded, FSDPParamGroup.unshard, foreach_reduce .*never"):
        fully_shard(nn.Linear(4, 4))
    fully_shard(nn.Linear(4, 4))
