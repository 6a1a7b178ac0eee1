"""An exception at every line of the engine that a step runs, on all ranks: the next step is bitwise as if without."""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import FSDPModule, FSDPRuntimeError, MixedPrecisionPolicy
from tests.harness import multi_rank
from tests.harness.shared.ways import hybrid
from tests.harness.state import use_native_collectives
from tests.multi_rank.failures.helpers import Boom, assert_gradients, loss_of, sharded

PACKAGE = str(Path(fsdp2.__file__).parent)
# What moves parameters and gradients, and what decides when.
FILES = {
    str(Path(PACKAGE, name))
    for name in (
        *(f"core/{name}.py" for name in ("backward", "buffers", "gather", "gradients", "group", "prefetch", "reduce")),
        *(f"core/{name}.py" for name in ("root", "schedule", "state", "streams", "transport")),
        "plugs/transports/gloo_p2p.py",
        "plugs/memory/packing.py",
    )
}
Line = tuple[str, int, int]
"""File, line, and which of its executions in a step."""


@contextmanager
def tracing(at_line: Any) -> Iterator[None]:
    """``at_line(file, line)`` is called before each line of `FILES` that is run, and may raise."""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at_line(frame.f_code.co_filename, frame.f_lineno)
        return local

    def begin(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename in FILES else None

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(step: Any) -> list[Line]:
    """Each line that ``step`` runs: the first time, and the last."""
    runs: Counter[tuple[str, int]] = Counter()

    def note(file: str, line: int) -> None:
        runs[file, line] += 1

    with tracing(note):
        step()
    return [(file, line, which) for (file, line), count in runs.items() for which in sorted({1, count})]


@contextmanager
def raising_at(place: Line, exception: type[BaseException]) -> Iterator[None]:
    file, line, which = place
    left = which

    def throw(at_file: str, at_line: int) -> None:
        nonlocal left
        if at_line == line and at_file == file:
            left -= 1
            if left == 0:
                raise exception

    with tracing(throw):
        yield


def step(model: FSDPModule, kind: str) -> None:
    if kind == "accumulating":
        model.set_requires_gradient_sync(False)
        loss_of(model, 1).backward()
        model.set_requires_gradient_sync(True)
    loss_of(model, 2).backward()


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "1D": dict,
    "hybrid": hybrid,
    "accumulating": dict,
    "bfloat16": lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "torch's own collectives": dict,
}


def locals_of(model: nn.Module) -> list[Tensor]:
    return [each.grad.to_local().clone() for each in model.parameters() if each.grad is not None]


def check_all(kind: str, exception: type[BaseException], part: int) -> None:
    if kind == "torch's own collectives":
        use_native_collectives()
    model = sharded(**KINDS[kind]())
    for _ in range(3):
        model.zero_grad()
        step(model, kind)
    if kind != "bfloat16":  # its own rounding: other tests compare it
        assert_gradients(model, (1, 2) if kind == "accumulating" else (2,))
    expected = locals_of(model)
    model.zero_grad()
    places = lines_of(lambda: step(model, kind))
    model.zero_grad()
    assert len(places) > 300
    chosen = random.Random(7).sample(places, len(places) // part)
    thrown = 0
    for place in chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gradients that are lost with it
            try:
                with raising_at(place, exception):
                    step(model, kind)
            except (exception, FSDPRuntimeError):  # what comes out of a wait is told as such
                thrown += 1
            model.set_requires_gradient_sync(True)
            model.zero_grad()
            step(model, kind)
        found = locals_of(model)
        assert len(found) == len(expected), place
        assert all(map(torch.equal, found, expected)), place
        model.zero_grad()
    assert thrown > 0.9 * len(chosen)


@pytest.mark.parametrize("exception", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["1D", "hybrid"])
@multi_rank(2)
def test_some_lines(kind: str, exception: type[BaseException]) -> None:
    check_all(kind, exception, part=20)


@pytest.mark.full  # a minute each on 2 ranks, 5 on 4
@pytest.mark.parametrize("exception", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("kind", KINDS)
@multi_rank(2, 4, timeout=1200)
def test_every_line(kind: str, exception: type[BaseException]) -> None:
    check_all(kind, exception, part=1)
