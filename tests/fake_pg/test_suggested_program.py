"""The program that `fsdp2.suggest` prints: it runs as it is, with a model, a loss and batches."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import CPUOffloadPolicy, Estimate
from fsdp2.tools.estimating.estimate import names_of
from fsdp2.tools.estimating.hardware import hardware_of
from fsdp2.tools.estimating.program import program
from fsdp2.tools.estimating.request import Request
from fsdp2.tools.estimating.suggest import Suggestion, Suggestions
from tests.harness import fake_world


def request_of(batch: Any, **changes: Any) -> Request:
    shape = changes.pop("mesh_shape", (4,))
    given: dict[str, Any] = {
        "make_model": make_model,
        "mesh_shape": shape,
        "mesh_dim_names": names_of(shape),
        "batch": batch,
        "optimizer": torch.optim.AdamW,
        "strategy": "zero3",
        "hardware": hardware_of("cpu"),
        "mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "checkpointing": "none",
        "accumulation": 1,
        "kept": "unsharded",
        "compiled": False,
    }
    rest = dict.fromkeys(("offload_policy", "blocks", "shard", "loss", "activation_bytes", "matmul_dtype"))
    return Request(**{**rest, **given, **changes})


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


@fake_world(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("by_name", [False, True])
def test_it_runs(mesh_shape: tuple[int, ...], accumulation: int, by_name: bool) -> None:
    rows: list[int] = []
    outputs: list[torch.Tensor] = []

    def loss_of(output: torch.Tensor, *batch: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        rows.append((*batch, *named.values())[0].shape[0])
        outputs.append(output.detach())
        return output.float().square().sum()

    batch, mine = torch.empty(16, 8), torch.ones(4, 8)
    text = program(request_of({"input": batch} if by_name else batch, mesh_shape=mesh_shape, accumulation=accumulation))
    batches = [{"input": mine} if by_name else (mine,)] * 2
    names: dict[str, Any] = {"make_model": make_model, "loss_of": loss_of, "batches": batches}
    exec(text, names)  # as a user would run it
    model = names["model"]
    assert rows == [4 // accumulation] * 2 * accumulation, "of this rank"
    assert not any(each.is_meta for each in model.parameters())
    assert outputs[0].isfinite().all(), "initialized (what the fake group reduces is arbitrary)"
    assert all(names["optimizer"].state[each]["step"] == 2 for each in model.parameters())
    assert f"# 4 of the 16 samples of all ranks. Start it by torchrun, {4} processes." in text


def test_what_it_says_of_gpus_and_offloading() -> None:
    offloaded = request_of(torch.empty(8, 8), hardware=hardware_of("h100-8x"), offload_policy=CPUOffloadPolicy())
    text = program(offloaded)
    assert "import os\n" in text and 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in text
    assert 'model.to_empty(device="cpu")' in text and "offload_policy=fsdp2.CPUOffloadPolicy()" in text
    own = program(request_of(torch.empty(8, 8), optimizer=lambda parameters: torch.optim.SGD(parameters)))
    assert "optimizer = make_optimizer(list(model.parameters()))  # yours" in own
    assert "optimizer" not in program(request_of(torch.empty(8, 8), optimizer=None))
    assert "torch.optim.AdamW(model.parameters(), fused=True)" in program(request_of(torch.empty(8, 8), fused=True))


class Layer(nn.Module):
    """A class of blocks."""


def test_what_it_says_of_policies_and_blocks() -> None:
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False)
    text = program(request_of(torch.empty(8, 8), mp_policy=policy, blocks=(Layer,)))
    assert (
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False)"
        in text
    )
    assert "blocks=['Layer']" in text
    assert "blocks=[]" in program(request_of(torch.empty(8, 8), blocks=()))
    device = {"hardware": hardware_of("h100-8x")}
    offloaded = program(request_of(torch.empty(8, 8), offload_policy=CPUOffloadPolicy(), **device))
    assert 'setattr(module, name, buffer.to("cuda"))' in offloaded
    partly = CPUOffloadPolicy(parameters=False, gradients=True)
    text = program(request_of(torch.empty(8, 8), offload_policy=partly, **device))
    assert 'model.to_empty(device="cuda")' in text and "parameters=False, gradients=True" in text


def test_zero1_and_zero2_that_need_the_same_are_one_line() -> None:
    some: Estimate = fsdp2.estimate(make_model, 2, batch=torch.empty(2, 8), hardware="cpu")
    unfit = [
        Suggestion(f"mesh_shape=8, strategy='{name}', accumulation=2", some, why)
        for name, why in (("zero1", "9 GiB"), ("zero2", "9 GiB"), ("zero3", "8 GiB"))
    ]
    lines = str(Suggestions((), (), tuple(unfit))).partition("does not fit:\n")[2].splitlines()
    assert lines == [
        "   mesh_shape=8, strategy='zero2', accumulation=2 (and with zero1, which gathers less often and has the same "
        "peak): 9 GiB",
        "   mesh_shape=8, strategy='zero3', accumulation=2: 8 GiB",
    ]


@pytest.mark.parametrize(
    ("optimizer", "can"),
    [
        (torch.optim.SGD, True),
        (lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), True),
        (lambda parameters: torch.optim.AdamW(parameters, foreach=True), False),
        (functools.partial(torch.optim.AdamW, fused=True), False),
        (torch.optim.RMSprop, False),
        (lambda parameters: torch.optim.AdamW([parameters[7]]), False),
        (None, False),
    ],
)
def test_which_optimizers_are_fused(optimizer: Any, can: bool) -> None:
    request = request_of(torch.empty(8, 8), optimizer=optimizer, hardware=hardware_of("h100-8x"))
    assert request.can_fuse() is can and not replace(request, hardware=hardware_of("cpu")).can_fuse()
