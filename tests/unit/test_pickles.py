"""What pickles of sharded modules keep by place is part of their format, and another format is refused."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp2 import FSDPRuntimeError, MixedPrecisionPolicy, RowBlocks, fully_shard
from fsdp2.features.copies import modules
from tests.harness import fake_world


def pickled() -> bytes:
    """A model with as much to say of itself as there is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[0], mp_policy=half, reshard_after_forward=2)
    fully_shard(model[1], shard_placement_fn=rows_in_blocks)
    fully_shard(model)
    return pickle.dumps(model)


def rows_in_blocks(parameter: nn.Parameter) -> RowBlocks:
    return RowBlocks(3)


class Classes(pickle.Unpickler):
    """Notes the classes of fsdp2 that it finds."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: set[type] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if isinstance(found, type) and module.startswith("fsdp2."):
            self.found.add(found)
        return found


def is_by_place(kind: type) -> bool:
    return issubclass(kind, tuple) or (dataclasses.is_dataclass(kind) and "__slots__" in vars(kind))


def test_the_format_knows_all_that_is_kept_by_place() -> None:
    with fake_world(4):
        unpickler = Classes(pickled())
        unpickler.load()
    kept = {kind for kind in unpickler.found if is_by_place(kind)}
    assert len(kept) >= 5
    assert kept <= set(modules.BY_PLACE)


def test_another_format_is_refused_with_the_remedy() -> None:
    with fake_world(4):
        data = pickled()
        assert isinstance(pickle.loads(data), nn.Sequential)
        with (
            mock.patch.object(modules, "_format", lambda: "another"),
            pytest.raises(FSDPRuntimeError, match=r"pickled by an earlier fsdp2, or a later one.*state_dict\(\)"),
        ):
            pickle.loads(data)
