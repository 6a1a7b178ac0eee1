"""What the tests on one GPU share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp2 import fully_shard
from tests.harness.models import ModelCase

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]
"""The ``pytestmark`` of their files."""


def shard(case: ModelCase, model: nn.Module) -> nn.Module:
    """``model``, with each unit of ``case`` sharded over all ranks."""
    for unit in case.units(model):
        fully_shard(unit)
    return model
