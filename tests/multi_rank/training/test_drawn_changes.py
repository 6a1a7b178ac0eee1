"""Drawn programs that replace, tie, add and remove parameters and modules between any two calls: right, or an error."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, FSDPRuntimeError, fully_shard
from tests.harness import multi_rank, others_full
from tests.harness.compare import gather
from tests.harness.shared.ways import WAYS

PROGRAMS = 60
REFUSALS = (FSDPRuntimeError, "modified by an inplace operation", "already been freed", "does not require grad")
"""Errors of ours, and autograd's own where values that a graph has saved were written."""

OFTEN = ("forward", "forward", "evaluate", "backward", "clone", "swap", "assign", "load", "freeze", "thaw")
SELDOM = ("replace", "replace module", "tie", "untie", "no bias", "bias", "new parameter", "append", "write", "step")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


def sharded(way: str) -> nn.Module:
    model = layers()
    for index in () if way == "default" else (0, 2) if way == "keep" else (0, 2, 3):
        fully_shard(model[index], **WAYS[way]())
    return fully_shard(model, **WAYS[way]())


class Program:
    """One drawn program; ``ranks``: whose batches its model sees."""

    def __init__(self, seed: int, ranks: list[int]) -> None:
        self._draw = random.Random(seed)
        self._values = torch.Generator().manual_seed(seed)
        self._ranks = ranks
        self._loss: Tensor | None = None

    def run(self, model: Any) -> list[dict[str, Tensor]]:
        """Gradients and values after each step."""
        seen = []
        for _ in range(self._draw.randint(2, 4)):
            for _ in range(self._draw.randint(2, 6)):
                kind = self._draw.choice(OFTEN if self._draw.random() < 0.85 else SELDOM)
                self._do(kind, model, self._draw.choice([0, 2, 3]), self._draw.choice([0, 2, 3]))
            self._do("backward", model, 0, 0)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            named = list(model.named_parameters())
            seen.append({name: gather(each.grad) for name, each in named if each.grad is not None})
            seen.append({name: gather(each.detach()) for name, each in named})
        return seen

    def _new(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=self._values))

    def _linear(self, *, bias: bool) -> nn.Linear:
        made = nn.Linear(4, 4, bias=bias)
        made.weight = self._new(4, 4)
        if bias:
            made.bias = self._new(4)
        return made

    def _do(self, kind: str, model: Any, first: int, second: int) -> None:
        one, other = model[first], model[second]
        if kind == "forward":
            loss = sum(model(batch(rank)).square().mean() for rank in self._ranks) / len(self._ranks)
            self._loss = loss if self._loss is None else self._loss + loss
        elif kind == "evaluate":
            with torch.no_grad():
                model(batch(7))
        elif kind == "backward":
            if self._loss is not None:
                self._loss.backward()
            self._loss = None
        elif kind == "step":
            with torch.no_grad():
                for each in model.parameters():
                    each.grad is None or each.sub_(each.grad, alpha=0.1)
            model.zero_grad()
        elif kind == "load":
            model.load_state_dict({name: each.detach() * 1.5 for name, each in model.state_dict().items()})
        elif kind == "assign":
            halves = {name: each.detach() * 0.5 for name, each in model.state_dict().items()}
            model.load_state_dict(halves, assign=True)
        elif kind == "clone":
            one.weight = nn.Parameter(one.weight.detach().clone())
        elif kind == "swap":
            one.weight, other.weight = other.weight, one.weight
        elif kind in ("freeze", "thaw"):
            one.requires_grad_(kind == "thaw")
        elif kind == "replace":
            one.weight = self._new(4, 4)
        elif kind == "replace module":
            model[first] = self._linear(bias=True)
        elif kind == "tie":
            one.weight = other.weight
        elif kind == "untie":
            one.weight = nn.Parameter(gather(one.weight.detach()))
        elif kind == "no bias":
            one.bias = None
        elif kind == "bias":
            one.bias = self._new(4)
        elif kind == "new parameter":
            one.extra = self._new(4, 4)
        elif kind == "append" and len(model) < 6:
            model.append(self._linear(bias=False))
        elif kind == "write":
            with torch.no_grad():
                one.weight.mul_(0.5)


def batch(rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))


def is_refusal(error: BaseException) -> bool:
    return any(each in str(error) if isinstance(each, str) else isinstance(error, each) for each in REFUSALS)


@multi_rank(2)
@pytest.mark.parametrize("first", others_full(range(0, PROGRAMS, 20), [0]))  # 2 s each
@pytest.mark.parametrize("way", WAYS)
def test_drawn_programs_are_right_or_raise(way: str, first: int) -> None:
    refused = right = 0
    for seed in range(first, first + 20):
        expected = None
        with contextlib.suppress(RuntimeError):  # a program that is wrong without sharding, too
            expected = Program(seed, [0, 1]).run(layers())
        found = None
        try:
            found = Program(seed, [dist.get_rank()]).run(sharded(way))
        except RuntimeError as error:
            assert is_refusal(error), f"program {seed}: {error}"
            refused += 1
        told: list[Any] = [None, None]
        dist.all_gather_object(told, found is None)
        assert told[0] == told[1], f"program {seed}: one rank raises, the other does not"
        if expected is None or found is None:
            assert found is None, f"program {seed}: wrong without sharding, and nothing is said with it"
            continue
        right += 1
        for mine, reference in zip(found, expected, strict=True):
            assert mine.keys() == reference.keys(), f"program {seed}"
            for name, values in mine.items():
                assert torch.allclose(values, reference[name], rtol=1e-4, atol=1e-5), f"program {seed}: {name}"
    assert right and refused
