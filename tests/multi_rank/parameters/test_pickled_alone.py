"""An unsharded parameter that is saved by itself: its values and attributes, without the rest of its group's memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import fully_shard
from tests.harness import multi_rank
from tests.harness.shared.ways import WAYS


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    assert file.tell() < 10_000
    file.seek(0)
    return torch.load(file)


def pickled(value: Any) -> Any:
    data = pickle.dumps(value)
    assert len(data) < 10_000
    return pickle.loads(data)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", [saved_and_loaded, pickled])
@multi_rank(2, 4)
def test_its_values_and_attributes(world_size: int, copied: Callable[[Any], Any], way: str) -> None:
    model: Any = nn.Linear(256, 256)
    model.bias.requires_grad_(False)
    model.bias.gain = 2.0
    expected = copy.deepcopy(model.bias)
    fully_shard(model, **WAYS[way]())
    model.unshard()
    found = copied({"bias": model.bias})["bias"]
    assert type(found) is nn.Parameter and found.gain == 2.0 and not found.requires_grad
    assert torch.equal(found, expected)
    model(torch.ones(1, 256)).sum().backward()
    model.unshard()
    assert torch.equal(copied(model.bias), expected)
