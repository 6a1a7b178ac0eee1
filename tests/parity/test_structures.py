"""Inputs and outputs of any structure: gradients find their way, and types are kept."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_same
from tests.harness.parity.implementation import API
from tests.harness.parity.programs import WIDTH, is_sharded


class Named(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Record:
    left: Tensor
    right: Tensor
    note: str = "kept"


def _nested(left: Tensor, right: Tensor) -> Any:
    return {"a": [left, ({"b": right}, "text", None, 3)]}


PACKERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda left, right: (left, right),
    "list": lambda left, right: [left, right],
    "dict": lambda left, right: {"left": left, "right": right},
    "ordered_dict": lambda left, right: collections.OrderedDict(left=left, right=right),
    "named_tuple": Named,
    "dataclass": Record,
    "nested": _nested,
}
UNPACKERS: dict[str, Callable[[Any], tuple[Tensor, Tensor]]] = {
    "tuple": lambda packed: (packed[0], packed[1]),
    "list": lambda packed: (packed[0], packed[1]),
    "dict": lambda packed: (packed["left"], packed["right"]),
    "ordered_dict": lambda packed: (packed["left"], packed["right"]),
    "named_tuple": lambda packed: (packed.left, packed.right),
    "dataclass": lambda packed: (packed.left, packed.right),
    "nested": lambda packed: (packed["a"][0], packed["a"][1][0]["b"]),
}
KINDS = pytest.mark.parametrize("kind", list(PACKERS))


class Step(nn.Module):
    """Takes and returns two tensors, packed in one way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, 13)
        self.second = nn.Linear(13, WIDTH)
        self.seen: list[tuple[type, set[torch.dtype]]] = []

    def forward(self, packed: Any) -> Any:
        left, right = UNPACKERS[self.kind](packed)
        self.seen.append((type(packed), {left.dtype, right.dtype}))
        return PACKERS[self.kind](self.second(torch.tanh(self.first(left))) + right, left * 2)


class Chain(nn.Module):
    def __init__(self, kind: str, *, by_keyword: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList(Step(kind) for _ in range(3))
        self.kind, self.by_keyword = kind, by_keyword

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        packed = PACKERS[self.kind](x, x * x)
        for step in self.steps:
            packed = step(packed=packed) if self.by_keyword else step(packed)
        left, right = UNPACKERS[self.kind](packed)
        return left + right


def built(kind: str, **options: Any) -> Chain:
    torch.manual_seed(0)
    return Chain(kind, **options)


def sharded(model: Chain, **options: Any) -> Any:
    for step in model.steps:
        API.fully_shard(step, **options)
    return API.fully_shard(model, **options)


def assert_gradients_like(model: Any, plain: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Of two steps, averaged over the ranks."""
    world_size = dist.get_world_size()
    for step in range(2):
        generators = [torch.Generator().manual_seed(10 * step + rank) for rank in range(world_size)]
        inputs = [torch.randn(4, WIDTH, generator=generator) for generator in generators]
        loss(model, inputs[dist.get_rank()]).backward()
        for x in inputs:
            loss(plain, x).backward()
        mine = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        expected = {n: None if p.grad is None else p.grad / world_size for n, p in plain.named_parameters()}
        assert_same(f"gradients of step {step}", mine, expected, tolerance=SUM_ORDER)
        assert all(is_sharded(parameter) for parameter in model.parameters())
        for each in (model, plain):
            each.zero_grad()


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.full
@multi_rank(2)
@KINDS
@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
def test_gradients_flow_through_inputs_and_outputs_of_any_structure(kind: str, by_keyword: bool) -> None:
    model = sharded(built(kind, by_keyword=by_keyword))
    assert_gradients_like(model, built(kind, by_keyword=by_keyword), square)
    expected = type(PACKERS[kind](torch.ones(1), torch.ones(1)))
    assert all(seen is expected for step in model.steps for seen, _ in step.seen)


@pytest.mark.full
@multi_rank(2)
@KINDS
def test_structures_keep_their_types_when_they_are_cast(kind: str) -> None:
    policy = API.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = sharded(built(kind), mp_policy=policy)
    expected = type(PACKERS[kind](torch.ones(1), torch.ones(1)))
    output = model(torch.randn(2, WIDTH))
    assert output.dtype == torch.float32
    output.sum().backward()
    for step in model.steps:
        assert step.seen == [(expected, {torch.bfloat16})]


def check(
    make: type[nn.Module], *units: str, loss: Callable[[nn.Module, Tensor], Tensor] = square, **options: Any
) -> None:
    """Sharded in these units, made by ``make``, gradients are those of the plain module."""
    torch.manual_seed(0)
    plain = make()
    model: Any = copy.deepcopy(plain)
    for name in units:
        API.fully_shard(model.get_submodule(name), **options)
    assert_gradients_like(API.fully_shard(model), plain, loss)


@multi_rank(2)
def test_packed_sequences() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.gru = nn.GRU(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            output, _ = self.gru(pack_sequence([x[:3], x[3:]]))
            assert isinstance(output, PackedSequence)
            return output.data

    check(Recurrent, "gru")


@pytest.mark.full
@multi_rank(2)
def test_a_loss_of_only_some_outputs() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x), self.other(x)

    check(Split, "used", "other", loss=lambda each, x: each(x)[0].square().mean())
    check(Split, "used", "other", loss=lambda each, x: each(x)[1].square().mean())


@pytest.mark.full
@multi_rank(2)
def test_a_module_without_inputs_and_one_whose_inputs_need_no_gradient() -> None:
    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self) -> Tensor:
            return torch.tanh(self.table)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.last = Source(), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.source() * x)

    check(Net, "source", "last")


@multi_rank(2)
def test_outputs_that_need_no_gradient() -> None:
    """A frozen part: its output is detached, and nothing of it is gathered for backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.frozen(x)
            return self.last(x)

    check(Net, "frozen", "last")
