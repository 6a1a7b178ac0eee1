"""The model of mixed programs: blocks that take, keep, write and return things in every way that Python has.

Owns what modules are called with and what they return; knows nothing of sharding.
"""

from __future__ import annotations

import contextlib
from collections import deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.multi_rank.combinations.helpers.mixed.programs import Mix

WIDTH, HIDDEN, BLOCKS = 4, 6, 3


class Boom(Exception):
    """What programs raise."""


# ---- carriers ------------------------------------------------------------------------------------


@dataclass
class Carrier:
    """A tensor, and what goes with it."""

    x: Tensor
    state: Any = None


Named = namedtuple("Named", ["x", "state"])


class Slotted:
    """Of which `vars` knows nothing."""

    __slots__ = ("state", "x")

    def __init__(self, x: Tensor, state: Any = None) -> None:
        self.x, self.state = x, state


def arguments(kind: str, x: Tensor, state: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with."""
    if kind == "tensor":
        return (x, state), {}
    if kind == "keywords":
        return (), {"x": x, "state": state}
    made: dict[str, Any] = {
        "tuple": lambda: (x, state),
        "list": lambda: [x, state],
        "dict": lambda: {"x": x, "state": state},
        "dataclass": lambda: Carrier(x, state),
        "namedtuple": lambda: Named(x, state),
        "slots": lambda: Slotted(x, state),
        "namespace": lambda: SimpleNamespace(x=x, inner=SimpleNamespace(state=state)),
    }
    return (made[kind](),), {}


def taken(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    """The tensor and the state that a module was called with."""
    if kind == "keywords":
        return kwargs["x"], kwargs["state"]
    if kind == "tensor":
        return args[0], args[1]
    (carrier,) = args
    if kind in ("tuple", "list"):
        return carrier[0], carrier[1]
    if kind == "dict":
        return carrier["x"], carrier["state"]
    if kind == "namespace":
        return carrier.x, carrier.inner.state
    return carrier.x, carrier.state


def given(kind: str, y: Tensor, module: Any) -> Any:
    """What a module returns."""
    if kind in ("attribute", "detached"):
        module.kept = y
        return None if kind == "attribute" else y.detach()
    made: dict[str, Any] = {
        "tensor": lambda: y,
        "tuple": lambda: (y, 3),
        "list": lambda: [y],
        "dict": lambda: {"y": y},
        "dataclass": lambda: Carrier(y),
        "namedtuple": lambda: Named(y, None),
        "slots": lambda: Slotted(y),
        "namespace": lambda: SimpleNamespace(inner=SimpleNamespace(y=y)),
        "set": lambda: {y},
        "deque": lambda: deque([y]),
        "closure": lambda: lambda: y,
    }
    return made[kind]()


def found(kind: str, output: Any, module: Any) -> Tensor:
    """The tensor that a module returned."""
    if kind in ("attribute", "detached"):
        return module.kept  # type: ignore[no-any-return]
    read: dict[str, Any] = {
        "tensor": lambda: output,
        "tuple": lambda: output[0],
        "list": lambda: output[0],
        "dict": lambda: output["y"],
        "dataclass": lambda: output.x,
        "namedtuple": lambda: output.x,
        "slots": lambda: output.x,
        "namespace": lambda: output.inner.y,
        "set": lambda: next(iter(output)),
        "deque": lambda: output[0],
        "closure": lambda: output(),
    }
    return read[kind]()  # type: ignore[no-any-return]


# ---- state that passes through -------------------------------------------------------------------


@dataclass
class Running:
    """What blocks add to."""

    last: Tensor | None = None
    count: int = 0
    all: list[Tensor] = field(default_factory=list)


def new_state(kind: str) -> Any:
    """What a forward begins with."""
    made = {"skips": list, "callers": list, "cache": dict, "dataclass": Running, "deque": deque}
    return made[kind]() if kind != "none" else None


def used(kind: str, state: Any, y: Tensor, index: int) -> Tensor:
    """What a block makes of its result and the state, to which it adds."""
    if kind in ("skips", "deque"):  # down, across, up
        if index == 0:
            state.append(y)
        elif index == BLOCKS - 1:
            y = y + state.pop().to(y.dtype)
    elif kind == "callers":
        state.append(y)
    elif kind == "cache":
        state[index] = y
        y = y + sum(state[earlier].to(y.dtype) for earlier in range(index)) / 4
    elif kind == "dataclass":
        if state.last is not None:
            y = y + state.last.to(y.dtype) / 2
        state.last = y
        state.count += 1
        state.all.append(y)
    return y


def left(kind: str, state: Any) -> list[Tensor]:
    """Tensors that a forward leaves in the state, for the loss."""
    if kind == "dataclass":
        assert state.count == BLOCKS and len(state.all) == BLOCKS and state.last is not None
        return [*state.all, state.last]
    if kind == "cache":
        assert list(state) == list(range(BLOCKS))
        return list(state.values())
    if kind == "callers":
        assert len(state) == BLOCKS
    return list(state or ())


# ---- modules -------------------------------------------------------------------------------------


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x.to(self.up.weight.dtype))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Computes in the dtype of its parameters, whatever it is given."""

    def __init__(self, mix: Mix, index: int) -> None:
        super().__init__()
        self.mix, self.index = mix, index
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.feed = Feed()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, state = taken(self.mix["inputs"], args, kwargs)
        x = x.to(self.gain.dtype)
        y = x * self.gain
        if self.mix["checkpoint"] != "no" and torch.is_grad_enabled():
            y = checkpoint(self.feed, y, use_reentrant=self.mix["checkpoint"] == "feed, reentrant")
        else:
            y = self.feed(y)
        y = used(self.mix["state"], state, x + y.to(x.dtype), self.index)
        return given(self.mix["outputs"], y, self)


class Mixed(nn.Module):
    """Input layer, blocks, head.

    Attributes:
        fails: whether the next forward raises at its end, and the backward of it at its own.
    """

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mix, index) for index in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)
        self.fails = self.fails_in_backward = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, state = taken(self.mix["inputs"], args, kwargs)
        x = self.inp(x.to(self.inp.weight.dtype))
        if self.fails_in_backward:
            x.register_hook(_boom)
        for block in self.blocks:
            args, kwargs = arguments(self.mix["inputs"], x, state)
            x = found(self.mix["outputs"], block(*args, **kwargs), block)
        y = self.head(x.to(self.head.weight.dtype))
        if self.fails:
            raise Boom
        if self.mix["result"] == "loss":
            y = y.square().mean()
        return given(self.mix["result"] if self.mix["result"] != "loss" else "tensor", y, self)


def _boom(gradient: Tensor) -> None:
    raise Boom


def called(model: Any, mix: Mix, x: Tensor, state: Any) -> Tensor:
    """The tensor that the model's forward gives."""
    args, kwargs = arguments(mix["inputs"], x, state)
    result = mix["result"] if mix["result"] != "loss" else "tensor"
    return found(result, model(*args, **kwargs), model)


def build(mix: Mix) -> Mixed:
    """The same parameters wherever it is built, in double precision: what differs then differs visibly."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(mix["seed"]))
        return Mixed(mix).double()


@contextlib.contextmanager
def failing(model: Any, name: str) -> Any:
    """The model raises, where ``name`` says."""
    setattr(model, name, True)
    try:
        yield
    finally:
        setattr(model, name, False)
