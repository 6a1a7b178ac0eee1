"""Generated code: `torch.compile` with inductor, once for each entry point, within a tolerance.

Inductor fuses and reorders sums, so that results differ from eager's in the last bits.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compiled.helpers.models import batch_of, build, loss_of, multi_rank, shard
from tests.compiled.helpers.twins import compiling, mine

TOLERANCE = 1e-5
"""Of the largest element of a tensor: small ones are differences of large ones."""


def whole(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True)


def by_method(model: nn.Module) -> Any:
    model.compile(fullgraph=True)
    return model


def by_blocks(model: nn.Module) -> Any:
    for block in model.blocks:
        block.compile(fullgraph=True)
    return model


def assert_close(found: Any, expected: Any) -> None:
    """Within `TOLERANCE`."""
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * largest)


# Full: 30 s each when nothing else runs, up to 10 minutes when the machine is busy: a C++ compiler runs.
@multi_rank(2, timeout=900)
@pytest.mark.full
@pytest.mark.parametrize("compile", [whole, by_method, by_blocks])
def test_trains_like_eager(compile: Any) -> None:
    with compiling(), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, when inductor is imported
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        first = build()
        models = [first, copy.deepcopy(first)]
        for model in models:
            shard(model)
        called = [compile(models[0]), models[1]]
        for number in range(3):
            losses = [loss_of(each(batch_of(number, dist.get_rank()))) for each in called]
            assert_close(*losses)
            for loss in losses:
                loss.backward()
            for (name, found), (_, expected) in zip(*(model.named_parameters() for model in models), strict=True):
                assert (found.grad is None) == (expected.grad is None), name
                if found.grad is not None:
                    assert_close(mine(found.grad), mine(expected.grad))
            with torch.no_grad():
                for model in models:
                    for param in model.parameters():
                        if param.grad is not None:
                            param -= 1e-5 * param.grad
                            param.grad = None
