"""An exception at every line of the engine that a step runs, on all ranks: the next step is bitwise as if without."""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import FSDPModule, FSDPRuntimeError, MixedPrecisionPolicy, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of
from tests.harness.models import TRANSFORMER
from tests.harness.state import use_native_collectives

CASE = TRANSFORMER
PACKAGE = str(Path(fsdp2.__file__).parent)
# What moves parameters and gradients, and what decides when.
FILES = {
    str(Path(PACKAGE, name))
    for name in (
        *(f"core/{name}.py" for name in ("buffers", "gather", "gradients", "group", "hooks", "reduce", "root")),
        *(f"core/{name}.py" for name in ("schedule", "state", "streams", "transport")),
        *(f"features/{name}.py" for name in ("gloo_p2p", "packing")),
    )
}
Line = tuple[str, int, int]
"""File, line, and which of its executions in a step."""


class Boom(Exception):
    """What is thrown, beside KeyboardInterrupt."""


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


def sharded(kind: str) -> FSDPModule:
    arguments: dict[str, Any] = {}
    if kind == "hybrid":
        sizes = (2, dist.get_world_size() // 2)
        arguments["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    elif kind == "bfloat16":
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = CASE.build()
    for unit in CASE.units(model):
        fully_shard(unit, **arguments)
    assert isinstance(model, FSDPModule)
    return model


def loss_of(model: nn.Module, rank: int, micro: int) -> Tensor:
    return CASE.loss(model, CASE.batch(0, 99, rank, micro))


def step(model: FSDPModule, kind: str) -> None:
    rank = dist.get_rank()
    if kind == "accumulating":
        model.set_requires_gradient_sync(False)
        loss_of(model, rank, 1).backward()
        model.set_requires_gradient_sync(True)
    loss_of(model, rank, 2).backward()


def locals_of(model: nn.Module) -> list[Tensor]:
    return [each.grad.to_local().clone() for each in model.parameters() if each.grad is not None]


def assert_right(model: FSDPModule, kind: str) -> None:
    """What the next steps are compared with is what an unsharded model has."""
    if kind == "bfloat16":
        return  # its own rounding: other tests compare it
    plain, world_size = CASE.build(), dist.get_world_size()
    for rank in range(world_size):
        for micro in (1, 2) if kind == "accumulating" else (2,):
            (loss_of(plain, rank, micro) / world_size).backward()
    expected = {name: each.grad for name, each in plain.named_parameters()}
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=SUM_ORDER)


def check_all(kind: str, exception: type[BaseException], part: int) -> None:
    model = sharded(kind)
    for _ in range(3):
        model.zero_grad()
        step(model, kind)
    assert_right(model, kind)
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


KINDS = ("1D", "hybrid", "accumulating", "bfloat16")


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


@pytest.mark.full  # a minute each
@pytest.mark.parametrize("exception", [Boom, KeyboardInterrupt])
@multi_rank(2, timeout=400)
def test_every_line_with_torchs_own_collectives(exception: type[BaseException]) -> None:
    use_native_collectives()
    check_all("1D", exception, part=1)
