"""Drawn trees of inputs and outputs: what a module sees, what its caller has afterwards, and gradients.

The trees have tensors that occur twice, containers that occur twice or contain themselves, subclasses with rules of
their own, and objects that change when they are read.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import Tolerance, assert_sharded_same, gradients_of

WIDTH = 4
TREES = 60
SUMS = Tolerance(rtol=1e-5, atol=1e-6, reason="the gradients of a tensor with several uses add up in another order")

Point = namedtuple("Point", "x y")


class Named(Point):
    """A namedtuple with an attribute."""


class Tuple(tuple[Any, ...]):
    """A tuple made of two arguments."""

    def __new__(cls, first: Any, second: Any) -> Tuple:
        return super().__new__(cls, (first, second))


class OnlyAppends(list[Any]):
    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("only append")


class ReadOnly(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read-only")


class MovesToEnd(OrderedDict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)


class Decodes(Mapping[Any, Any]):
    """A mapping that counts how often it is read."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self.items_, self.reads = items, 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += 1
        return self.items_[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


@dataclass
class Node:
    value: Any
    others: list[Any] = field(default_factory=list)
    parent: Any = None


@dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any


def dict_of(kind: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    return lambda parts: kind({f"k{index}": part for index, part in enumerate(parts)})


def family(parts: list[Any]) -> Node:
    node = Node(parts[0], parts[1:])
    node.others.append(Node(parts[0], parent=node))
    return node


def with_attribute(parts: list[Any]) -> Named:
    made = Named(parts[0], parts[-1])
    made.note = "kept"  # type: ignore[attr-defined]
    return made


def containing_itself(parts: list[Any]) -> list[Any]:
    made = list(parts)
    made.append(made)
    return made


MAKERS: list[Callable[[list[Any]], Any]] = [
    list, tuple, deque, dict_of(dict), dict_of(OrderedDict), dict_of(lambda items: defaultdict(list, items)),
    dict_of(UserDict), dict_of(Decodes), dict_of(ReadOnly), dict_of(MovesToEnd), OnlyAppends, with_attribute, family,
    lambda parts: Point(parts[0], parts[-1]), lambda parts: Tuple(parts[0], parts[-1]),
    lambda parts: Frozen(parts[0], parts[-1]), lambda parts: SimpleNamespace(a=parts[0], rest=parts[1:]),
    containing_itself,
]  # fmt: skip


def drawn_tree(seed: int, tensors: list[Tensor]) -> Any:
    """A tree whose leaves are some of ``tensors``, numbers, names, None; parts of it may occur twice."""
    draw = random.Random(seed)
    made: list[Any] = []

    def build(depth: int) -> Any:
        chance = draw.random()
        if made and chance < 0.1:
            return draw.choice(made)
        if depth == 0 or chance < 0.45:
            return draw.choice([*tensors, *tensors, 3, "name", None])
        part = draw.choice(MAKERS)([build(depth - 1) for _ in range(draw.randint(1, 3))])
        made.append(part)
        return part

    return draw.choice(MAKERS)([draw.choice(tensors), *(build(3) for _ in range(3))])


FOREIGN = (deque, Decodes, ReadOnly, MovesToEnd, OnlyAppends, Named, Tuple, SimpleNamespace)
"""What fully_shard leaves as it is, unread: the tensors in it are the caller's own, not what goes through autograd."""


class Walk:
    """Describes a tree: classes, values, which objects are the same; and collects its tensors in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tensors: list[Tensor] = []
        self._seen: dict[Any, int] = {}
        self._kept: list[Any] = []

    def of(self, value: Any, path: str = "", is_own: bool = True) -> Walk:
        if value is None or isinstance(value, int | str):
            self.lines.append(f"{path}: {value}")
            return self
        is_foreign = isinstance(value, Tensor) and not is_own
        identity = (is_own, value.data_ptr() if is_foreign else id(value))
        is_own = is_own and not isinstance(value, FOREIGN)
        is_known = identity in self._seen
        number = self._seen.setdefault(identity, len(self._seen))
        self._kept.append(value)
        self.lines.append(f"{path}: {type(value).__name__} number {number}")
        if is_known:
            return self
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.lines.append(f"{path}: {getattr(value, 'note', '')} {value.requires_grad} {value.dtype}")
        elif isinstance(value, Mapping):
            for key in value:
                self.of(value[key], f"{path}[{key}]", is_own)
        elif isinstance(value, list | tuple | deque):
            for index, each in enumerate(value):
                self.of(each, f"{path}[{index}]", is_own)
        if hasattr(value, "__dict__") and not isinstance(value, Tensor | UserDict):
            for name, each in vars(value).items():
                self.of(each, f"{path}.{name}", is_own)
        return self


class Mixer(nn.Module):
    """Multiplies what it finds by its weight, and returns a drawn tree of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[str] = []

    def forward(self, tree: Any, again: Any, seed: int) -> Any:
        walk = Walk().of([tree, again])
        self.seen = walk.lines
        outputs = [torch.tanh(self.linear(each)) for each in walk.tensors]
        outputs.append(walk.tensors[0].clone())
        return drawn_tree(seed, outputs)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mixer(), Mixer()

    def forward(self, tree: Any, seed: int) -> Any:
        return self.second(self.first(tree, again=tree, seed=seed + 1), tree, seed + 2)


def run(model: Any, seed: int) -> tuple[list[list[str]], list[Tensor | None]]:
    """What both modules saw, what came out, and what the caller has; and gradients of inputs."""
    values = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(3, WIDTH, generator=values, requires_grad=index != 1) for index in range(3)]
    tensors[0].note = "a note"  # type: ignore[attr-defined]
    tree = drawn_tree(seed, tensors)
    output = Walk().of(model(tree, seed))
    losses = [each.square().sum() for each in output.tensors if each.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    lines = [model.first.seen, model.second.seen, output.lines, Walk().of(tree).lines]
    return lines, [each.grad for each in tensors]


def inner(model: Outer, **arguments: Any) -> nn.Module:
    for each in (model.first, model.second):
        fully_shard(each, **arguments)
    return fully_shard(model, **arguments)


WAYS: dict[str, Callable[[Outer], nn.Module]] = {
    "default": inner,
    "root": fully_shard,
    "keep": lambda model: inner(model, reshard_after_forward=False),
    "offload": lambda model: inner(model, offload_policy=CPUOffloadPolicy()),
    "fp32 policy": lambda model: inner(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32)),
}


@multi_rank(2)
@pytest.mark.parametrize("way", WAYS)
def test_drawn_trees_are_seen_as_they_are(way: str) -> None:
    torch.manual_seed(0)
    plain = Outer()
    model = WAYS[way](copy.deepcopy(plain))
    for seed in range(TREES):
        plain.zero_grad()
        model.zero_grad()
        expected_lines, expected = run(plain, seed)
        lines, gradients = run(model, seed)
        assert lines == expected_lines, f"tree {seed}"
        for mine, reference in zip(gradients, expected, strict=True):
            assert (mine is None) is (reference is None), f"tree {seed}"
            assert mine is None or torch.allclose(mine, reference, rtol=1e-5, atol=1e-6), f"tree {seed}"
        assert_sharded_same(f"gradients of tree {seed}", gradients_of(model), gradients_of(plain), tolerance=SUMS)
