"""`compile_report`, `prepare_compile`, and what is said where a graph breaks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from tests.compiled.helpers.models import batch, build, shard
from tests.compiled.helpers.twins import compiling
from tests.harness import FakeWorlds


def inputs() -> torch.Tensor:
    return batch(torch.Generator())


def test_what_was_captured_and_resharded(simulate: FakeWorlds) -> None:
    simulate(8)
    model = build()
    shard(model)
    assert not fsdp2.compile_report(model).is_complete
    with compiling() as graphs:
        compiled = torch.compile(model, backend=graphs.backend(), fullgraph=True)
        compiled(inputs()).sum().backward()
        report = fsdp2.compile_report(compiled)
        assert report.is_complete
        again = {group.name: group.gathers_again for group in report.groups}
        assert again.pop(report.groups[0].name) is False, "the root, kept by default"
        assert set(again.values()) == {True}
        assert "captured, resharded after forward (reshard_after_forward=None, and it is not the root)" in str(report)
        model.set_reshard_after_forward(False)
        compiled(inputs()).sum().backward()
        assert {group.gathers_again for group in fsdp2.compile_report(model).groups} == {False}
    assert not fsdp2.compile_report(copy.deepcopy(model)).is_complete, "a copy was never compiled"


class Broken(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        torch._dynamo.graph_break()
        return y * 2


def test_a_graph_break_is_reported(simulate: FakeWorlds) -> None:
    simulate(8)
    model = build()
    model.blocks[1] = Broken(model.blocks[1])
    shard(model)
    with compiling() as graphs:
        compiled = torch.compile(model, backend=graphs.backend())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compiled(inputs()).sum().backward()
        for name in ("Model", "blocks.1"):
            found = [str(each.message) for each in said if f"'{name}' is called from a compiled" in str(each.message)]
            assert len(found) == 1 and "outside of its graph" in found[0]
        report = {group.name: group for group in fsdp2.compile_report(compiled).groups}
        assert not report["blocks.1"].captured and "graph break" in report["blocks.1"].why
        assert report["blocks.0"].captured and report["blocks.2"].captured
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            compiled(inputs())


def test_a_function_needs_preparation(simulate: FakeWorlds) -> None:
    simulate(8)
    model = build()
    shard(model)
    with compiling() as graphs:

        @torch.compile(backend=graphs.backend(), fullgraph=True)
        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().sum()

        with pytest.raises(Exception, match="prepare_compile"):
            loss_of(inputs())
        for _ in range(2):
            fsdp2.prepare_compile(model)
            loss_of(inputs()).backward()
        assert graphs.collectives() == [(4, 0), (3, 4)]
    assert model.head.weight.grad is not None


def test_what_cannot_be_reported_or_prepared(simulate: FakeWorlds) -> None:
    simulate(8)
    with pytest.raises(fsdp2.FSDPValueError, match="no module of Linear"):
        fsdp2.compile_report(nn.Linear(2, 2))
    with pytest.raises(fsdp2.FSDPTypeError, match="takes a Module as 'model', got 3"):
        fsdp2.compile_report(3)  # type: ignore[arg-type]
    with pytest.raises(fsdp2.FSDPTypeError, match="was not called on this Linear"):
        fsdp2.prepare_compile(nn.Linear(2, 2))
    model = nn.Linear(4, 4)
    fully_shard(model, offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(fsdp2.FSDPNotImplementedError, match="offload"):
        fsdp2.prepare_compile(model)
