"""`torch.compile` on one GPU, a world of one rank on NCCL: inductor's kernels, beside the unsharded reference."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from tests.gpu.helpers import NEEDS_CUDA, shard
from tests.harness.compare import Tolerance
from tests.harness.models import MODEL_CASES, TRANSFORMER, ModelCase
from tests.harness.reference import Reference, adamw
from tests.harness.training import assert_trains_like

pytestmark = NEEDS_CUDA

TOLERANCE = Tolerance(1e-4, 1e-5, "kernels of inductor's sum in another order, and multiply and add in one rounding")


def train(case: ModelCase, model: nn.Module, called: Any) -> None:
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, while it compiles
        assert_trains_like(
            Reference(case, world_size=1, device="cuda"), called, optimizer, steps=5, tolerance=TOLERANCE
        )


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_whole_models_equal_the_reference(case: ModelCase, mode: str | None, world_of_one: None) -> None:
    torch._dynamo.reset()
    model = shard(case, case.build())
    train(case, model, torch.compile(model, fullgraph=True, mode=mode))


@pytest.mark.parametrize("captured", [True, False], ids=["in_graphs", "eager_hooks"])
def test_blocks_equal_the_reference(captured: bool, world_of_one: None) -> None:
    torch._dynamo.reset()
    model = shard(TRANSFORMER, TRANSFORMER.build())
    fsdp2.set_graph_capture(model, captured)
    for unit in TRANSFORMER.units(model)[:-1]:
        unit.compile(fullgraph=True)
    train(TRANSFORMER, model, model)


def test_a_compiled_step_of_an_optimizer(world_of_one: None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for layer in models[0]:
        fully_shard(layer)
    fully_shard(models[0])
    ours = fsdp2.optim.local(torch.optim.AdamW, models[0].parameters(), lr=1e-3)
    plain = torch.optim.AdamW(models[1].parameters(), lr=1e-3)
    step = torch.compile(ours.step)
    for _ in range(3):
        batch = torch.randn(8, 64, device="cuda")
        for model in models:
            model(batch).square().mean().backward()
        step()
        plain.step()
        ours.zero_grad()
        plain.zero_grad()
    for found, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-6)  # type: ignore[operator]
